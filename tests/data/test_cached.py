"""Image files: decoded as they are read, kept as far as they fit, faults named."""

import itertools
import threading

import numpy as np
import pytest
import tensorflow as tf
from pictures import png, random_pixels
from prepared_sets import message

from towers.data import streams
from towers.data.augment.augmentation import Augment
from towers.data.augment.crops import ATTEMPTS
from towers.data.batches import TrainBatches
from towers.data.files import samples
from towers.data.files.cached import CachedSource, ImageCache, read_in_batches
from towers.data.files.image_files import ImageOptions, Survey
from towers.data.inventory import Inventory
from towers.data.pixel_format import PHOTO
from towers.errors import data_errors_of_tensorflow

NUM_EXAMPLES = 11
SHAPE = (8, 6, 3)
IMAGE_MB = 8 * 6 * 3 / 1e6
EVERYTHING = tf.range(NUM_EXAMPLES, dtype=tf.int64)


class Files:
    """`ImageFiles` in memory that counts what is read."""

    def __init__(self, contents):
        self.contents = list(contents)
        self.labels = np.arange(len(self.contents), dtype=np.int32) % 4
        self.num_reads = 0

    def __len__(self):
        return len(self.contents)

    def read(self, index):
        self.num_reads += 1
        if isinstance(self.contents[index], Exception):
            raise self.contents[index]
        return self.contents[index], self.labels[index]

    def location(self, index):
        return f"folder/{index}.png"


@pytest.fixture
def pixels():
    return np.stack([random_pixels(i) for i in range(NUM_EXAMPLES)])


@pytest.fixture
def files(pixels):
    return Files(map(png, pixels))


# What is read.


def test_two_sources_share_the_room_of_a_cache(files):
    cache, num_reads = ImageCache(4.5 * IMAGE_MB), []
    sources = [CachedSource(files, SHAPE, ImageOptions(), cache) for _ in range(2)]
    for _ in range(2):
        for source in sources:
            before = files.num_reads
            source.read(EVERYTHING)
            num_reads.append(files.num_reads - before)
    assert num_reads == [NUM_EXAMPLES, NUM_EXAMPLES, NUM_EXAMPLES - 4, NUM_EXAMPLES]


@pytest.mark.parametrize(
    "cache_mb,kept", [(1e308, NUM_EXAMPLES), (4.5 * IMAGE_MB, 4), (0, 0)]
)
def test_what_fits_is_decoded_once(files, pixels, cache_mb, kept):
    source = CachedSource(files, SHAPE, ImageOptions(image_cache_mb=cache_mb))
    for epoch in range(3):
        images, labels = source.read(EVERYTHING)
        np.testing.assert_array_equal(images, pixels)
        np.testing.assert_array_equal(labels, files.labels)
        assert files.num_reads == NUM_EXAMPLES + epoch * (NUM_EXAMPLES - kept)


def test_an_image_that_fills_a_batch_is_decoded_once(files, pixels):
    source, indices = CachedSource(files, SHAPE, ImageOptions()), [3, 0, 0, 0]
    images, labels = source.read(tf.constant(indices, tf.int64))
    assert files.num_reads == 2
    np.testing.assert_array_equal(images, pixels[indices])
    np.testing.assert_array_equal(labels, files.labels[indices])


def assert_read_together(batch_size, of_training):
    """Reads wait until as many of them as there are readers have begun."""
    begun, together = itertools.count(1), threading.Event()

    class Waiting(Files):
        def read(self, index):
            if next(begun) == streams.NUM_READERS:
                together.set()
            assert together.wait(timeout=30)
            return super().read(index)

    files = Waiting([png(random_pixels(0))] * 480)
    source = CachedSource(files, SHAPE, ImageOptions(image_cache_mb=0))
    if of_training:
        augment = Augment(None, None, SHAPE)
        stream = TrainBatches(source, augment, 0, batch_size).stored_stream(0)
    else:
        stream = read_in_batches(source, batch_size)
    assert len(list(itertools.islice(stream, 2))) == 2


@pytest.mark.parametrize("of_training", [True, False])
@pytest.mark.parametrize("batch_size", [1, 40])
def test_every_core_decodes(batch_size, of_training):
    assert streams.num_cores() <= streams.NUM_READERS
    assert_read_together(batch_size, of_training)


