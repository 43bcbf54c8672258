"""The contract of sources, kept by every loader, every wrapper and a user's own class;
what `ArraySource` refuses; moments."""

import numpy as np
import pytest
import tensorflow as tf
from pictures import png, random_pixels, write_folder
from prepared_sets import features, random_examples, store

from towers.data import embedded, image_folder, synthetic, tfds
from towers.data.cached import CachedSource
from towers.data.classes import labels_for
from towers.data.crops import ATTEMPTS
from towers.data.image_files import ImageOptions
from towers.data.sources import (
    ArraySource,
    DataSet,
    DeviceSource,
    Subset,
    channel_moments,
    checksum,
    place_of,
    validate_labels,
)

NUM = 11
IMAGES = np.stack([random_pixels(i) for i in range(NUM)])
LABELS = np.arange(NUM) % 4
LISTED = np.array([9, 2, 4, 8, 0])


class Files:
    """`ImageFiles` in memory."""

    labels = LABELS.astype(np.int32)

    def __len__(self):
        return NUM

    def read(self, index):
        return png(IMAGES[index]), int(LABELS[index])

    def place(self, index):
        return f"folder/{index}.png"


class Own:
    """A source of a user: three attributes and `read`."""

    num_examples, image_shape = NUM, IMAGES.shape[1:]

    def read(self, indices):
        images = tf.gather(tf.constant(IMAGES), indices)
        return images, tf.gather(tf.constant(LABELS, tf.int32), indices)


def cached(**options):
    return CachedSource(Files(), IMAGES.shape[1:], ImageOptions(**options))


def folder(home):
    write_folder(home, "train", {"ant": 5, "bee": 4})
    return image_folder.load(str(home)).train


def prepared(home, file_format):
    spec = features(id=None)
    store(home, random_examples(12, 0), None, spec=spec, file_format=file_format)
    return tfds.load("shapes", str(home)).train


def arrays(of=None):
    images, labels = IMAGES, LABELS
    return (images, labels) if of is None else (images[of], labels[of])


# Name -> how to make it in a folder, and its images and labels where they are known.
SOURCES = {
    "array": (lambda _: ArraySource(*arrays()), arrays()),
    "own": (lambda _: Own(), arrays()),
    "subset": (lambda _: Subset(ArraySource(*arrays()), LISTED), arrays(LISTED)),
    "subset of own": (lambda _: Subset(Own(), LISTED), arrays(LISTED)),
    "subset of a subset": (
        lambda _: Subset(Subset(cached(), LISTED), np.array([3, 1])),
        arrays([8, 2]),
    ),
    "on a device": (lambda _: DeviceSource(Own(), "/CPU:2"), arrays()),
    "cached": (lambda _: cached(), arrays()),
    "cached in part": (lambda _: cached(cache_mb=4.5 * 144 / 1e6), arrays()),
    "not cached": (lambda _: cached(cache_mb=0.0), arrays()),
    "resized": (lambda _: cached(image_size=8), None),
    "embedded": (lambda _: embedded.load().test, None),
    "synthetic": (lambda _: synthetic.load(image_shape=(9, 8, 1)).train, None),
    "folder": (folder, None),
    "tfrecord": (lambda home: prepared(home, "tfrecord"), None),
    "array_record": (lambda home: prepared(home, "array_record"), None),
}
every_source = pytest.mark.parametrize("name", SOURCES)


def read(source, indices, *numbers):
    images, labels = source.read(tf.constant(indices, tf.int64), *numbers)
    return images.numpy(), labels.numpy()


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    made = {}

    def create(name):
        if name not in made:
            made[name] = SOURCES[name][0](tmp_path_factory.mktemp("source"))
        return made[name]

    return create


