"""Files of all modes against Pillow; JPEG files at a reduced scale."""

import io

import numpy as np
import pytest
import tensorflow as tf
from pictures import random_pixels
from PIL import Image, ImageOps

from towers.data import pixels, resizing
from towers.data.decoding import Decoding
from towers.data.headers import Header
from towers.data.pixels import decode, read_image
from towers.data.resizing import fit

RGBA = Image.fromarray(random_pixels(0, 9, 7, 4))
RGB = Image.fromarray(random_pixels(1, 9, 7))
DEEP = Image.fromarray(random_pixels(2, 9, 7, 1, np.uint16)[..., 0])


def file_of(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    "kind,image,options",
    [
        *(("PNG", RGBA.convert(mode), {}) for mode in ("1", "L", "LA", "P", "RGB")),
        ("PNG", RGBA, {}),
        ("PNG", RGB.quantize(8), {"transparency": 3}),
        ("PNG", RGB.quantize(2), {"bits": 1}),
        *(("BMP", RGBA.convert(mode), {}) for mode in ("1", "L", "P", "RGB")),
        ("BMP", RGBA, {}),
        ("WEBP", RGB, {"lossless": True}),
        ("WEBP", RGBA, {"lossless": True, "exact": True}),
        ("GIF", RGB.quantize(8), {}),
    ],
    ids=lambda x: x.mode if isinstance(x, Image.Image) else x if x else "",
)
def test_every_mode_is_read_as_pillow_reads_it(kind, image, options):
    content = file_of(image, kind, **options)
    expected = Image.open(io.BytesIO(content)).convert("RGBA").convert("RGB")
    np.testing.assert_array_equal(decode(content, 3), expected)


def test_of_16_bits_the_upper_8_are_kept():
    expected = np.asarray(DEEP)[..., None].repeat(3, 2) >> 8
    np.testing.assert_array_equal(decode(file_of(DEEP, "PNG"), 3), expected)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}])
def test_jpeg_files_are_read_nearly_as_pillow_reads_them(mode, options):
    content = file_of(photo(24, 40).convert(mode), "JPEG", quality=95, **options)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    assert np.abs(decode(content, 3).astype(int) - expected).max() <= 5


def test_lossy_webp_is_read_nearly_as_pillow_reads_it():
    content = file_of(photo(24, 40), "WEBP", quality=90)
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    assert np.abs(decode(content, 3).astype(int) - expected).max() <= 1


@pytest.mark.parametrize("cut", [20, 40, 60, 100])
def test_a_bmp_file_that_breaks_off_is_refused(cut):
    with pytest.raises(ValueError, match="cannot be decoded"):
        decode(file_of(RGB, "BMP")[:cut], 3)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "WEBP", "GIF"])
def test_the_limit_of_pixels_holds_for_every_format(kind):
    content = file_of(RGB, kind)
    decode(content, 3, Decoding(max_pixels=2 * 63))
    for call in (decode, lambda *args: read_image(args[0], (4, 4, 3), args[2])):
        with pytest.raises(ValueError, match="at most max_image_pixels=62 "):
            call(content, 3, Decoding(image_size=4, max_pixels=62))


def test_formats_that_tensorflow_decodes_to_colors_only_become_gray():
    file = file_of(RGB.quantize(8), "GIF")
    expected = Image.open(io.BytesIO(file)).convert("RGB").convert("L")
    np.testing.assert_array_equal(decode(file, 1)[..., 0], expected)
    file = file_of(photo(60, 200).convert("CMYK"), "JPEG", quality=95)
    expected = Image.open(io.BytesIO(file)).convert("RGB").convert("L")
    assert np.abs(decode(file, 1)[..., 0].astype(int) - expected).max() <= 5
    found = read_image(file, (10, 10, 1), Decoding(image_size=10))[..., 0]
    expected = ImageOps.fit(expected, (10, 10), Image.Resampling.BILINEAR)
    assert np.abs(found.astype(int) - expected).max() <= 5


# Sizes.


@pytest.mark.parametrize("shape", [(4, 900), (900, 4), (40, 900), (300, 300)])
def test_of_a_long_image_only_the_middle_is_scaled(monkeypatch, shape):
    """A line of 50,000,000 pixels, each column enlarged, would take gigabytes."""
    shapes = []

    def crop_resized(image, *args):
        shapes.append(tuple(image.shape[:2]))
        return original(image, *args)

    original = resizing.crop_resized
    monkeypatch.setattr(resizing, "crop_resized", crop_resized)
    image = random_pixels(0, *shape)
    expected = ImageOps.fit(Image.fromarray(image), (16, 16), Image.Resampling.BILINEAR)
    found = fit(image, (16, 16), 16)
    assert np.abs(found.astype(int) - np.asarray(expected)).max() <= 2
    assert max(shapes[0]) <= min(shape) * 1.2 + 6


# Reduced scales.


def photo(height, width):
    """Straight lines of values, whose mean around a place is the value there."""
    rows, columns = np.mgrid[:height, :width]
    image = [255 * rows / height, 255 * columns / width, 127 + 0 * rows]
    return Image.fromarray(np.rint(np.stack(image, -1)).astype(np.uint8))


SIZES = [
    # height, width, image_size, ratio, whether all of the image is decoded
    (375, 500, 64, 2, True),
    (512, 513, 32, 8, True),
    (1201, 403, 50, 4, False),
    (403, 1201, 50, 4, False),
    (127, 300, 64, 1, True),
]


@pytest.mark.parametrize("height,width,size,ratio,is_whole", SIZES)
def test_a_reduced_image_shows_what_the_whole_one_does(
    height, width, size, ratio, is_whole
):
    content = file_of(photo(height, width), "JPEG", quality=100, subsampling=0)
    window = pixels._reduced(Header("JPEG", height, width, height * width), size)
    assert ((window.ratio, window.is_whole) if window else (1, True)) == (
        ratio,
        is_whole,
    )
    actual = read_image(content, (size, size, 3), Decoding(image_size=size))
    if not window:
        whole = fit(decode(content, 3), (size, size), size)
        np.testing.assert_array_equal(actual, whole)
        return
    # By default TensorFlow decodes whole images by a faster, less accurate transform.
    whole = tf.io.decode_jpeg(content, dct_method="INTEGER_ACCURATE")
    differences = actual.astype(int) - fit(whole, (size, size), size)
    assert np.abs(differences).max() <= 1
    # Moved by half a pixel at full scale it would be 0.3.
    assert np.abs(differences.mean((0, 1))).max() < 0.25


def test_less_is_decoded_for_a_reduced_image(monkeypatch):
    shapes = []

    def middle(image, *args):
        shapes.append(tuple(image.shape))
        return np.zeros((50, 50, 3), np.uint8)

    monkeypatch.setattr(pixels, "middle", middle)
    for height, width, size, *_ in SIZES[2:4]:
        content = file_of(photo(height, width), "JPEG")
        read_image(content, (size, size, 3), Decoding(image_size=size))
    # The square of 101 pixels, and what the filter reaches beyond it.
    assert shapes == [(108, 101, 3), (101, 108, 3)]


def test_a_reduced_image_is_the_same_every_time():
    content = file_of(Image.fromarray(random_pixels(0, 300, 700)), "JPEG")
    first, second = (
        read_image(content, (32, 32, 3), Decoding(image_size=32)) for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    with pytest.raises(ValueError, match="cannot be decoded"):
        read_image(content[:3000], (32, 32, 3), Decoding(image_size=32))
