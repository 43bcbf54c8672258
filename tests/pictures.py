"""Image files written byte by byte or by Pillow, and folders of them."""

import io
import pathlib
import struct
import zlib

import numpy as np
from PIL import Image

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


def file_of(image: Image.Image, kind: str, **options) -> bytes:
    """What Pillow writes."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def gif(width, height, num_frames=1):
    """Frames of one color each."""
    first, *others = (Image.new("P", (width, height), i) for i in range(num_frames))
    return file_of(first, "GIF", save_all=True, append_images=others)


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
