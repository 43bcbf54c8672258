"""The contract of all loaders of data sets and all sources of images."""

import dataclasses
import pathlib
import re
import tracemalloc
from collections.abc import Callable

import containers
import numpy as np
import pytest
import tensorflow as tf
from pictures import png, random_pixels, write_folder
from prepared_sets import (
    CIFAR,
    CLASSES,
    all_of,
    assert_holds,
    features,
    message,
    official,
    random_examples,
    shrink_published,
    store,
    write,
)
from test_cached import Files

from towers import data
from towers.config.choices import DATASETS
from towers.data import sources
from towers.data.augment.crops import ATTEMPTS
from towers.data.classes import labels_for
from towers.data.files.cached import CachedSource
from towers.data.files.image_files import ImageOptions
from towers.data.sets import arrays, shapes
from towers.data.sets.official_files import PUBLISHED
from towers.data.sources import ArraySource, DeviceSource, Subset, location_of
from towers.errors import DataError, data_errors_of_tensorflow

# The file of a user; `change` are fields of the data set.
IN_A_FILE = """
import numpy as np
import tensorflow as tf
from towers.data.sources import ArraySource, DataSet

images, labels = np.arange(180, dtype=np.uint8).reshape(30, 2, 1, 3), np.arange(30) % 3

class Own:
    def __init__(self, read, **changes):
        self.num_examples, self.image_shape, self.read = 30, (2, 1, 3), read
        vars(self).update(changes)

def right(indices):
    return tf.gather(images, indices), tf.gather(labels, indices)

one_hot = np.eye(3, dtype=int)[labels]

def sets(indices):
    return right(indices)[0], tf.gather(one_hot.astype(np.float32), indices)

source = ArraySource(images, labels)
fields = dict(name="mine", train=source, test=source, class_names=tuple("abc"),
              mean=(9.0,) * 3, std=(5.0,) * 3, origin="here")

def load():
    return DataSet(**fields | dict({change}))
"""


@dataclasses.dataclass(frozen=True)
class Loader:
    """How a data set is made and loaded.

    `write` takes a folder, and returns (images, labels) of both splits or None. `name`
    is that of `data.load`, if it differs. `file` is a pattern of required files.
    """

    write: Callable = lambda home: None
    name: str = ""
    class_names: tuple[str, ...] = ()
    file: str = ""
    is_ordered: bool = True


def published(name):
    def write_files(home):
        files, splits = official(name)
        write(home, files, packed=name not in CIFAR)
        return splits

    known = PUBLISHED[name]
    file = "t*.bin" if name in CIFAR else "t10k-images*.gz"
    return Loader(write_files, class_names=known.class_names, file=file)


def prepared(name, file_format, shape, class_names):
    def write_files(home):
        from tensorflow_datasets import features as kinds

        examples = [random_examples(n, n, shape) for n in (9, 4)]
        label = kinds.ClassLabel(names=class_names)
        spec = features(image=kinds.Image(shape=shape), label=label, id=None)
        store(home, *examples, name, spec, file_format=file_format)
        return [
            [np.array([x[key] for x in some]) for key in ("image", "label")]
            for some in examples
        ]

    file = f"{name}/1.2.3/*test.{file_format}*"
    full_name = name if name in PUBLISHED else f"tfds:{name}"
    return Loader(write_files, full_name, tuple(class_names), file, is_ordered=False)


def image_folder(home):
    counts, splits = {"cat": 5, "ant": 3}, []
    for seed, split in enumerate(("train", "test")):
        pixels = write_folder(home, split, counts, seed)
        labels = [0] * counts["ant"] + [1] * counts["cat"]
        splits.append((np.array(pixels["ant"] + pixels["cat"]), labels))
    return splits


def container(name):
    write_files, dataset, _ = containers.CONTAINERS[name]

    def write_splits(home):
        splits = []
        for split, count in (("train", 20), ("test", 9)):
            rows = containers.examples(count, count)
            write_files(home, rows, split)
            images = [random_pixels([count, i]) for i in range(count)]
            splits.append((np.array(images), [label for _, label, _ in rows]))
        return splits

    return Loader(write_splits, dataset, tuple(containers.CLASSES), "test[.-]*")


