"""Any bytes in the place of data are read, or refused in one short line.

Hypothesis makes the bytes, the same ones every time: a few in the fast tests, thousands
in the slow ones.
"""

import gzip
import os
import pathlib
import resource
import shutil
import struct
import tracemalloc

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from marks import slow
from pictures import WEBP, bmp, gif, png, random_pixels
from prepared_sets import features, random_examples, store

from towers.data import image_folder, tfds, tfds_source
from towers.data.cifar10 import CIFAR10
from towers.data.decoding import Decoding
from towers.data.encoded import EncodedSource
from towers.data.idx import read_idx
from towers.data.official import compare_names
from towers.data.pixels import decode
from towers.data.records import read_records
from towers.errors import DataError, TowersError, data_errors_of_tensorflow

MOST_PIXELS = 100_000
MOST_GROWTH_BYTES = 300e6

few_and_many = pytest.mark.parametrize("num_examples", [50, slow(1000)])


def fuzz(num_examples, strategy, call):
    """Calls with bytes of a strategy; a call may end with a TowersError alone."""

    def check(made):
        try:
            with data_errors_of_tensorflow():
                call(made)
        except TowersError as error:
            text = str(error)
            assert error.exit_code in (2, 3)
            assert text and text.isprintable() and len(text) <= 400, text

    options = settings(
        max_examples=num_examples,
        deadline=3000,  # milliseconds
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    before = peak_bytes()
    options(given(strategy)(check))()
    assert peak_bytes() - before < MOST_GROWTH_BYTES


def peak_bytes():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@st.composite
def changed(draw, contents):
    """One of some files with bytes changed, put in, or cut off; or any bytes."""
    content = bytearray(draw(st.sampled_from(contents)))
    if draw(st.booleans()):
        return draw(st.binary(max_size=300))
    for _ in range(draw(st.integers(0, 4))):
        # The header is where a change matters.
        last = draw(st.sampled_from([8, 32, 64, len(content)]))
        place = draw(st.integers(0, min(last, len(content))))
        new = draw(st.binary(max_size=6))
        content[place : place + draw(st.sampled_from([0, len(new)]))] = new
    if draw(st.integers(0, 3)) == 0:
        del content[draw(st.integers(0, len(content))) :]
    return bytes(content)


# Records.


@few_and_many
def test_any_file_of_records(tmp_path, num_examples):
    record = bytes([3]) + bytes(range(256)) * 12
    path = tmp_path / "data_batch_1.bin"

    def read(content):
        path.write_bytes(content)
        images, labels = read_records(str(path), 2, CIFAR10.label_counts)
        assert images.tobytes() and (labels < 10).all()

    fuzz(num_examples, changed([2 * record, record]), read)


@few_and_many
def test_any_names_of_classes(num_examples):
    many = st.just(30 * ["\x1b" + 300 * "x"])
    strategy = many | st.lists(st.text(max_size=300), max_size=30)
    fuzz(
        num_examples,
        strategy,
        lambda names: compare_names(CIFAR10.official, "names.txt", tuple(names)),
    )


@few_and_many
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_any_idx_file(tmp_path, num_examples, ending):
    content = struct.pack(">iiii", 0x803, 2, 28, 28) + bytes(2 * 28 * 28)
    contents = [gzip.compress(content) if ending else content]
    path = tmp_path / f"images{ending}"

    def read(content):
        path.write_bytes(content)
        assert read_idx(str(path), (2, 28, 28)).shape == (2, 28, 28)

    fuzz(num_examples, changed(contents), read)


def test_a_file_that_unpacks_to_much_more_is_not_unpacked(tmp_path):
    content = struct.pack(">iiii", 0x803, 2, 28, 28) + bytes(10**8)
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(content, 1))
    tracemalloc.start()
    with pytest.raises(DataError, match="it goes on after record 1"):
        read_idx(str(path), (2, 28, 28))
    assert tracemalloc.get_traced_memory()[1] < 2e6
    tracemalloc.stop()


# Image files.


class OneFile:
    """An `Encoded` of one file."""

    def __init__(self, content):
        self.content = content

    def __len__(self):
        return 1

    def read(self, index):
        return self.content, 0

    def place(self, index):
        return "train/ant/0.png"


def image_files():
    pixels = random_pixels(0, 12, 10)
    jpeg = tf.io.encode_jpeg(pixels).numpy()
    progressive = tf.io.encode_jpeg(pixels, progressive=True).numpy()
    deep = png(random_pixels(1, 9, 9, 4, np.uint16))
    frames = gif(6, 5, num_frames=3)
    return [png(pixels), deep, jpeg, progressive, frames, bmp(pixels), *WEBP.values()]


@few_and_many
def test_any_image_file(num_examples):
    decoding = Decoding(image_size=8, max_pixels=MOST_PIXELS, cache_mb=0)

    def read(content):
        source = EncodedSource(OneFile(content), (8, 8, 3), decoding)
        images, labels = source.read(tf.constant([0], tf.int64))
        assert images.shape == (1, 8, 8, 3) and labels == [0]
        image = decode(content, 3, decoding)
        assert image.size <= 3 * MOST_PIXELS

    fuzz(num_examples, changed(image_files()), read)


# Names of files and folders.

NAMES = st.text(
    st.characters(exclude_categories=[], exclude_characters="/\0"),
    min_size=1,
    max_size=70,
)


@few_and_many
def test_any_names_of_folders_and_files(tmp_path, num_examples):
    content = png(random_pixels(0))
    encodable = NAMES.filter(is_file_name)

    def read(names):
        root = tmp_path / "root"
        shutil.rmtree(root, ignore_errors=True)
        for name, stem in names:
            folder = os.path.join(root, "train", name)
            os.makedirs(folder, exist_ok=True)
            for number in range(2):
                path = pathlib.Path(folder, f"{stem[:20]}{number}.png")
                path.write_bytes(content if number else content[:-9])
        data_set = image_folder.load(str(root))
        words = [*data_set.class_names, data_set.origin]
        assert all(word.encode() and "\n" not in word for word in words)

    pairs = st.lists(st.tuples(encodable, encodable), min_size=1, max_size=4)
    fuzz(num_examples, pairs, read)


def is_file_name(text):
    """Whether Linux takes it; of the surrogates, those that stand for bytes."""
    try:
        name = os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return len(name) <= 200 and name not in (b".", b"..")


# What tensorflow-datasets has prepared.


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    home = tmp_path_factory.mktemp("fuzz")
    store(home, random_examples(3, 0), random_examples(2, 1), spec=features(id=None))
    return home


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json"])
@pytest.mark.parametrize("num_examples", [20, slow(1000)])
@pytest.mark.parametrize("reader", ["in_memory", "encoded"])
def test_any_metadata_of_a_prepared_folder(prepared, name, num_examples, reader):
    folder = prepared / "shapes" / "1.2.3"
    path = folder / name
    content = path.read_bytes()

    def read(changed_content):
        path.write_bytes(changed_content)
        if reader == "in_memory":
            data_set = tfds.read_prepared(str(folder))
        else:
            data_set = tfds_source.load("shapes", str(prepared))
        assert data_set.train.num_examples + data_set.test.num_examples <= 5

    try:
        fuzz(num_examples, changed([content]), read)
    finally:
        path.write_bytes(content)
