"""Plain JPEG and PNG files, decoded many at a time without the interpreter's lock.

Pillow takes the lock several times for each image, so that threads read at most 20,000
images per second, however many cores there are. TensorFlow's decoders give the same
pixels of the kinds of files that `is_plain` accepts.
"""

import functools
import struct
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

MAX_BYTES = 8_000_000  # maximum size in bytes of the images that one call decodes

JPEG, END_OF_JPEG = b"\xff\xd8", b"\xff\xd9"
# Huffman and quantization tables, restart interval, JFIF, a comment.
_TABLES = (0xC4, 0xDB, 0xDD, 0xE0, 0xFE)
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
PNG, END_OF_PNG = b"\x89PNG\r\n\x1a\n", b"\0\0\0\0IEND\xaeB`\x82"
_CHUNKS = (b"IDAT", b"pHYs", b"tIME", b"sRGB", b"gAMA", b"cHRM")


def is_plain(content: bytes, image_shape: tuple[int, int, int]) -> bool:
    """Return whether a file is a gray or RGB image of 8 bits that has the shape.

    It has no orientation, color profile, palette or transparency.
    """
    height, width, channels = image_shape
    if content.startswith(JPEG):
        components = _frame(content, struct.pack(">HH", height, width))
        return components == 1 or components == 3 == channels
    color = content[25:26]
    header = struct.pack(">I4sIIB", 13, b"IHDR", width, height, 8)
    return (
        content.startswith(header, 8)
        and content.startswith(PNG)
        and (color == b"\0" or (color == b"\2" and channels == 3))
        and content.endswith(END_OF_PNG)
        and _has_plain_chunks(content)
    )


def _frame(content, size):
    """Return the number of components of a plain JPEG of this size, else 0."""
    offset, end = 2, len(content) - 9
    if not content.endswith(END_OF_JPEG):
        return 0
    while offset < end and content[offset] == 0xFF:
        kind = content[offset + 1]
        if kind in _FRAMES:
            is_plain = content.startswith(b"\x08" + size, offset + 4)
            return content[offset + 9] if is_plain else 0
        if kind not in _TABLES:
            return 0
        offset += 2 + (content[offset + 2] << 8) + content[offset + 3]
    return 0


def _has_plain_chunks(content):
    offset, end = 33, len(content) - len(END_OF_PNG)
    while offset < end and content[offset + 4 : offset + 8] in _CHUNKS:
        offset += 12 + int.from_bytes(content[offset : offset + 4])
    return offset == end


def decode(contents: Sequence[bytes], channels: int) -> np.ndarray:
    """Decode plain files of one size, uint8 [n, h, w, channels]; OpError if damaged."""
    return _decoder(channels)(tf.constant(contents)).numpy()


@functools.cache
def _decoder(channels):
    def decode_one(content):
        # Decodes PNG too. Pillow takes the exact transform.
        return tf.io.decode_jpeg(content, channels, dct_method="INTEGER_ACCURATE")

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)], autograph=False)
    def decode_all(contents):
        with tf.device("CPU:0"):
            return tf.map_fn(decode_one, contents, fn_output_signature=tf.uint8)

    return decode_all.get_concrete_function()
