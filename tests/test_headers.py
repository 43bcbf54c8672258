"""The pixels of image files are counted before they are decoded (row 40)."""

import struct
import time
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf
from pictures import WEBP, bmp, gif, png, png_file, random_pixels

from towers.data.decoding import Decoding
from towers.data.headers import read_header
from towers.data.pixels import decode

PIXELS = random_pixels(0, 7, 5)
FILES = {
    "png": png(PIXELS),
    "gray png of 16 bits": png(random_pixels(0, 7, 5, 1, np.uint16)),
    "jpeg": tf.io.encode_jpeg(PIXELS).numpy(),
    "progressive jpeg": tf.io.encode_jpeg(PIXELS, progressive=True).numpy(),
    "bmp": bmp(PIXELS),
    "lossy webp": WEBP["lossy"],
    "lossless webp": WEBP["lossless"],
    "extended webp": WEBP["extended"],
}


def num_pixels(content):
    header = read_header(content)
    return header and header.num_pixels


each_format = pytest.mark.parametrize("kind", FILES)


@each_format
def test_pixels_are_counted_as_they_are_decoded(kind):
    image = decode(FILES[kind], 3)
    assert image.shape[:2] == (7, 5)
    assert read_header(FILES[kind])[1:4] == (7, 5, 35)
    np.testing.assert_array_equal(decode(bmp(PIXELS), 3), PIXELS)


def test_what_is_not_counted_is_not_decoded(monkeypatch):
    """TensorFlow has a decoder of JPEG XL as well; animated WebP it refuses, or, for
    other channels, writes beyond its memory."""
    monkeypatch.setattr(tf.raw_ops, "DecodeImage", pytest.fail)
    jpeg_xl = b"\xff\x0a" + bytes(60)
    container = b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(60)
    for content in (jpeg_xl, container, WEBP["animated"], b"RIFF1234WEBPVP9 "):
        with pytest.raises(ValueError, match="it is no PNG, JPEG, GIF, BMP or still W"):
            decode(content, 3)


@pytest.mark.parametrize("num_frames", [1, 2, 9])
def test_all_frames_of_an_animation_count(num_frames):
    content = gif(5, 7, num_frames, screen=(8, 9))
    assert num_pixels(content) == 8 * 9 + 5 * 7 * num_frames
    # The library that decodes it finds as many.
    assert tf.io.decode_gif(gif(5, 7, num_frames)).shape == (num_frames, 7, 5, 3)
    limit = 35 * (num_frames + 1)
    decode(gif(5, 7, num_frames), 3, Decoding(max_pixels=limit))
    with pytest.raises(ValueError, match="max_image_pixels"):
        decode(gif(5, 7, num_frames), 3, Decoding(max_pixels=limit - 1))


@each_format
def test_a_file_of_more_pixels_is_refused_with_both_numbers(kind):
    decode(FILES[kind], 3, Decoding(max_pixels=35))
    with pytest.raises(ValueError) as caught:
        decode(FILES[kind], 3, Decoding(max_pixels=34))
    assert "has 35 pixels, and at most max_image_pixels=34 " in str(caught.value)


def huge_jpeg():
    content = tf.io.encode_jpeg(PIXELS).numpy()
    place = content.index(b"\xff\xc0") + 5  # of the height in the frame header
    return content[:place] + struct.pack(">HH", 60_000, 50_000) + content[place + 4 :]


def huge_webp(kind, place, header):
    content = WEBP[kind]
    return content[:place] + header + content[place + len(header) :]


@pytest.mark.parametrize(
    "content,count",
    [
        (png_file(20_000, 20_000, 8, 2, b"\0" * 60_001), 400_000_000),
        (huge_jpeg(), 3_000_000_000),
        (gif(1, 1)[:6] + struct.pack("<HH", 65_535, 65_535) + gif(1, 1)[10:], 2**32),
        (bmp(PIXELS)[:18] + struct.pack("<ii", 30_000, -30_000) + bytes(99), 9 * 10**8),
        (huge_webp("lossy", 26, struct.pack("<HH", 0x3FFF, 0x3FFF)), 16_383**2),
        (huge_webp("lossless", 21, b"\xff\xff\xff\x0f"), 2**28),
        (huge_webp("extended", 24, b"\xff\xff\x01\xff\xff\0"), 2**33),
    ],
    ids=["png", "jpeg", "gif", "bmp", "lossy", "lossless", "extended"],
)
def test_a_huge_image_is_refused_at_once(content, count):
    assert num_pixels(content) == pytest.approx(count, rel=1e-4)
    decode(png(PIXELS), 3)
    tracemalloc.start()
    started = time.monotonic()
    with pytest.raises(ValueError, match=f"has {num_pixels(content):,} pixels"):
        decode(content, 3)
    assert time.monotonic() - started < 0.5
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


@each_format
def test_a_header_that_breaks_off_gives_no_number_or_the_right_one(kind):
    for length in range(len(FILES[kind])):
        assert num_pixels(FILES[kind][:length]) in (None, 35)
    for length in range(60):
        num_pixels(gif(5, 7, 2)[:length])
