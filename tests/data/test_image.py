"""Image files are read as Pillow, TensorFlow and NumPy read them."""

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import tensorflow as tf
from containers import file_of_others
from pictures import chunk, file_of, gif, png, random_pixels, tiff
from PIL import Image, ImageOps

from towers.data.files.image import inspect, read_image, source_box

RGB, RGBA = (Image.fromarray(random_pixels(c, 9, 7, c)) for c in (3, 4))
DEEP = Image.fromarray(random_pixels(2, 9, 7, 1, np.uint16)[..., 0])


def by_pillow(content):
    """The upright image in colors."""
    with Image.open(io.BytesIO(content)) as image:
        return ImageOps.exif_transpose(image).convert("RGBA").convert("RGB")


def decode(content, channels=3, **options):
    """The whole image, in its own size."""
    shape = *inspect(content, **options)[0], channels
    return read_image(content, shape, resize=False, **options)


def smooth(height, width):
    """Straight lines of values, of which JPEG loses little, and whose mean around a
    place is the value there; no two corners are alike."""
    rows, columns = np.mgrid[:height, :width]
    image = [255 * rows / height, 255 * columns / width, 127 + 0 * rows]
    return Image.fromarray(np.rint(np.stack(image, -1)).astype(np.uint8))


# Formats and modes.


@pytest.mark.parametrize(
    "kind,image,options",
    [
        *(("PNG", RGBA.convert(mode), {}) for mode in ("1", "L", "LA", "P", "RGB")),
        ("PNG", RGBA, {}),
        ("PNG", RGB.quantize(8), {"transparency": 3}),
        ("PNG", RGB.quantize(2), {"bits": 1}),
        ("PNG", RGB, {"save_all": True, "append_images": [RGBA]}),
        *(("BMP", RGBA.convert(mode), {}) for mode in ("1", "L", "P", "RGB")),
        ("BMP", RGBA, {}),
        ("WEBP", RGB, {"lossless": True}),
        ("WEBP", RGBA, {"lossless": True, "exact": True}),
        ("WEBP", RGB, {"lossless": True, "save_all": True, "append_images": [RGBA]}),
        ("WEBP", smooth(24, 40), {"quality": 90}),
        ("GIF", RGB.quantize(8), {}),
        ("GIF", RGB.quantize(8), {"save_all": True, "append_images": [RGB]}),
        *(("JPEG", smooth(24, 40).convert(mode), {}) for mode in ("L", "RGB", "CMYK")),
        ("JPEG", smooth(24, 40), {"progressive": True}),
        ("JPEG", smooth(25, 41), {"subsampling": 0, "comment": "one"}),
        ("JPEG", smooth(25, 41), {"subsampling": 1, "restart_marker_rows": 1}),
        ("JPEG", smooth(25, 41), {"keep_rgb": True}),
        ("TIFF", RGB, {"compression": "tiff_lzw"}),
        *(("TIFF", x, {}) for x in (RGB.convert("CMYK"), RGB.quantize(8), RGBA)),
        ("AVIF", smooth(24, 40), {"quality": 90}),
        *(("HEIF", smooth(24, 40).convert(x), {"quality": 90}) for x in ("L", "RGB")),
        *(("PPM", RGBA.convert(mode), {}) for mode in ("1", "L", "RGB")),
        *(("TGA", RGBA.convert(mode), {}) for mode in ("L", "P", "RGB", "RGBA")),
        *((kind, RGB, {}) for kind in ("DIB", "PCX", "SGI", "QOI", "DDS")),
        ("JPEG2000", RGB, {}),
        ("ICO", RGBA, {"sizes": [(7, 9)]}),
        ("ICO", RGBA, {"sizes": [(7, 9)], "bitmap_format": "bmp"}),
    ],
    ids=lambda x: x.mode if isinstance(x, Image.Image) else x if x else "",
)
@pytest.mark.row(23)
def test_row_23_every_mode_is_read_as_pillow_reads_it(kind, image, options):
    if kind not in Image.SAVE:
        pytest.skip(f"Pillow is built without {kind}")
    content = file_of(image, kind, **options)
    np.testing.assert_array_equal(decode(content), by_pillow(content))
    gray = np.asarray(by_pillow(content).convert("L"))
    assert np.abs(decode(content, 1)[..., 0].astype(int) - gray).max() <= 1


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_of_16_bits_the_upper_8_are_kept(kind):
    expected = np.asarray(DEEP)[..., None].repeat(3, 2) >> 8
    np.testing.assert_array_equal(decode(file_of(DEEP, kind)), expected)
    pgm = b"P5 # gray\n7 9 65535\n" + np.asarray(DEEP).astype(">u2").tobytes()
    np.testing.assert_array_equal(decode(pgm), expected)
    twelve = np.asarray(DEEP) % 4096
    pgm = b"P5 7 9 4095\n" + twelve.astype(">u2").tobytes()
    np.testing.assert_array_equal(decode(pgm, 1)[..., 0], twelve >> 4)
    deep = random_pixels(1, channels=3, dtype=np.uint16)
    np.testing.assert_array_equal(decode(png(deep)), deep >> 8)
    with pytest.raises(ValueError, match="float32, and the images are read as 3"):
        decode(file_of(Image.fromarray(np.ones((3, 4), np.float32)), "TIFF"))