# Faults.


def call_in_tensorflow(call):
    with data_errors_of_tensorflow():
        call()


@pytest.mark.parametrize(
    "damage,words",
    [
        (lambda x: b"", "the file is empty"),
        (lambda x: x[:-40], "cannot be decoded: "),
        (lambda x: b"<html>" + x, "cannot be decoded: it is not a JPEG, PNG"),
        (lambda x: png(random_pixels(0, 6, 8)), "is 6x8 (height x width), expec"),
        (lambda x: FileNotFoundError(2, "No such file"), "No such file"),
    ],
)
@pytest.mark.row(23)
def test_row_23_a_file_that_cannot_be_used_is_named(files, damage, words):
    files.contents[3] = damage(files.contents[3])
    source = CachedSource(files, SHAPE, ImageOptions())
    batches = tf.data.Dataset.range(NUM_EXAMPLES).batch(2).map(source.read)
    for call in (
        lambda: source.read(tf.constant([1, 3], tf.int64)),
        lambda: tf.function(source.read)(tf.constant([1, 3], tf.int64)),
        lambda: list(batches.prefetch(1)),
    ):
        text = message(call_in_tensorflow, call)
        assert text.startswith(f"folder/3.png: {words}")
        assert text.endswith("bad images out, `python -m towers.check` finds them all")
    source.read(tf.constant([0, 1, 2, 4], tf.int64))  # the others can be used


# Sizes.


def test_the_size_is_that_of_the_images_or_of_the_option(files):
    read, notes = ImageOptions(pixels=PHOTO), Inventory()
    assert samples.settle_format(files, 3, ImageOptions(), notes) == (read, SHAPE)
    odd = Files([*files.contents, png(random_pixels(0, 6, 8))])
    given = ImageOptions(image_size=5, pixels=PHOTO)
    assert samples.settle_format(files, 1, given, notes) == (given, (5, 5, 1))
    assert notes.inferred == {}
    options, shape = samples.settle_format(
        odd, 3, ImageOptions(image_cache_mb=1), notes
    )
    assert (options.image_size, options.image_cache_mb, shape) == (64, 1, (64, 64, 3))
    text = notes.inferred["sizes"]
    assert "64x64" in text and "--image_size=N" in text
    files.contents[0] = b""
    text = message(samples.settle_format, files, 3, ImageOptions(), notes)
    assert "0.png: the file is empty" in text
    options = ImageOptions(survey=Survey())
    assert samples.settle_format(files, 3, options, notes)[1] == SHAPE
    nothing = Files([b"", b""])
    assert "can be read: 2 like folder/0.png: the file is empty" in message(
        samples.settle_format, nothing, 3, options, notes
    )


@pytest.mark.row(40)
def test_row_40_a_file_that_memory_cannot_hold_is_named(files):
    files.contents[0] = MemoryError()
    indices, numbers = tf.constant([0], tf.int64), tf.ones([1, ATTEMPTS + 1, 2])
    source = CachedSource(files, (4, 4, 3), ImageOptions(image_size=4))
    for call in (
        lambda: samples.settle_format(files, 3, ImageOptions(), Inventory()),
        lambda: source.read(indices),
        lambda: source.read(indices, numbers),
    ):
        text = message(call_in_tensorflow, call)
        assert text.startswith("folder/0.png: there is not enough memory to read it")


# Mean and standard deviation.


def test_moments_are_those_of_all_images_or_of_a_sample_that_stays(
    files, pixels, monkeypatch
):
    mean, std = samples.sampled_moments(
        CachedSource(files, SHAPE, ImageOptions()), ImageOptions()
    )
    np.testing.assert_allclose(mean, pixels.mean((0, 1, 2)))
    np.testing.assert_allclose(std, pixels.std((0, 1, 2)))
    monkeypatch.setattr(samples, "SAMPLE", 4)
    actual = []
    for _ in range(2):
        files.num_reads = 0
        source = CachedSource(files, SHAPE, ImageOptions())
        actual.append(samples.sampled_moments(source, ImageOptions()))
        assert files.num_reads == 4
    assert actual[0] == actual[1]
