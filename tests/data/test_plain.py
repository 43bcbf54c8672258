"""Plain files have the pixels of Pillow's decoder, whichever program decodes them."""

import io
import itertools
import struct

import numpy as np
import pytest
import tensorflow as tf
from pictures import chunk, file_of
from PIL import Image
from test_cached import Files
from test_image import photo

from towers.data.files import plain
from towers.data.files.cached import CachedSource
from towers.data.files.image_files import ImageOptions

RNG = np.random.default_rng(0)
SIZE = 24, 19  # height and width
NUM_FUZZED = 300


@pytest.fixture(scope="module")
def kinds():
    """Name -> a file; those that are plain for three channels first."""
    small = Image.fromarray(RNG.integers(0, 256, (9, 7, 3), dtype=np.uint8))
    color = small.resize(SIZE[::-1], Image.Resampling.BICUBIC)
    gray, png = color.convert("L"), file_of(color, "PNG")
    jpegs = [{"quality": x} for x in (5, 75, 100)]
    jpegs += [{"subsampling": x} for x in ("4:4:4", "4:2:2", "4:1:1")]
    jpegs += [{"progressive": True}, {"restart_marker_rows": 1}, {"comment": "x"}]
    files = {f"JPEG {x}": file_of(color, "JPEG", **x) for x in jpegs}
    files |= {"gray JPEG": file_of(gray, "JPEG"), "PNG": png}
    files |= {"gray PNG": file_of(gray, "PNG")}
    gamma = chunk(b"gAMA", struct.pack(">I", 22000))
    files["PNG with gamma"] = png[:33] + gamma + png[33:]
    files |= {
        "turned": photo(color, "JPEG", 6),
        "turned PNG": photo(color, "PNG", 6),
        "with a profile": file_of(color, "JPEG", icc_profile=b"profile"),
        "CMYK": file_of(color.convert("CMYK"), "JPEG"),
        "stored as RGB": file_of(color, "JPEG", keep_rgb=True),
        "palette": file_of(color.quantize(9), "PNG"),
        "alpha": file_of(color.convert("RGBA"), "PNG"),
        "transparent": file_of(color, "PNG", transparency=(1, 2, 3)),
        "1 bit": file_of(color.convert("1"), "PNG"),
        "WebP": file_of(color, "WEBP", lossless=True),
        "cut": file_of(color, "JPEG")[:-1],
    }
    return files


def by_pillow(content, channels):
    """Return the pixels that Pillow reads, None if it cannot."""
    try:
        with Image.open(io.BytesIO(content)) as image:
            converted = image.convert("L" if channels == 1 else "RGB")
            return np.asarray(converted).reshape(*SIZE, channels)
    except Exception:  # damaged files raise any class
        return None


def by_tensorflow(content, channels):
    try:
        [image] = plain.decode([content], channels)
    except tf.errors.OpError:
        return None
    return image


def test_plain_kinds_have_the_pixels_of_pillow(kinds):
    is_plain = [plain.is_plain(x, (*SIZE, 3)) for x in kinds.values()]
    assert is_plain == [True] * 13 + [False] * 11
    assert not any(plain.is_plain(x, (*SIZE[::-1], 3)) for x in kinds.values())
    for name, content in kinds.items():
        for channels in (1, 3):
            if plain.is_plain(content, (*SIZE, channels)):
                assert channels == 3 or "gray" in name
                actual = by_tensorflow(content, channels)
                np.testing.assert_array_equal(actual, by_pillow(content, channels))


def test_damaged_files_have_the_pixels_of_pillow_or_are_left_to_it(kinds):
    files = [x for x in kinds.values() if plain.is_plain(x, (*SIZE, 3))]
    num_compared = num_refused = 0
    for whole in itertools.islice(itertools.cycle(files), NUM_FUZZED):
        damaged = bytearray(whole)
        for place in RNG.integers(20, len(whole) - 12, 2):
            damaged[place] = RNG.integers(256)
        content = bytes(damaged)
        if not plain.is_plain(content, (*SIZE, 3)):
            continue
        actual = by_tensorflow(content, 3)
        if actual is None:
            num_refused += 1
        else:
            num_compared += 1
            np.testing.assert_array_equal(actual, by_pillow(content, 3))
    assert num_compared > NUM_FUZZED / 5 and num_refused > NUM_FUZZED / 5


def test_files_that_tensorflow_refuses_are_left_to_pillow(kinds, monkeypatch):
    monkeypatch.setattr("towers.data.files.cached.MAX_BYTES", 3000)  # in parts
    names = [name for name in kinds if name != "cut" and "turned" not in name]
    checksum = bytearray(kinds["PNG"])
    checksum[-13] ^= 1  # of the pixels, which Pillow ignores
    contents = [*(kinds[x] for x in names), bytes(checksum), kinds["PNG"]]
    assert by_tensorflow(contents[-2], 3) is None
    source = CachedSource(Files(contents), (*SIZE, 3), ImageOptions(image_cache_mb=0))
    images, _ = source.read(tf.range(len(contents), dtype=tf.int64))
    for image, content in zip(images, contents, strict=True):
        np.testing.assert_array_equal(image, by_pillow(content, 3))