# Tags of TIFF 6.0.
BITS, COMPRESSION, PHOTOMETRIC, SAMPLES, PLANAR = 258, 259, 262, 277, 284
EXTRA, FORMAT, SUBSAMPLING = 338, 339, 530
DEFLATE = {COMPRESSION: [8]}
DEEP_RGB, DEEP_CMYK = (random_pixels(c, 9, 7, c, np.uint16) for c in (3, 4))


def planes_in_tiff(pixels, tags):
    """A TIFF file of [height, width, channels], by default not compressed."""
    height, width, count = pixels.shape
    own = {BITS: [8 * pixels.itemsize] * count, SAMPLES: [count], PLANAR: [2]}
    planes = [x.tobytes() for x in np.moveaxis(pixels, -1, 0)]
    if COMPRESSION in tags:
        planes = [zlib.compress(x) for x in planes]
    return tiff(
        planes, width, height, {PHOTOMETRIC: [2], COMPRESSION: [1]} | own | tags
    )


def test_16_bits_of_a_tiff_file_are_inverted_if_white_is_zero():
    deep = DEEP_RGB[..., :1]
    content = planes_in_tiff(deep, {PHOTOMETRIC: [0], PLANAR: [1]})
    np.testing.assert_array_equal(decode(content, 1), 255 - (deep >> 8))


def test_of_12_bits_of_a_tiff_file_the_upper_8_are_kept():
    twelve = random_pixels(3, 8, 6, 1, np.uint16) >> 4
    bits = np.unpackbits(twelve.astype(">u2").view(np.uint8)).reshape(-1, 16)[:, 4:]
    tags = {BITS: [12], COMPRESSION: [1], PHOTOMETRIC: [1], SAMPLES: [1]}
    content = tiff([np.packbits(bits).tobytes()], 6, 8, tags)
    np.testing.assert_array_equal(decode(content, 1), twelve >> 4)


