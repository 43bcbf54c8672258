"""Image files written byte by byte or by Pillow, and folders of them."""

import io
import pathlib
import struct
import zlib

import numpy as np
import tensorflow as tf
from PIL import Image


def chunk(kind: bytes, content: bytes) -> bytes:
    length, checksum = len(content), zlib.crc32(kind + content)
    return length.to_bytes(4) + kind + content + checksum.to_bytes(4)


def png(pixels: np.ndarray) -> bytes:
    """A PNG file of uint8 or uint16 [height, width, 1 to 4 channels]."""
    if pixels.dtype == np.uint16:  # which Pillow does not write in colors
        return tf.io.encode_png(pixels).numpy()
    return file_of(
        Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels), "PNG"
    )


def file_of(image: Image.Image, kind: str, **options) -> bytes:
    """What Pillow writes."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def gif(width, height, num_frames=1):
    """Frames of one color each."""
    first, *others = (Image.new("P", (width, height), i) for i in range(num_frames))
    return file_of(first, "GIF", save_all=True, append_images=others)


def tiff(strips: list[bytes], width: int, height: int, tags: dict[int, list[int]]):
    """A TIFF file with a strip for each plane."""
    sizes = [len(strip) for strip in strips]
    places = [8 + sum(sizes[:i]) for i in range(len(strips) + 1)]
    size = {256: [width], 257: [height], 278: [height], 273: places[:-1], 279: sizes}
    tags = dict(sorted((size | tags).items()))
    values, entries = b"", struct.pack("<H", len(tags))
    for tag, numbers in tags.items():
        packed = struct.pack(f"<{len(numbers)}I", *numbers)
        if len(numbers) > 1:
            place = places[-1] + 2 + 12 * len(tags) + 4 + len(values)
            values, packed = values + packed, struct.pack("<I", place)
        entries += struct.pack("<HHI", tag, 4, len(numbers)) + packed
    start = struct.pack("<2sHI", b"II", 42, places[-1])
    return start + b"".join(strips) + entries + bytes(4) + values


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
