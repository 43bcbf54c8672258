"""The orientation of a photo: how its camera was held (EXIF, tag 274).

Pillow reads it, from EXIF or XMP, and only from files that have one of the two.
"""

import io
from collections.abc import Sequence

import numpy as np
from PIL import ExifTags, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from towers.data.headers import Header

UPRIGHT = 1
# Their rows and columns are exchanged.
SIDEWAYS = (5, 6, 7, 8)

_JPEG_APP1, _JPEG_ENDS = 0xE1, (0xDA, 0xD9)  # of the headers: the scan, or the end
_PNG_METADATA = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
_WEBP_METADATA = 0x08 | 0x04  # EXIF and XMP in the flags of an extended file

# The classes, not Image.open, which has a limit of pixels of its own.
_IMAGES = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
}


def orientation(content: bytes, header: Header) -> int:
    """1 to 8, as in EXIF; 1 where the file says nothing that can be read.

    Args:
        content: of an image file.
        header: of the file; its pixels have been found not to be too many.
    """
    if not _has_metadata(content, header.format):
        return UPRIGHT
    try:
        with _IMAGES[header.format](io.BytesIO(content)) as image:
            value = image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    except Exception:  # any error of a library that reads damaged metadata
        return UPRIGHT
    return value if value in range(1, 9) else UPRIGHT


def upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """The image as it is to be seen, equal to `PIL.ImageOps.exif_transpose`.

    Args:
        image: [height, width, channels].
        orientation: 1 to 8.

    Returns:
        A view of the image; [width, height, channels] if it was SIDEWAYS.
    """
    if orientation in SIDEWAYS:
        image = image.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return image


def stored_box(
    box: Sequence[int], upright_size: Sequence[int], orientation: int
) -> tuple[int, int, int, int]:
    """A rectangle of the upright image as one of the stored pixels.

    Args:
        box: top, left, height, width.
        upright_size: (height, width) of the upright image.
        orientation: 1 to 8.
    """
    top, left, height, width = box
    if orientation in (3, 4, 7, 8):
        top = upright_size[0] - top - height
    if orientation in (2, 3, 6, 7):
        left = upright_size[1] - left - width
    if orientation in SIDEWAYS:
        return left, top, width, height
    return top, left, height, width


def _has_metadata(content, file_format):
    """False where a file certainly has neither EXIF nor XMP."""
    if file_format == "JPEG":
        return _JPEG_APP1 in _jpeg_markers(content)
    if file_format == "PNG":
        return any(name in content for name in _PNG_METADATA)
    if file_format == "WEBP":
        return content[12:16] == b"VP8X" and bool(content[20] & _WEBP_METADATA)
    return False


def _jpeg_markers(content):
    """The markers of a JPEG file's segments up to the first scan (ITU-T T.81, B.1)."""
    place = 2
    while place + 4 <= len(content) and content[place] == 0xFF:
        marker = content[place + 1]
        if marker in _JPEG_ENDS:
            return
        yield marker
        if marker == 0xFF:  # any number of them may stand before a marker
            place += 1
        else:
            place += 2 + int.from_bytes(content[place + 2 : place + 4], "big")
