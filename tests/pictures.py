"""Image files written byte by byte, and folders of them."""

import base64
import pathlib
import struct
import zlib

import numpy as np

# Channels -> the color type of a PNG file.
COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}


def chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return (
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
    )


def png_file(height, width, bits, color_type, rows: bytes, *extra: bytes) -> bytes:
    """A PNG file of rows that each begin with their filter, 0."""
    header = struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, 0)
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", header),
            *extra,
            chunk(b"IDAT", zlib.compress(rows)),
            chunk(b"IEND", b""),
        ]
    )


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of uint8 or uint16 [height, width, 1 to 4 channels]: gray, gray with
    transparency, color, color with transparency."""
    height, width, channels = pixels.shape
    big_endian = pixels.astype(pixels.dtype.newbyteorder(">"))
    rows = b"".join(b"\0" + row.tobytes() for row in big_endian)
    bits = 8 * pixels.dtype.itemsize
    return png_file(height, width, bits, COLOR_TYPES[channels], rows)


def gif(width, height, num_frames=1, screen=None):
    """A GIF file of black frames; `screen` is its width and height."""
    palette = bytes(6)  # two colors
    content = b"GIF89a" + struct.pack("<HH", *(screen or (width, height)))
    content += b"\x80\0\0" + palette
    for _ in range(num_frames):
        content += b"\x21\xf9\x04\0\0\0\0\0"  # an extension: no delay
        content += b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0)
        codes = _gif_codes(width * height)
        content += b"\x02"  # bits of a color, at least 2
        for first in range(0, len(codes), 255):
            piece = codes[first : first + 255]
            content += bytes([len(piece)]) + piece
        content += b"\0"
    return content + b"\x3b"


def _gif_codes(num_pixels):
    """Color 0 so often, in LZW codes of three bits: the table is cleared (4) before
    every second color, so that it never grows to four bits; 5 ends."""
    codes = []
    for first in range(0, num_pixels, 2):
        codes += [4] + [0] * min(2, num_pixels - first)
    number = sum(code << 3 * place for place, code in enumerate([*codes, 5]))
    return number.to_bytes(-(-3 * (len(codes) + 1) // 8), "little")


def bmp(pixels: np.ndarray) -> bytes:
    """A BMP file of uint8 [height, width, 3], the last row first."""
    height, width, _ = pixels.shape
    padding = bytes(-3 * width % 4)
    rows = b"".join(row[:, ::-1].tobytes() + padding for row in pixels[::-1])
    header = struct.pack(
        "<IIiiHHIIiiII", 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0
    )
    return b"BM" + struct.pack("<II", 54 + len(rows), 0) + header + rows


# WebP files of 5x7 pixels of one color, written by libwebp; the extended one has EXIF,
# the animation three frames.
WEBP = {
    kind: base64.b64decode(text)
    for kind, text in {
        "lossy": "UklGRjQAAABXRUJQVlA4ICgAAABQAQCdASoFAAcAAUAmJaAABDOAAP7wmyP//ucD//ZwP"
        "/9nA/iQAAAA",
        "lossless": "UklGRh4AAABXRUJQVlA4TBEAAAAvBIABAAdQjyJXq/+BiOh/AAA=",
        "extended": "UklGRlwAAABXRUJQVlA4WAoAAAAIAAAABAAABgAAVlA4ICgAAABQAQCdASoFAAcAAU"
        "AmJaAABDOAAP7wmyP//ucD//ZwP/9nA/iQAAAARVhJRg4AAABNTQAqAAAACAAAAAAAAA==",
        "animated": "UklGRrwAAABXRUJQVlA4WAoAAAACAAAABAAABgAAQU5JTQYAAAAAAAAAAABBTk1GKg"
        "AAAAAAAAAAAAQAAAYAAAkAAAJWUDhMEQAAAC8EgAEAB1CPIler/4GI6H8AAEFOTUYsAAAAAAAAAAA"
        "ABAAABgAACQAAAFZQOEwUAAAALwSAAQAHoBBAABQ02YT+x4iI/gdBTk1GKgAAAAAAAAAAAAQAAAYA"
        "AAkAAABWUDhMEQAAAC8EgAEAB1CPIler/4GI6H8AAA==",
    }.items()
}


def random_pixels(seed, height=8, width=6, channels=3, dtype=np.uint8):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, np.iinfo(dtype).max, (height, width, channels))
    return values.astype(dtype)


def write_folder(root: pathlib.Path, split: str, counts: dict[str, int], seed=0):
    """`split/CLASS/00.png` and so on; gives back the pixels, [class][image]."""
    pixels = {}
    for name, count in counts.items():
        folder = root / split / name
        folder.mkdir(parents=True)
        pixels[name] = [random_pixels([seed, len(pixels), i]) for i in range(count)]
        for i, image in enumerate(pixels[name]):
            (folder / f"{i:02}.png").write_bytes(png(image))
    return pixels