# For each of these Pillow 13.0 gives other pixels without an error: some are read by
# tifffile, and the others refused.
MISREAD = [
    (DEEP_RGB >> 8, DEEP_RGB, {}),
    (255 - np.asarray(RGB)[..., :1], np.asarray(RGB)[..., :1], {PHOTOMETRIC: [0]}),
    (DEEP_RGB >> 8, DEEP_RGB, DEFLATE | {PHOTOMETRIC: [1], EXTRA: [0, 0]}),
    ("float32", np.asarray(RGB)[..., :1], {PHOTOMETRIC: [1], FORMAT: [2], PLANAR: [1]}),
    ("thumbnail", np.asarray(RGB), DEFLATE | {PHOTOMETRIC: [2], 254: [1]}),
    ("planar LAB", np.asarray(RGB), DEFLATE | {PHOTOMETRIC: [8]}),
    (
        "YCbCr",
        np.asarray(RGB).reshape(9, 21, 1),
        {
            BITS: [8] * 3,
            SAMPLES: [3],
            PLANAR: [1],
            PHOTOMETRIC: [6],
            SUBSAMPLING: [2, 2],
        }
        | {256: [7]},
    ),
]


@pytest.mark.parametrize("expected, pixels, tags", MISREAD)
@pytest.mark.row(23)
def test_row_23_a_tiff_file_that_pillow_misreads_is_right_or_refused(
    expected, pixels, tags
):
    content = planes_in_tiff(pixels, tags)
    by_pillow(content)  # without an error
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            decode(content)
    else:
        actual = decode(content)
        np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))


COMMON = "PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF"


