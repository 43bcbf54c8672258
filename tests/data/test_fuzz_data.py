"""Any bytes in the place of data are read, or refused in one short line.

Hypothesis makes the bytes, the same ones every time: a few in the fast tests, thousands
in the slow ones.
"""

import pathlib
import resource

import numpy as np
import pytest
import tensorflow as tf
from engines.fuzzing import changed, fuzz_data
from marks import slow
from pictures import file_of, gif, png, random_pixels
from PIL import Image
from test_cached import Files
from written_weights import WRITERS, create_theirs, empty_state, fill

from towers.data.files.cached import CachedSource
from towers.data.files.image import inspect, read_image
from towers.data.files.image_files import ImageOptions

MAX_PIXELS = 100_000

few_and_many = pytest.mark.parametrize("num_examples", [20, slow(1000)])


# Image files.


def image_files():
    pixels = random_pixels(0, 12, 10)
    image, small = Image.fromarray(pixels), Image.new("RGB", (5, 7), "red")
    exif = Image.Exif()
    exif[0x0112] = 8
    return [
        png(pixels),
        png(random_pixels(1, 9, 9, 4, np.uint16)),
        gif(6, 5, num_frames=3),
        file_of(image, "BMP"),
        file_of(image, "JPEG"),
        file_of(image, "JPEG", progressive=True),
        file_of(small, "WEBP"),
        file_of(small, "WEBP", lossless=True),
        file_of(small, "WEBP", exif=exif),
        file_of(small, "WEBP", save_all=True, append_images=[image.resize((5, 7))]),
    ]


@few_and_many
@pytest.mark.row(40)
def test_any_image_file(num_examples):
    options = ImageOptions(image_size=8, max_image_pixels=MAX_PIXELS, image_cache_mb=0)

    def read(content):
        source = CachedSource(Files([content]), (8, 8, 3), options)
        images, labels = source.read(tf.constant([0], tf.int64))
        assert images.shape == (1, 8, 8, 3) and labels == [0]
        (height, width), *_ = inspect(content, MAX_PIXELS)
        assert height * width <= MAX_PIXELS
        assert read_image(content, (height, width, 3), resize=False).any() in (0, 1)

    fuzz_data(num_examples, changed(image_files()), read)


# Weights of other programs.


@pytest.fixture
def little_address_space():
    """HDF5 allocates what the length of a text says, up to 4 GB, before it looks at the
    text; here so much is not to be had."""
    status = pathlib.Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("no /proc")
    used = int(status.read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 10**9, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@few_and_many
@pytest.mark.parametrize(
    "name,changed_file",
    [
        ("model.keras", "model.keras"),
        ("model.h5", "model.h5"),
        ("model.weights.h5", "model.weights.h5"),
        ("checkpoint-1", "checkpoint-1.index"),
        ("checkpoint-1", "checkpoint-1.data-00000-of-00001"),
    ],
)
@pytest.mark.row(40)
def test_any_file_of_weights(
    tmp_path, num_examples, name, changed_file, little_address_space
):
    WRITERS[name](create_theirs(), tmp_path / name)
    empty, file = empty_state(), tmp_path / changed_file

    def read(content):
        file.write_bytes(content)
        state = dict(empty)
        fill(tmp_path / name, state)
        for key, value in state.items():
            assert (value.shape, value.dtype) == (empty[key].shape, empty[key].dtype)

    options = {"codes": (4,), "most_bytes": 1e9}
    fuzz_data(num_examples, changed([file.read_bytes()]), read, **options)
