"""Image files, read by Pillow: decoded, turned upright, cropped and resized."""

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from PIL import ExifTags, Image
from PIL.IcoImagePlugin import IcoFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TgaImagePlugin import TgaImageFile

from towers.config.choices import MAX_IMAGE_PIXELS
from towers.data.files.band_files import read_bands
from towers.data.files.bands import Bands, Refused, differs
from towers.data.files.paths import FORMATS_TEXT, HEIF_HINT, format_of, is_heif
from towers.data.files.plain import END_OF_JPEG, JPEG
from towers.data.files.reading import LFS, LFS_HINT
from towers.data.pixel_format import PHOTO, PixelFormat
from towers.data.streams import Memory
from towers.messages import one_line

# A JPEG file is decoded at the smallest scale of libjpeg that has this many times the
# wanted size, as in Pillow's `thumbnail`; the filter does the rest.
OVERSAMPLING = 2
RATIOS = (8, 4, 2, 1)
FILTERS = {
    "auto": Image.Resampling.BILINEAR,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}

memory = Memory(num_bytes=2 * 10**9)  # for the images that are decoded at the same time

# EXIF orientations that exchange rows and columns, and that then reverse each.
SIDEWAYS, REVERSED_ROWS, REVERSED_COLUMNS = (5, 6, 7, 8), (3, 4, 7, 8), (2, 3, 6, 7)

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
    pixels: PixelFormat = PHOTO,
    note_size: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Return an image of the shape and of dtype `pixels`, resized with antialiasing.

    The content determines the format; only the first frame is read, transparency is
    dropped, and as uint8 gray or colors the upper 8 of 16 bits are kept. `fit` gives
    the upright image the proportions of the shape: "crop" or "auto" takes the largest
    part in the middle, or the fraction `center_crop` of it, "pad" adds black borders as
    `PIL.ImageOps.pad` does, of the smallest value if that may not be 0, and "stretch"
    changes the proportions. `crop` gives another part, of what `fit` makes. `note_size`
    takes the height and width of the upright image. Raises ValueError if it is damaged,
    too large, of other pixels, or of another size and `resize` is False.
    """
    height, width, channels = shape
    is_whole = crop is None and center_crop in (0, 1)
    dtype = pixels.dtype
    with opened(content, max_pixels, pixels.windows) as image:
        full_size, orientation = _inspect(image)
        if note_size is not None:
            note_size(*full_size)
        if is_whole and full_size == (height, width):
            return _upright(_pixels(image, channels, dtype), orientation, channels)
        if not resize:
            what = f"is {full_size[0]}x{full_size[1]} (height x width)"
            way = "--image_size=N resizes and crops all images"
            raise Refused(f"{what}, expected {height}x{width}; {way}")
        box = _part(full_size, (height, width), fit, crop, center_crop or 1)
        box, inside, borders = _inside(box, full_size, (height, width))
        top, left, *part = _stored_box(box, full_size, orientation)
        size = _turned(inside, orientation)
        ratio = 1
        if isinstance(image, JpegImageFile):
            times = min(old / new for old, new in zip(part, size, strict=True))
            ratio = next((r for r in RATIOS if times >= r * OVERSAMPLING), 1)
            image.draft(None, (image.width // ratio, image.height // ratio))
        stored = _pixels(image, channels, dtype)
        box = [x / ratio for x in (left, top, left + part[1], top + part[0])]
        if crop is not None:  # without surrounding pixels
            left, top = map(math.floor, box[:2])
            stored = stored.crop((left, top, *map(math.ceil, box[2:])))
            box = [box[0] - left, box[1] - top, box[2] - left, box[3] - top]
        # At a reduced scale the last pixel may stand for less than the others.
        box[2:] = min(box[2], stored.width), min(box[3], stored.height)
        resized = stored.resize(size[::-1], FILTERS[interpolation], box)
        result = _upright(resized, orientation, channels)
        if result.shape == shape:
            return result
        black = 0 if dtype == "uint8" else result.min()
        return np.pad(result, (*borders, (0, 0)), constant_values=black)


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


def inspect(
    content: bytes, max_pixels: int = MAX_IMAGE_PIXELS, has_size: bool = True
) -> tuple[tuple[int, int], tuple[str, int], bool]:
    """Return an image's upright size, (dtype, number of bands), and if it has frames.

    Gray has 3 bands, as colors. Without `has_size`, for which some formats are decoded,
    the size is (0, 0). Previews in JPEG files are not frames.
    """
    with opened(content, max_pixels) as image:
        size, kind, has_frames = (0, 0), ("uint8", 3), False
        if has_size:
            size = _inspect(image)[0]
        if isinstance(image, Bands):
            kind = image.dtype, 3 if image.num_bands == 1 else image.num_bands
        if not content.startswith(JPEG):
            with contextlib.suppress(Exception):  # the first one can be read
                has_frames = getattr(image, "is_animated", False)
        return size, kind, has_frames


@contextlib.contextmanager
def opened(
    content: bytes, max_pixels: int, windows: bool = True
) -> Iterator[Image.Image | Bands]:
    """Yield an image whose header was read; Refused if it is damaged or too large."""
    if not content:
        raise Refused("the file is empty")
    if content.startswith(LFS):
        raise Refused(LFS_HINT)
    try:
        image = _opened(content, windows)
        num_pixels = image.width * image.height
        if num_pixels > max_pixels:
            most = f"at most max_image_pixels={max_pixels} are decoded"
            way = "shrink it, or raise --max_image_pixels"
            raise Refused(f"has {num_pixels:,} pixels, and {most}; {way}")
        with memory.taking(getattr(image, "num_bytes", 4 * num_pixels)):
            yield _completed(image, content)
    except (Refused, MemoryError) as error:
        raise error from None
    except Exception as error:  # damaged files raise any class
        raise Refused(f"cannot be decoded: {one_line(error, 200)}") from None


def _opened(content, windows):
    # Not Image.open, which has a limit of pixels of its own.
    name, file = format_of(content), io.BytesIO(content)
    if (bands := read_bands(content, name, windows)) is not None:
        return bands
    if name == "ICO":  # IcoImageFile decodes before its size is known
        return IcoFile(file).frame(0)
    if name:
        return Image.OPEN[name][0](file, "")
    if is_heif(content):
        raise Refused(HEIF_HINT)
    try:
        return TgaImageFile(file, "")
    except SyntaxError:
        reason = f"it is not a {FORMATS_TEXT} file, or its header is damaged"
        raise Refused(f"cannot be decoded: {reason}") from None


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


def _loaded(image):
    """Return the decoded image; a JPEG in one call, not in blocks with the lock."""
    if isinstance(image, JpegImageFile):
        [(codec, _, _, options)] = image.tile
        how = image.mode, image.size, image.fp.getvalue(), codec
        with contextlib.suppress(ValueError):  # `load` says why
            return Image.frombytes(*how, *options, *image.decoderconfig)
    image.load()
    return image


def _pixels(image, channels, dtype):
    may_be_photo = dtype == "uint8" and channels in (1, 3)
    if isinstance(image, Bands):
        if not may_be_photo:
            return image.converted(dtype, channels)
        image = image.photo()
    image = _loaded(image)
    if image.mode in ("I", "F") or not may_be_photo:
        kind = "32-bit pixels" if image.mode in ("I", "F") else "8-bit gray or colors"
        raise Refused(differs(kind, dtype, channels))
    image.info.pop("transparency", None)
    mode = "L" if channels == 1 else "RGB"
    return image if image.mode == mode else image.convert(mode)


def _inspect(image):
    """Return (height, width) of the upright image, and its EXIF orientation."""
    if not isinstance(image, JpegImageFile | Bands):
        image.load()  # metadata may follow the pixels, and Pillow turns some formats
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # any error of a library that reads damaged metadata
        orientation = 1
    return _turned((image.height, image.width), orientation), orientation


def _upright(image, orientation, channels):
    pixels = np.asarray(image).reshape(image.height, image.width, channels)
    if orientation in SIDEWAYS:
        pixels = pixels.swapaxes(0, 1)
    pixels = pixels[::-1] if orientation in REVERSED_ROWS else pixels
    return pixels[:, ::-1] if orientation in REVERSED_COLUMNS else pixels


def _turned(size, orientation):
    return tuple(size[::-1] if orientation in SIDEWAYS else size)


def _part(full_size, size, fit, crop, share):
    """Return top, left, height and width; they may exceed the image by borders."""
    both = list(zip(full_size, size, strict=True))
    if fit not in ("pad", "stretch"):
        if crop:
            return crop(*full_size)
        # A share of the largest part; rounding must not exceed the image.
        scale = max(new / old for old, new in both)
        part = [share * min(old, new / scale) for old, new in both]
        return (*((old - x) / 2 for old, x in zip(full_size, part, strict=True)), *part)
    # The smallest area with the proportions of the result that contains the image.
    scale = max(old / new for old, new in both)
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
    if orientation in REVERSED_ROWS:
        top = max(0.0, full_size[0] - top - height)  # negative by rounding
    if orientation in REVERSED_COLUMNS:
        left = max(0.0, full_size[1] - left - width)
    return *_turned((top, left), orientation), *_turned((height, width), orientation)
