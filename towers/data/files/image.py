"""Image files, read by Pillow: decoded, turned upright, cropped and resized."""

import contextlib
import io
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from PIL import ExifTags, Image
from PIL.IcoImagePlugin import IcoFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TgaImagePlugin import TgaImageFile
from PIL.TiffImagePlugin import TiffImageFile

from towers.config.choices import MAX_IMAGE_PIXELS
from towers.data.files.paths import FORMATS_TEXT, HEIF_HINT, format_of, is_heif
from towers.data.files.reading import LFS, LFS_HINT
from towers.data.streams import Memory
from towers.messages import one_line

# A JPEG file is decoded at the smallest scale of libjpeg that has this many times the
# wanted size, as in Pillow's `thumbnail`; the filter does the rest.
OVERSAMPLING = 2
RATIOS = (8, 4, 2, 1)
# Filters of --interpolation.
FILTERS = {
    "auto": Image.Resampling.BILINEAR,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
END_OF_JPEG = b"\xff\xd9"

# Maximum size in bytes of the images that are decoded at the same time.
MAX_PIXEL_BYTES = 2 * 10**9
memory = Memory(MAX_PIXEL_BYTES)

# EXIF orientation -> what turns the image upright, as `ImageOps.exif_transpose`.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (5, 6, 7, 8)  # their rows and columns are exchanged

SAVE_HINT = "save it as gray or RGB of 8 bits"
COMPRESS_HINT = (
    "after `pip install tifffile`, in Python: tifffile.imwrite('NEW', tifffile.imread("
    "'FILE'), photometric={}, planarconfig=2, extrasamples={}, compression='zlib')"
)


class Refused(ValueError):
    """An image that is not read; the message follows its name."""


# (height, width) of an image -> (top, left, height, width) of a part.
Crop = Callable[[int, int], Sequence[float]]


def read_image(
    content: bytes,
    shape: tuple[int, int, int],
    crop: Crop | None = None,
    *,
    resize: bool = True,
    center_crop: float = 0.0,
    interpolation: str = "auto",
    fit: str = "auto",
    max_pixels: int = MAX_IMAGE_PIXELS,
    note_size: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Return an image, uint8 of the shape, resized with an antialiasing filter.

    The content determines the format; only the first frame is read, transparency is
    dropped and of 16 bits the upper 8 are kept. `fit` gives the upright image the
    proportions of the shape: "crop" or "auto" takes the largest part in the middle, or
    the fraction `center_crop` of it, "pad" adds black borders as `PIL.ImageOps.pad`
    does, and "stretch" changes the proportions. `crop` gives another part, of what
    `fit` makes. `note_size` takes the height and width of the upright image. Raises
    ValueError if it is damaged, too large, or of another size and `resize` is False.
    """
    height, width, channels = shape
    is_whole = crop is None and center_crop in (0, 1)
    if is_whole and channels == 3 and _plain_jpeg_size(content) == (height, width):
        with contextlib.suppress(ValueError):  # the full reader reports the reason
            # Half of the time that JpegImageFile takes for a small image.
            image = Image.frombytes("RGB", (width, height), content, "jpeg", "RGB", "")
            if note_size is not None:
                note_size(height, width)
            return np.asarray(image)
    with opened(content, max_pixels) as image:
        full_size, orientation = _inspect(image)
        if note_size is not None:
            note_size(*full_size)
        if is_whole and full_size == (height, width):
            pixels = _pixels(image, channels)
            return np.asarray(_upright(pixels, orientation)).reshape(shape)
        if not resize:
            raise Refused(
                f"is {full_size[0]}x{full_size[1]} (height x width), expected "
                f"{height}x{width}; --image_size=N resizes and crops all images"
            )
        box = _part(full_size, (height, width), fit, crop, center_crop or 1)
        box, inside, borders = _inside(box, full_size, (height, width))
        top, left, *part = _stored_box(box, full_size, orientation)
        size = _turned(inside, orientation)
        ratio = 1
        if isinstance(image, JpegImageFile):
            times = min(old / new for old, new in zip(part, size, strict=True))
            ratio = next((r for r in RATIOS if times >= r * OVERSAMPLING), 1)
            image.draft(None, (image.width // ratio, image.height // ratio))
        pixels = _pixels(image, channels)
        box = [x / ratio for x in (left, top, left + part[1], top + part[0])]
        if crop is not None:  # without surrounding pixels
            left, top = map(math.floor, box[:2])
            pixels = pixels.crop((left, top, *map(math.ceil, box[2:])))
            box = [box[0] - left, box[1] - top, box[2] - left, box[3] - top]
        # At a reduced scale the last pixel may stand for less than the others.
        box[2:] = min(box[2], pixels.width), min(box[3], pixels.height)
        resized = pixels.resize(size[::-1], FILTERS[interpolation], box)
        result = np.asarray(_upright(resized, orientation)).reshape(*inside, channels)
        return result if result.shape == shape else np.pad(result, (*borders, (0, 0)))


def _plain_jpeg_size(content):
    """Return (height, width) of an 8-bit RGB JPEG without orientation or profile."""
    if not content.startswith(b"\xff\xd8") or not content.endswith(END_OF_JPEG):
        return None
    offset = 2
    while offset + 9 < len(content) and content[offset] == 0xFF:
        kind = content[offset + 1]
        if kind in (0xC0, 0xC1, 0xC2):  # baseline, extended, progressive
            is_plain = content[offset + 4] == 8 and content[offset + 9] == 3
            size = struct.unpack_from(">HH", content, offset + 5)
            return size if is_plain else None
        if kind not in (0xC4, 0xDB, 0xDD, 0xE0, 0xFE):  # tables, JFIF, a comment
            return None
        offset += 2 + int.from_bytes(content[offset + 2 : offset + 4])
    return None


def source_box(
    full_size: Sequence[int],
    size: Sequence[int],
    *,
    center_crop: float = 0.0,
    fit: str = "auto",
    **_: Any,
) -> list[float]:
    """Return top, left, height and width of what `read_image` resizes to a size.

    Sizes are (height, width), of an upright image; with "pad" borders count.
    """
    box = _part(full_size, size, fit, None, center_crop or 1)
    (*begins, height, width), inside, borders = _inside(box, full_size, size)
    scales = height / inside[0], width / inside[1]
    begins = [x - y[0] * z for x, y, z in zip(begins, borders, scales, strict=True)]
    return [*begins, size[0] * scales[0], size[1] * scales[1]]


def upright_size(content: bytes, max_pixels: int = MAX_IMAGE_PIXELS) -> tuple[int, int]:
    """Return height and width of an image after rotation; reads JPEG headers only."""
    with opened(content, max_pixels) as image:
        return _inspect(image)[0]


@contextlib.contextmanager
def opened(content: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """Yield an image whose header was read; Refused if it is damaged or too large."""
    if not content:
        raise Refused("the file is empty")
    if content.startswith(LFS):
        raise Refused(LFS_HINT)
    try:
        with _opened(content) as image:
            num_pixels = image.width * image.height
            if num_pixels > max_pixels:
                raise Refused(
                    f"has {num_pixels:,} pixels, and at most max_image_pixels="
                    f"{max_pixels} are decoded; shrink it, or raise --max_image_pixels"
                )
            with memory.taking(4 * num_pixels):
                yield _completed(image, content)
    except (Refused, MemoryError) as error:
        raise error from None
    except Exception as error:  # damaged files raise any class
        raise Refused(f"cannot be decoded: {one_line(error, 200)}") from None


def _opened(content):
    # Not Image.open, which has a limit of pixels of its own.
    name, file = format_of(content), io.BytesIO(content)
    if name == "ICO":  # IcoImageFile decodes before its size is known
        return IcoFile(file).frame(0)
    if name == "TIFF":
        return _opened_tiff(file)
    if name:
        return Image.OPEN[name][0](file, "")
    if is_heif(content):
        raise Refused(HEIF_HINT)
    try:
        return TgaImageFile(file, "")
    except SyntaxError:
        reason = f"it is not a {FORMATS_TEXT} file, or its header is damaged"
        raise Refused(f"cannot be decoded: {reason}") from None


def _opened_tiff(file):
    """Open a TIFF file; Refused if Pillow 13.0 cannot open it or misreads it."""
    try:
        tags = (image := TiffImageFile(file, "")).tag_v2
    except Exception as error:  # also of kinds of pixels that Pillow does not know
        text = f"cannot be decoded: {one_line(error, 200)}"
        raise Refused(f"{text}; unless it is damaged, {SAVE_HINT}") from None
    name = ExifTags.Base
    # 0 and 1 are gray, with white or black as zero, 6 is YCbCr, 8 is LAB.
    kind = tags.get(name.PhotometricInterpretation, 0)
    bits = max(tags.get(name.BitsPerSample, (1,)))
    is_raw = tags.get(name.Compression, 1) == 1
    is_planar = tags.get(name.PlanarConfiguration) == 2
    extra = tags.get(name.ExtraSamples, ())  # 1 and 2 are alpha
    num_bands = tags.get(name.SamplesPerPixel, 1) - extra.count(1) - extra.count(2)
    subsampling = tags.get(name.YCbCrSubSampling, (1, 1))
    planar = f"uncompressed planar pixels of {bits} bits"
    misread = {
        f"{num_bands} gray bands": kind in (0, 1) and num_bands > 1,
        "numbers with signs": tags.get(name.SampleFormat, (1,))[0] == 2,
        "a thumbnail, as of a raw photo": tags.get(name.NewSubfileType, 0) & 1,
        "planar LAB": kind == 8 and is_planar,
        "subsampled YCbCr": kind == 6 and is_raw and subsampling != (1, 1),
        planar: is_raw and is_planar and (kind == 0 or bits != 8),
    }
    for what in filter(misread.get, misread):
        hint = SAVE_HINT
        if (what, bits) == (planar, 16):
            hint = COMPRESS_HINT.format(kind, extra)
        raise Refused(f"is a TIFF file of {what}, which is not read; {hint}")
    return image


def _completed(image, content):
    """Add a missing end marker to a JPEG file if the pixels do not depend on it."""
    if not isinstance(image, JpegImageFile) or content.endswith(END_OF_JPEG):
        return image
    scan = content.rfind(b"\xff\xda")
    # The last ones of several scans may be missing.
    is_one_scan = content[scan + 4 : scan + 5] == bytes([image.layers])
    if END_OF_JPEG in content[scan:] or "progressive" in image.info or not is_one_scan:
        return image

    def read(bits):
        whole = content.removesuffix(b"\xff") + 999 * bits + END_OF_JPEG
        return JpegImageFile(io.BytesIO(whole), "")

    pixels = {read(bits).tobytes() for bits in (b"", b"\x55", b"\xaa")}
    return read(b"") if len(pixels) == 1 else image


def greatest_of_16_bits(content: bytes, max_pixels: int = MAX_IMAGE_PIXELS) -> int:
    """Return the maximum of a gray 16-bit image, 0 for other images."""
    with opened(content, max_pixels) as image:
        pixels = _gray_of_16_bits(image)
        return 0 if pixels is None else int(pixels.max())


def _gray_of_16_bits(image):
    """Return the pixels of a gray image of 12 or 16 bits as 16 bits, else None."""
    # Pillow scales PGM files of more than 8 bits to 16 bits, as 32-bit integers.
    is_pgm = image.format == "PPM" and image.mode == "I"
    if not image.mode.startswith("I;16") and not is_pgm:
        return None
    pixels = np.asarray(image)
    if isinstance(image, TiffImageFile):
        pixels = pixels << 16 - image.tag_v2[ExifTags.Base.BitsPerSample][0]
        if not image.tag_v2.get(ExifTags.Base.PhotometricInterpretation):
            pixels = 65535 - pixels  # white is zero
    return pixels


def _pixels(image, channels):
    image.load()
    if (deep := _gray_of_16_bits(image)) is not None:
        image = Image.fromarray((deep >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise Refused("has pixels of 32 bits, or with signs; 8 and 16 bits are read")
    image.info.pop("transparency", None)
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _inspect(image):
    """Return (height, width) of the upright image, and its EXIF orientation."""
    if not isinstance(image, JpegImageFile):
        image.load()  # metadata may follow the pixels, and Pillow turns some formats
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # any error of a library that reads damaged metadata
        orientation = 1
    return _turned((image.height, image.width), orientation), orientation


def _upright(image, orientation):
    turn = TURNS.get(orientation)
    return image if turn is None else image.transpose(turn)


def _turned(size, orientation):
    return tuple(size[::-1] if orientation in SIDEWAYS else size)


def _middle(full_size, size, share):
    """Return the largest middle part with the proportions of a size, or a share."""
    scale = max(new / old for new, old in zip(size, full_size, strict=True))
    part = [  # rounding must not exceed the image
        share * min(old, new / scale) for new, old in zip(size, full_size, strict=True)
    ]
    return (*((old - x) / 2 for old, x in zip(full_size, part, strict=True)), *part)


def _part(full_size, size, fit, crop, share):
    """Return top, left, height and width; they may exceed the image by borders."""
    if fit not in ("pad", "stretch"):
        return crop(*full_size) if crop else _middle(full_size, size, share)
    # The smallest area with the proportions of the result that contains the image.
    scale = max(old / new for old, new in zip(full_size, size, strict=True))
    area = [scale * new for new in size]
    box = crop(*map(round, area)) if crop else (0, 0, *area)
    if fit == "stretch":
        scales = [old / new for old, new in zip(full_size, area, strict=True)]
        return [x * y for x, y in zip(box, 2 * scales, strict=True)]
    begins = [x - (y - z) / 2 for x, y, z in zip(box, area, full_size, strict=False)]
    return *begins, *box[2:]


def _inside(box, full_size, size):
    """Return the part of a box in the image, its size in the result, the borders."""
    parts = []
    for first, length, full, pixels in zip(
        box[:2], box[2:], full_size, size, strict=True
    ):
        # The center of a crop stays in the image.
        begin = min(max(first, -length / 2), full - length / 2)
        before, after = max(0.0, -begin), max(0.0, begin + length - full)
        part = length - before - after
        inside = max(1, round(round(pixels * part / length, 6)))
        border = (pixels - inside) * before / ((before + after) or 1)
        border = round(round(border, 6))  # a half is not decided by float64
        parts.append((begin + before, part, inside, (border, pixels - inside - border)))
    begins, lengths, inside, borders = zip(*parts, strict=True)
    return (*begins, *lengths), inside, borders


def _stored_box(box, full_size, orientation):
    """Convert a box of the upright image to one of the stored pixels."""
    top, left, height, width = box
    if orientation in (3, 4, 7, 8):
        top = max(0.0, full_size[0] - top - height)  # negative by rounding
    if orientation in (2, 3, 6, 7):
        left = max(0.0, full_size[1] - left - width)
    if orientation in SIDEWAYS:
        return left, top, width, height
    return top, left, height, width