def npz(home):
    """As MedMNIST stores them."""
    splits, arrays = image_folder(home / "folder"), {}
    for split, (images, labels) in zip(("train", "test"), splits, strict=True):
        arrays[f"{split}_images"] = images
        arrays[f"{split}_labels"] = np.array(labels, np.uint8)[:, None]
    np.savez_compressed(home / "arrays.npz", **arrays)
    return splits


def own(home):
    (home / "mine.py").write_text(IN_A_FILE.replace("{change}", ""))


LOADERS = {
    **{name: published(name) for name in PUBLISHED},
    "tfds": prepared("shapes", "tfrecord", (8, 6, 3), CLASSES),
    "tfds array_record": prepared("shapes", "array_record", (8, 6, 3), CLASSES),
    "prepared mnist": prepared("mnist", "tfrecord", (28, 28, 1), "0123456789"),
    "image_folder": Loader(
        image_folder, class_names=("ant", "cat"), file="train/cat/03.png"
    ),
    **{name: container(name) for name in containers.CONTAINERS},
    "npz": Loader(npz, class_names=("0", "1"), file="*.npz"),
    "shapes": Loader(class_names=tuple(shapes.SHAPES)),
    "synthetic": Loader(),
    "own": Loader(own, "mine.py:load", tuple("abc")),
}
every_loader = pytest.mark.parametrize("name", LOADERS)