@every_source
def test_any_indices_are_read_as_one_by_one_however_it_is_called(source_of, name):
    source, expected = source_of(name), SOURCES[name][1]
    count = source.num_examples
    if expected is None:
        expected = read(source, np.arange(count))
    assert (count, source.image_shape) == (len(expected[0]), expected[0].shape[1:])
    last = count - 1
    chosen = np.array([min(7, last), 0, 1, 1, last])
    compiled = tf.function(source.read)
    streamed = tf.data.Dataset.from_tensors(tf.constant(chosen, tf.int64))
    for images, labels in (
        read(source, chosen),
        compiled(tf.constant(chosen, tf.int64)),
        *(streamed.map(source.read) if name != "on a device" else ()),
        map(np.concatenate, zip(*(read(source, [i]) for i in chosen), strict=True)),
    ):
        assert images.dtype == np.uint8
        assert labels.dtype == (np.int64 if name == "on a device" else np.int32)
        np.testing.assert_array_equal(images, expected[0][chosen])
        np.testing.assert_array_equal(labels, expected[1][chosen])
    none = read(source, np.zeros(0, np.int64))
    assert none[0].shape == (0, *source.image_shape) and none[1].shape == (0,)


@every_source
def test_what_is_known_without_reading_is_what_is_read(source_of, name):
    source = source_of(name)
    _, labels = read(source, np.arange(source.num_examples))
    if name not in ("own", "subset of own", "on a device"):
        np.testing.assert_array_equal(labels_for(source, "sampler"), labels)
        classes = tuple(map(str, range(labels.max() + 1)))
        moments = (0.0,) * 3, (1.0,) * 3
        validate_labels(DataSet("x", source, source, classes, *moments, ""))
    if checksum(source) is not None and name != "folder":
        assert checksum(source) == checksum(SOURCES[name][0](None))
    place = place_of(source, 1)
    assert place or name not in ("cached", "folder", "tfrecord", "array_record")
    assert place == "" or place != place_of(source, 0)


@pytest.mark.parametrize("name", ["resized", "subset"])
def test_crop_numbers_give_each_image_a_crop_of_its_own(source_of, name):
    source = source_of("resized")
    if name == "subset":
        source = Subset(source, LISTED)
    assert source.reads_crops and not source_of("cached").reads_crops
    chosen = np.array([4, 0, 0, 2])
    numbers = tf.random.stateless_uniform([4, ATTEMPTS + 1, 2], [3, 4])
    images, labels = read(source, chosen, numbers)
    np.testing.assert_array_equal(labels, read(source, chosen)[1])
    for place, index in enumerate(chosen):
        [alone], _ = read(source, [index], numbers[place : place + 1])
        np.testing.assert_array_equal(images[place], alone)
    assert not np.array_equal(images[1], images[2])


def test_an_array_may_change_after_the_source_is_made():
    images, labels = (x.copy() for x in arrays())
    source = ArraySource(images, labels)
    images[:], labels[:] = 0, 0
    np.testing.assert_array_equal(read(source, np.arange(NUM))[0], IMAGES)


@pytest.mark.parametrize(
    "images, labels, words",
    [
        (IMAGES.astype(np.float32), LABELS, "float32"),
        (IMAGES.astype(np.int8), LABELS, "int8"),
        (IMAGES[..., 0], LABELS, r"uint8 \[11, 8, 6\]"),
        (IMAGES, LABELS[:-1], "11 images but 10 labels"),
        (IMAGES, np.eye(NUM), r"labels must be integers \[n\], got \[11, 11\]"),
    ],
)
def test_other_arrays_are_refused(images, labels, words):
    with pytest.raises(ValueError, match=words):
        ArraySource(images, labels)


@pytest.mark.parametrize("channels", [1, 3])
def test_channel_moments_are_those_of_numpy(channels):
    rng = np.random.default_rng(2)
    images = rng.integers(0, 256, (131, 6, 5, channels), dtype=np.uint8)
    images[..., 0] //= 3
    mean, deviation = channel_moments(images)
    pixels = images.astype(np.float64)
    np.testing.assert_allclose(mean, pixels.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(deviation, pixels.std((0, 1, 2)), rtol=1e-12)