@pytest.mark.parametrize("kind", [*COMMON, "PPM", "TGA", "DIB", "JPEG2000", "SGI"])
def test_a_file_that_breaks_off_is_refused(kind):
    content = file_of(RGB, kind)
    for cut in (1, 4, 12, 20, len(content) // 2):
        with pytest.raises(ValueError, match="cannot be decoded: ") as caught:
            decode(content[:cut])
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.row(23)
def test_row_23_a_jpeg_that_lacks_its_end_marker_alone_is_read(mode):
    content = file_of(smooth(150, 260).convert(mode), "JPEG", quality=90)
    for cut in (1, 2):
        np.testing.assert_array_equal(decode(content[:-cut]), decode(content))
        small = read_image(content[:-cut], (16, 16, 3))
        np.testing.assert_array_equal(small, read_image(content, (16, 16, 3)))
    if mode != "CMYK":
        read = tf.io.decode_jpeg(content[:-2], 3, try_recover_truncated=True).numpy()
        assert np.abs(read.astype(int) - decode(content[:-2])).max() <= 5
    for cut in (4, 40, len(content) // 2):
        with pytest.raises(ValueError, match="image file is truncated"):
            decode(content[:-cut])


def test_a_progressive_jpeg_of_whole_scans_that_breaks_off_is_refused():
    content = file_of(smooth(150, 260), "JPEG", progressive=True)
    scans = [i for i in range(len(content)) if content[i : i + 2] == b"\xff\xda"]
    assert len(scans) > 5
    for scan in scans[1:]:
        tables = content.rfind(b"\xff\xc4", 0, scan)
        for end in (scan, tables if tables > scans[0] else scan):
            with pytest.raises(ValueError, match="image file is truncated"):
                decode(content[:end])


def test_a_changed_bit_of_a_png_file_never_changes_pixels_in_silence():
    content = png(random_pixels(0))
    for place in range(8, len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        try:
            image = decode(bytes(changed))
        except ValueError:
            continue
        np.testing.assert_array_equal(image, random_pixels(0))


@pytest.mark.row(40)
def test_row_40_no_other_decoder_of_pillow_is_reached():
    contents = [file_of(RGB, kind) for kind in ("EPS", "ICNS", "SPIDER")]
    windows_metafile = b"\xd7\xcd\xc6\x9a" + bytes(40)
    for content in (*contents, windows_metafile, b"SIMPLE  = T", b"\x89HDF\r\n\x1a\n"):
        with pytest.raises(ValueError, match="cannot be decoded: it is not a JPEG"):
            decode(content)


def test_without_the_extra_a_heic_photo_names_it():
    if "HEIF" in Image.OPEN:
        pytest.skip("pillow-heif is installed")
    for brands in (b"heic\0\0\0\0mif1heic", b"mif1\0\0\0\0heix", b"hevc\0\0\0\0mif1"):
        content = struct.pack(">I", 8 + len(brands)) + b"ftyp" + brands + bytes(99)
        with pytest.raises(ValueError, match=r"HEIC photo; .*extra heif .*pillow-heif"):
            decode(content)


# Limits (row 40).


def huge_png():
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", bytes(99))


def huge_jpeg():
    content = file_of(RGB, "JPEG")
    place = content.index(b"\xff\xc0") + 5  # of the height in the frame header
    return content[:place] + struct.pack(">HH", 60_000, 50_000) + content[place + 4 :]


def huge_bmp():
    content = file_of(RGB, "BMP")
    return content[:18] + struct.pack("<ii", 30_000, -30_000) + content[26:]


@pytest.mark.parametrize(
    "content,words",
    [
        (huge_png(), "has 400,000,000 pixels"),
        (huge_jpeg(), "has 3,000,000,000 pixels"),
        (gif(1, 1)[:6] + b"\xff\xff\xff\xff" + gif(1, 1)[10:], "has 4,294,836,225 pi"),
        (huge_bmp(), "has 900,000,000 pixels"),
        (
            file_of(Image.new("1", (9_000, 9_000)), "TIFF", compression="group4"),
            "has 81",
        ),
    ],
    ids=["png", "jpeg", "gif", "bmp", "tiff"],
)
@pytest.mark.row(40)
def test_row_40_a_huge_image_is_refused_at_once(content, words):
    tracemalloc.start()
    with pytest.raises(ValueError, match=words):
        read_image(content, (8, 8, 3))
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


# Orientation.

SAVED = {"JPEG": {"quality": 95}, "PNG": {}, "WEBP": {"lossless": True}, "TIFF": {}}
SAVED["AVIF"] = {"quality": 95}
each_orientation = pytest.mark.parametrize("orientation", range(1, 9))
each_format = pytest.mark.parametrize("kind", SAVED)


def photo(image, kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file_of(image, kind, exif=exif, **SAVED[kind])


@each_format
@each_orientation
@pytest.mark.row(23)
def test_row_23_a_photo_is_turned_as_pillow_turns_it(kind, orientation):
    content = photo(smooth(150, 260), kind, orientation)
    expected = by_pillow(content)
    assert inspect(content)[0] == expected.size[::-1]
    assert expected.height == (260 if orientation > 4 else 150)
    np.testing.assert_array_equal(decode(content), expected)
    for shape in ((16, 16, 3), (16, 30, 3)):
        fitted = ImageOps.fit(expected, shape[1::-1], Image.Resampling.BILINEAR)
        found = read_image(content, shape)
        assert np.abs(found.astype(int) - fitted).max() <= 2


@pytest.mark.parametrize(
    "options",
    [
        {"fit": "crop"},
        {"fit": "crop", "center_crop": 0.8},
        {"fit": "pad"},
        {"fit": "stretch"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("size", [(101, 160), (160, 101), (24, 20), (13, 90)])
def test_pixels_of_a_resized_photo_are_found_in_the_photo(size, options):
    """`source_box` says where an image came from: its pixels are found again there."""
    columns, rows = np.meshgrid(*(np.arange(x) + 0.5 for x in size[::-1]))
    places = np.stack([rows / size[0], columns / size[1], 0 * rows], -1) * 255
    for orientation in (1, 6):
        turned = Image.fromarray(np.rint(places).astype(np.uint8))
        if orientation == 6:
            turned = turned.transpose(Image.Transpose.ROTATE_90)
        content = photo(turned, "PNG", orientation)
        image = read_image(content, (24, 36, 3), **options).astype(float)
        top, left, height, width = source_box(size, (24, 36), **options)
        expected_rows = (top + (np.arange(24) + 0.5) / 24 * height) / size[0] * 255
        expected_columns = (left + (np.arange(36) + 0.5) / 36 * width) / size[1] * 255
        is_inside = image.any(-1)[1:-1, 1:-1]
        error = np.abs(image[..., 0] - expected_rows[:, None])[1:-1, 1:-1] * is_inside
        assert error.max() <= max(2, 255 / size[0])
        error = np.abs(image[..., 1] - expected_columns)[1:-1, 1:-1] * is_inside
        assert error.max() <= max(2, 255 / size[1])


# Sizes.


@pytest.mark.parametrize(
    "height,width,size", [(375, 500, 64), (403, 1201, 50), (127, 300, 64)]
)
def test_a_reduced_scale_shows_what_the_whole_image_does(height, width, size):
    content = file_of(smooth(height, width), "JPEG", quality=100, subsampling=0)
    actual = read_image(content, (size, size, 3)).astype(int)
    bilinear = Image.Resampling.BILINEAR
    differences = actual - ImageOps.fit(by_pillow(content), (size, size), bilinear)
    assert np.abs(differences).max() <= 2
    # Moved by half a pixel at full scale it would be 0.3.
    assert np.abs(differences.mean((0, 1))).max() < 0.25


@pytest.mark.parametrize(
    "name, bands",
    [("three.tif", [0, 1, 2]), ("four.tif", [0, 1, 2]), ("pages.tif", [0])],
)
def test_gray_images_that_tifffile_stacks_are_colors_unless_they_are_pages(name, bands):
    """`files_of_others.json` has what `imwrite` of tifffile 2026.3.3 makes of uint8 [3,
    4, 5] and [4, 4, 5]; pages with `photometric="minisblack"`."""
    expected = np.moveaxis(np.arange(80).reshape(4, 4, 5)[bands], 0, -1)
    actual = decode(file_of_others(name))
    np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("size", [(30, 90), (77, 40), (51, 50), (726, 408), (200, 9)])
@pytest.mark.parametrize("shape", [(32, 32, 3), (24, 40, 1), (48, 20, 3)])
def test_pad_and_stretch_keep_the_whole_image_as_pillow_does(size, shape, orientation):
    mode, target = ("RGB" if shape[2] == 3 else "L"), (shape[1], shape[0])
    # Less contrast, so that nothing is clipped between the rows and the columns.
    image = Image.fromarray(
        np.random.default_rng(0).integers(64, 192, (*size, 3), "u1")
    )
    content = photo(image, "PNG", orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert(mode)
    by_pillow = {
        "pad": ImageOps.pad(upright, target, Image.Resampling.BILINEAR),
        "stretch": upright.resize(target, Image.Resampling.BILINEAR),
    }
    for fit, expected in by_pillow.items():
        actual = read_image(content, shape, fit=fit).astype(int)
        differences = np.abs(actual - np.asarray(expected).reshape(shape))
        # A turned photo is resized before it is turned; its rows are rounded first.
        assert differences.max() <= 2 * (orientation != 1), fit


def test_random_crops_are_cut_from_the_padded_image():
    image = np.full((20, 80, 3), 200, np.uint8)
    content = png(image)
    whole = read_image(content, (40, 40, 3), lambda h, w: (0, 0, h, w), fit="pad")
    np.testing.assert_array_equal(whole, read_image(content, (40, 40, 3), fit="pad"))
    # In the canvas of 80x80 the image fills the rows 30 to 49.
    part = read_image(content, (40, 40, 3), lambda h, w: (20, 8, 40, 40), fit="pad")
    np.testing.assert_array_equal(np.flatnonzero(part.any((1, 2))), np.arange(10, 30))
    # A crop above the image is moved until its center is in the image.
    part = read_image(content, (40, 40, 3), lambda h, w: (0, 0, 10, 10), fit="pad")
    np.testing.assert_array_equal(np.flatnonzero(part.any((1, 2))), np.arange(20, 40))
    part = read_image(content, (40, 40, 3), lambda h, w: (0, 0, 10, 10), fit="stretch")
    assert part.min() == 200