@pytest.fixture(scope="module", autouse=True)
def small(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        shrink_published(patch, tmp_path_factory.mktemp("nothing"))
        patch.setenv("TOWERS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(shapes, "NUM_TRAIN", 40)
        patch.setattr(shapes, "NUM_TEST", 20)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Name of a loader -> its folder, what was written, and the data set."""
    all_made = {}

    def make(name):
        if name not in all_made:
            home = tmp_path_factory.mktemp("home")
            splits = LOADERS[name].write(home)
            all_made[name] = home, splits, load(name, home)
        return all_made[name]

    return make


def load(name, home):
    own_name = LOADERS[name].name or name
    if own_name.startswith("mine.py"):
        own_name = f"{home}/{own_name}"
    return data.load(own_name, str(home))


# Data sets.


def test_every_data_set_keeps_the_contract():
    names = {x.name or name for name, x in LOADERS.items()} | LOADERS.keys()
    assert names >= {name.split(":")[0] for name in DATASETS}


@every_loader
def test_a_data_set_is_what_was_written(made, name):
    home, splits, data_set = made(name)
    loader = LOADERS[name]
    for source in (data_set.train, data_set.test):
        images, labels = all_of(source)
        assert images.shape == (source.num_examples, *data_set.image_shape)
        assert labels.min() >= 0 and labels.max() < len(data_set.class_names)
    if splits:
        assert_holds(data_set, splits, loader.is_ordered)
        assert str(home) in data_set.origin
    assert data_set.class_names == loader.class_names or name == "synthetic"


@pytest.mark.parametrize("damage", ["cut short", "empty", "gone"])
@pytest.mark.parametrize("name", [name for name, x in LOADERS.items() if x.file])
@pytest.mark.row(21, 23)
def test_row_21_a_damaged_file_is_named(tmp_path, name, damage):
    LOADERS[name].write(tmp_path)
    path = min(tmp_path.glob(LOADERS[name].file))
    content = path.read_bytes()
    path.unlink()
    if damage == "gone":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.write_bytes(content[: len(content) * 5 // 8 * (damage != "empty")])
    with pytest.raises(DataError) as caught, data_errors_of_tensorflow():
        all_of(load(name, tmp_path).test)
    text = str(caught.value)
    assert text.startswith(str(tmp_path)) and "\n" not in text
    file = path.name.removesuffix(".gz")
    # An empty file of TFDS is a split without examples.
    if "array_record" in file or ("tfrecord" in file and damage == "empty"):
        file = "split 'test'"
    assert file in text


@pytest.mark.row(21, 47, 56)
@pytest.mark.parametrize(
    "change,words",
    [
        ("test=ArraySource(images[:, :1], labels)", "test images are .1, 1, 3."),
        ("validation=ArraySource(images[:0], labels[:0])", "num_examples=0 of the val"),
        ("train=None", "no training images"),
        ("class_names=(0, 1, 2)", "class_names=.0, 1, 2. should be texts"),
        ("mean=9.0", "mean=9.0 should be"),
        ("mean=(0.5,) * 3, std=(0.2,) * 3", "multiply both by 255"),
        ("train=Own(right, image_shape=(2, 1))", "image_shape=.2, 1. should be"),
        ("train=Own(right, labels=labels[:5])", "array of 30 integers"),
        ("train=Own(right, labels=[0, 1, 2] * 10)", "array of 30 integers"),
        (
            "train=Own(sets, labels=-one_hot), test=ArraySource(images, one_hot)",
            "training image 0 .*has the label -1, expected 0 to 1;",
        ),
        ("test=Own(lambda i: (images[i], labels[i]))", "`read` of the test.*TensorF"),
        ("train=Own(right, num_examples=60)", r"`read` .*59 is not in \[0, 30\)"),
        ("train=Own(lambda i: (right(i)[0] / 2, right(i)[1]))", "gives float"),
        ("train=Own(lambda i: (right(i)[0][0], i))", r"expected are uint8 \[2, 2, 1"),
        (
            "train=ArraySource(images, labels + 1)",
            "training image 2 .*the label 3, .*expected 0 to 2; 10 such",
        ),
        (
            "test=Own(lambda i: (right(i)[0], right(i)[1] - 1))",
            "test image 0 .*has the label -1, ",
        ),
    ],
)
def test_a_data_set_of_ones_own_that_contradicts_itself_is_refused(
    change, words, tmp_path
):
    path = tmp_path / "mine.py"
    path.write_text(IN_A_FILE.replace("{change}", change))
    with pytest.raises(DataError, match=f"mine: .*{words}"):
        data.load(f"{path}:load")


# Sources.

NUM = 11
IMAGES = np.stack([random_pixels(i) for i in range(NUM)])
LABELS = np.arange(NUM) % 4
LISTED = np.array([9, 2, 4, 8, 0])


class Own:
    """A source of a user: two attributes and `read`."""

    num_examples, image_shape = NUM, IMAGES.shape[1:]

    def read(self, indices):
        images = tf.gather(tf.constant(IMAGES), indices)
        return images, tf.gather(tf.constant(LABELS, tf.int32), indices)


def cached(**options):
    return CachedSource(
        Files(map(png, IMAGES)), IMAGES.shape[1:], ImageOptions(**options)
    )


# Name -> how it is made, and which of the images it has; None where they are others.
WRAPPED = {
    "array": (lambda: ArraySource(IMAGES, LABELS), ...),
    "own class": (Own, ...),
    "subset": (lambda: Subset(ArraySource(IMAGES, LABELS), LISTED), LISTED),
    "subset of own": (lambda: Subset(Own(), LISTED), LISTED),
    "subset of a subset": (
        lambda: Subset(Subset(cached(), LISTED), np.array([3, 1])),
        [8, 2],
    ),
    "on a device": (lambda: DeviceSource(Own(), "/CPU:2"), ...),
    "cached": (cached, ...),
    "cached in part": (lambda: cached(image_cache_mb=4.5 * 144 / 1e6), ...),
    "not cached": (lambda: cached(image_cache_mb=0.0), ...),
    "resized": (lambda: cached(image_size=8), None),
}
UNLISTED = "own class", "subset of own", "on a device"
every_source = pytest.mark.parametrize("name", [*WRAPPED, *LOADERS])


@pytest.fixture(scope="module")
def source_of(made):
    """Name -> a source, and its images and labels, read in their order."""

    def create(name):
        if name in LOADERS:
            source = made(name)[2].test
        else:
            source, places = WRAPPED[name][0](), WRAPPED[name][1]
            if places is not None:
                return source, (IMAGES[places], LABELS[places])
        return source, all_of(source)

    return create


def read(source, indices, *numbers):
    images, labels = source.read(tf.constant(indices, tf.int64), *numbers)
    return images.numpy(), labels.numpy()


@every_source
def test_any_indices_are_read_in_any_order_however_it_is_called(source_of, name):
    source, expected = source_of(name)
    assert (source.num_examples, source.image_shape) == (
        len(expected[0]),
        expected[0].shape[1:],
    )
    last = source.num_examples - 1
    chosen = np.array([min(7, last), 0, 1, 1, last])
    indices = tf.constant(chosen, tf.int64)
    streamed = tf.data.Dataset.from_tensors(indices)
    ways = [read(source, chosen), tf.function(source.read)(indices)]
    ways.append(
        map(np.concatenate, zip(*(read(source, [i]) for i in chosen), strict=True))
    )
    if name != "on a device":
        ways += streamed.map(source.read)
    for images, labels in ways:
        assert images.dtype == np.uint8
        assert labels.dtype == (np.int64 if name == "on a device" else np.int32)
        np.testing.assert_array_equal(images, expected[0][chosen])
        np.testing.assert_array_equal(labels, expected[1][chosen])
    none = read(source, np.zeros(0, np.int64))
    assert none[0].shape == (0, *source.image_shape) and none[1].shape == (0,)


@every_source
def test_what_is_known_without_reading_is_what_is_read(source_of, name):
    source, (_, labels) = source_of(name)
    if name not in UNLISTED:
        np.testing.assert_array_equal(labels_for(source, "sampler"), labels)
    place = location_of(source, 1)
    assert place == "" or place != location_of(source, 0)
    if "cached" in name or "tfds" in name or name == "image_folder":
        assert place


@pytest.mark.parametrize("is_subset", [False, True])
def test_crop_numbers_give_each_image_a_crop_of_its_own(is_subset):
    source = cached(image_size=8)
    if is_subset:
        source = Subset(source, LISTED)
    assert source.reads_crops and not cached().reads_crops
    chosen = np.array([4, 0, 0, 2])
    numbers = tf.random.stateless_uniform([4, ATTEMPTS + 1, 2], [3, 4])
    images, labels = read(source, chosen, numbers)
    np.testing.assert_array_equal(labels, read(source, chosen)[1])
    for place, index in enumerate(chosen):
        [alone], _ = read(source, [index], numbers[place : place + 1])
        np.testing.assert_array_equal(images[place], alone)
    assert not np.array_equal(images[1], images[2])


def test_two_classes_of_one_name_are_refused():
    images = np.zeros((4, 4, 4, 3), np.uint8)
    name = arrays.give((images, np.arange(4) % 2), ["crane", "crane"])
    assert "two classes are called crane" in message(data.load, name)


def resident_bytes():
    [line] = re.findall(
        r"VmRSS:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text()
    )
    return int(line) * 1024


def test_images_in_memory_are_held_once():
    """A tensor of `tf.constant` takes twice the bytes of its array."""
    images = np.full((60_000, 32, 32, 3), 7, np.uint8)
    before = resident_bytes()
    source = ArraySource(images, np.zeros(len(images), int))
    assert source.read(tf.constant([59_999], tf.int64))[0].numpy().min() == 7
    assert resident_bytes() - before < 1.6 * images.nbytes


def test_a_tf_data_set_and_floats_are_held_once(monkeypatch):
    """Peaks of NumPy's allocations, which tracemalloc knows."""
    monkeypatch.setattr(sources, "COPIED_BYTES", 500_000)
    images = np.random.default_rng(0).integers(0, 256, (2000, 32, 32, 3), np.uint8)
    labels = np.arange(2000) % 10
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(64)
    for given in dataset, (images.astype(np.float32), labels):
        tracemalloc.start()
        arrays.give(given)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert images.nbytes < peak < 1.3 * images.nbytes
