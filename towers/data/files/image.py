"""Image files, read by Pillow: decoded, turned upright, cropped and resized."""

import contextlib
import io
import logging
import math
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from PIL import ExifTags, Image
from PIL.IcoImagePlugin import IcoFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TgaImagePlugin import TgaImageFile

from towers.config.choices import MAX_IMAGE_PIXELS
from towers.data.files.paths import FORMATS_TEXT, HEIF_HINT, format_of, is_heif
from towers.data.files.reading import LFS, LFS_HINT
from towers.data.streams import Memory
from towers.messages import one_line

# A JPEG file is decoded at the smallest scale, of those that libjpeg has, at which the
# shorter side of what is resized is at least this many times the wanted one. The filter
# does the rest, so little is lost; Pillow's `thumbnail` has the same number.
OVERSAMPLING = 2
RATIOS = (8, 4, 2, 1)
# The filters of --interpolation.
FILTERS = {
    "auto": Image.Resampling.BILINEAR,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
END_OF_JPEG = b"\xff\xd9"

# Of the images that are decoded at the same time.
MAX_PIXEL_BYTES = 2 * 10**9
memory = Memory(MAX_PIXEL_BYTES)

# EXIF's orientation -> what turns the image upright, as `ImageOps.exif_transpose`.
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

# Metadata that are damaged turn nothing, and are not warned about.
warnings.filterwarnings("ignore", module=r"PIL\.")
# Pillow logs faults that it raises too.
logging.getLogger("PIL").setLevel(logging.CRITICAL)


class Refused(ValueError):
    """An image that is not read; the reason follows its name."""


# (height, width) of an image -> top, left, height, width of a part of it.
Crop = Callable[[int, int], Sequence[float]]


def read_image(
    content: bytes,
    shape: tuple[int, int, int],
    crop: Crop | None = None,
    *,
    resize: bool = True,
    center_crop: float = 0.0,
    interpolation: str = "auto",
    max_pixels: int = MAX_IMAGE_PIXELS,
    note_size: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """The middle of an image, or another part, resized with a filter that widens as
    the image shrinks, so that every pixel of it counts.

    The content decides about the format, not the name; of an animation the first frame
    is read. Gray is repeated or colors weighted, transparency is dropped, 16 bits are
    cut to their upper 8. A JPEG file has no checksums: where bits have changed it may
    still be decoded to something else.

    Args:
        content: of the file.
        shape: height, width, channels of the result; 1 or 3 channels.
        crop: the part of the upright image; by default the largest one in the middle
            with the proportions of the result.
        resize: whether the image may have another size than the result.
        center_crop: part of height and width of the middle that is taken; 0 is 1.
        interpolation: a key of FILTERS.
        max_pixels: of the largest image that is decoded.
        note_size: takes the height and width of the upright image.

    Returns:
        uint8 of the shape.

    Raises:
        ValueError: it is no image, is damaged or too large, or has another size and
            must not be resized.
    """
    height, width, channels = shape
    is_whole = crop is None and center_crop in (0, 1)
    if is_whole and channels == 3 and _plain_jpeg_size(content) == (height, width):
        with contextlib.suppress(ValueError):  # which has a reason below
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
                f"is {full_size[0]}x{full_size[1]} (height x width) where "
                f"{height}x{width} is expected; --image_size=N resizes and crops all "
                "images"
            )
        if crop is None:
            box = _middle(full_size, (height, width), center_crop or 1)
        else:
            box = crop(*full_size)
        top, left, *part = _stored_box(box, full_size, orientation)
        size = _turned((height, width), orientation)
        ratio = 1
        if isinstance(image, JpegImageFile):
            times = min(old / new for old, new in zip(part, size, strict=True))
            ratio = next((r for r in RATIOS if times >= r * OVERSAMPLING), 1)
            image.draft(None, [length // ratio for length in image.size])
        pixels = _pixels(image, channels)
        box = [x / ratio for x in (left, top, left + part[1], top + part[0])]
        if crop is not None:  # without pixels around it
            left, top = map(math.floor, box[:2])
            pixels = pixels.crop((left, top, *map(math.ceil, box[2:])))
            box = [box[0] - left, box[1] - top, box[2] - left, box[3] - top]
        # At a reduced scale the last pixel may stand for less than the others.
        box[2:] = min(box[2], pixels.width), min(box[3], pixels.height)
        resized = pixels.resize(size[::-1], FILTERS[interpolation], box)
        return np.asarray(_upright(resized, orientation)).reshape(shape)


def _plain_jpeg_size(content):
    """(height, width) of a JPEG file of three channels of 8 bits that has only what its
    pixels need: no orientation, profile or other images. None of all others.
    """
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


def upright_size(content: bytes, max_pixels: int = MAX_IMAGE_PIXELS) -> tuple[int, int]:
    """Height and width of an image after its rotation; ValueError as `read_image`,
    though damage behind the header of a JPEG file is not detected.
    """
    with opened(content, max_pixels) as image:
        return _inspect(image)[0]


@contextlib.contextmanager
def opened(content: bytes, max_pixels: int) -> Iterator[Image.Image]:
    """An image whose header is read, in the part of the memory that it may take;
    Refused where it is none, has too many pixels, or is damaged.
    """
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
    except Exception as error:  # of any class where a file is damaged
        raise Refused(f"cannot be decoded: {one_line(error, 200)}") from None


def _opened(content):
    # Not Image.open, which has a limit of pixels of its own.
    name, file = format_of(content), io.BytesIO(content)
    if name == "ICO":  # IcoImageFile decodes before its size is known
        return IcoFile(file).frame(0)
    if name:
        return Image.OPEN[name][0](file, "")
    if is_heif(content):
        raise Refused(HEIF_HINT)
    try:
        return TgaImageFile(file, "")
    except SyntaxError:
        reason = f"it is no {FORMATS_TEXT} file, or its header is damaged"
        raise Refused(f"cannot be decoded: {reason}") from None


def _completed(image, content):
    """Adds a missing end marker to a JPEG file. Other data may be missing as well where
    the pixels depend on the bits that are put in their place.
    """
    if not isinstance(image, JpegImageFile) or content.endswith(END_OF_JPEG):
        return image
    scan = content.rfind(b"\xff\xda")
    # Of several scans the last ones may be missing.
    is_one_scan = content[scan + 4 : scan + 5] == bytes([image.layers])
    if END_OF_JPEG in content[scan:] or "progressive" in image.info or not is_one_scan:
        return image

    def read(bits):
        whole = content.removesuffix(b"\xff") + 999 * bits + END_OF_JPEG
        return JpegImageFile(io.BytesIO(whole), "")

    pixels = {read(bits).tobytes() for bits in (b"", b"\x55", b"\xaa")}
    return read(b"") if len(pixels) == 1 else image


def greatest_of_16_bits(content: bytes, max_pixels: int = MAX_IMAGE_PIXELS) -> int:
    """Return the greatest value of a gray image of 16 bits; 0 of another one."""
    with opened(content, max_pixels) as image:
        return int(np.asarray(image).max()) if _has_16_bits(image) else 0


def _has_16_bits(image):
    # Pillow scales PGM files of more than 8 bits to 16 bits, as 32-bit integers.
    is_pgm = image.format == "PPM" and image.mode == "I"
    return image.mode.startswith("I;16") or is_pgm


def _pixels(image, channels):
    """The image decoded, in 8 bits, gray or in colors, as stored."""
    image.load()
    if _has_16_bits(image):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise Refused("has pixels of 32 bits, or with signs; 8 and 16 bits are read")
    image.info.pop("transparency", None)
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _inspect(image):
    """(height, width) of the upright image, and the orientation of the stored one: 1 to
    8, as in EXIF or XMP; another value turns nothing.
    """
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
    """Top, left, height, width of the largest part with the proportions of a size, or
    of a share of it.
    """
    scale = max(new / old for new, old in zip(size, full_size, strict=True))
    part = [  # not larger than the image by rounding
        share * min(old, new / scale) for new, old in zip(size, full_size, strict=True)
    ]
    return (*((old - x) / 2 for old, x in zip(full_size, part, strict=True)), *part)


def _stored_box(box, full_size, orientation):
    """A part of the upright image as one of the stored pixels."""
    top, left, height, width = box
    if orientation in (3, 4, 7, 8):
        top = max(0.0, full_size[0] - top - height)  # negative by rounding
    if orientation in (2, 3, 6, 7):
        left = max(0.0, full_size[1] - left - width)
    if orientation in SIDEWAYS:
        return left, top, width, height
    return top, left, height, width
