"""Format, size and number of pixels of an image file, read from its header.

Of the formats that `decoding.decode` takes: PNG, JPEG, GIF, BMP and still WebP.
"""

import struct
from typing import NamedTuple

import tensorflow as tf

GIF_EXTENSION, GIF_IMAGE = 0x21, 0x2C


class Header(NamedTuple):
    """What the header of an image file says.

    Attributes:
        format: "PNG", "JPEG", "GIF", "BMP" or "WEBP".
        height, width: as stored, whatever the orientation; of GIF those of the screen.
        num_pixels: that decoding makes, all frames of an animation together.
        is_cmyk: of a JPEG file, whether it has four channels.
    """

    format: str
    height: int
    width: int
    num_pixels: int
    is_cmyk: bool = False


def read_header(content: bytes) -> Header | None:
    """The header of an image file; None where it is damaged, or of another format, such
    as JPEG XL."""
    try:
        if content.startswith(b"\x89PNG\r\n\x1a\n"):
            width, height = struct.unpack_from(">II", content, 16)
            return Header("PNG", height, width, width * height)
        if content.startswith(b"\xff\xd8\xff"):
            # Read by the library that decodes it, which knows where headers may be.
            height, width, channels = tf.io.extract_jpeg_shape(content).numpy().tolist()
            return Header("JPEG", height, width, width * height, channels == 4)
        if content.startswith(b"GIF8"):
            width, height = struct.unpack_from("<HH", content, 6)
            return Header("GIF", height, width, _gif_pixels(content))
        if content.startswith(b"BM"):
            width, height = _bmp_size(content)
            return Header("BMP", height, width, width * height)
        if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
            size = _webp_size(content)
            return size and Header("WEBP", *size, size[0] * size[1])
    except (struct.error, IndexError, tf.errors.OpError):
        pass
    return None


def _bmp_size(content: bytes) -> tuple[int, int]:
    """Width and height; the oldest header, of 12 bytes, has them in 16 bits."""
    (header_bytes,) = struct.unpack_from("<I", content, 14)
    width, height = struct.unpack_from(
        "<HH" if header_bytes == 12 else "<Ii", content, 18
    )
    return width, abs(height)  # a negative height counts from the top


def _gif_pixels(content: bytes) -> int:
    """Pixels of the screen and of all frames, which the decoder unpacks together.

    After the screen (width, height, flags) and its palette come blocks: extensions and
    frames, each with its own size and palette, and then its data in pieces that begin
    with their length, the last of which is empty (GIF89a specification).
    """
    width, height, flags = struct.unpack_from("<HHB", content, 6)
    total, place = width * height, 13 + _palette_bytes(flags)
    while place < len(content):
        kind = content[place]
        if kind == GIF_EXTENSION:
            place += 2
        elif kind == GIF_IMAGE and place + 10 <= len(content):
            width, height, flags = struct.unpack_from("<HHB", content, place + 5)
            total += width * height
            place += 11 + _palette_bytes(flags)
        else:
            break
        while place < len(content) and content[place]:
            place += 1 + content[place]
        place += 1
    return total


def _webp_size(content: bytes) -> tuple[int, int] | None:
    """Height and width of the image; None for an animation (RFC 9649).

    The first chunk is the image, lossy or lossless, or the header of an extended file.
    """
    kind = content[12:16]
    if kind == b"VP8 " and content[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", content, 26)
        return height & 0x3FFF, width & 0x3FFF  # above are bits of the scale
    if kind == b"VP8L" and content[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", content, 21)
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if kind == b"VP8X" and not content[20] & 0x02:
        low_width, high_width, low_height, high_height = struct.unpack_from(
            "<HBHB", content, 24
        )
        width, height = high_width << 16 | low_width, high_height << 16 | low_height
        return height + 1, width + 1
    return None


def _palette_bytes(flags: int) -> int:
    return 3 << (flags % 8 + 1) if flags & 0x80 else 0
