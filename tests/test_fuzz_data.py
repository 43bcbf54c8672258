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

import numpy as np
import pytest
import tensorflow as tf
from engines import fuzzing
from hypothesis import strategies as st
from marks import slow
from pictures import file_of, gif, png, random_pixels
from PIL import Image
from prepared_sets import features, random_examples, store
from test_cached import Files
from test_weights import WRITERS, create_theirs, empty_state, fill

from towers.data.files import image_folder
from towers.data.files.cached import CachedSource
from towers.data.files.image import read_image, upright_size
from towers.data.files.image_files import ImageOptions
from towers.data.sets import tfds
from towers.data.sets.published import RecordFile, read_file
from towers.errors import DataError, TowersError, data_errors_of_tensorflow

MOST_PIXELS = 100_000

few_and_many = pytest.mark.parametrize("num_examples", [20, slow(1000)])


def fuzz(num_examples, strategy, call, *, codes=(2, 3), **options):
    """Calls with bytes of a strategy; a call may end with a TowersError alone."""

    def read(made):
        try:
            with data_errors_of_tensorflow():
                call(made)
        except TowersError as error:
            assert str(error).isprintable()
            raise

    options |= {"codes": codes, "derandomize": True, "most_secs": 3.0}
    fuzzing.fuzz(read, strategy, num_examples, **options)


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


IDX = RecordFile(
    "images",
    2,
    np.dtype([("planes", np.uint8, (1, 28, 28))]),
    struct.pack(">iiii", 0x803, 2, 28, 28),
)


@few_and_many
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_any_idx_file(tmp_path, num_examples, ending):
    content = IDX.header + bytes(2 * 28 * 28)
    contents = [gzip.compress(content) if ending else content]

    def read(content):
        (tmp_path / f"images{ending}").write_bytes(content)
        assert read_file(IDX, str(tmp_path), {})["planes"].shape == (2, 1, 28, 28)

    fuzz(num_examples, changed(contents), read)


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
    options = ImageOptions(image_size=8, max_image_pixels=MOST_PIXELS, image_cache_mb=0)

    def read(content):
        source = CachedSource(Files([content]), (8, 8, 3), options)
        images, labels = source.read(tf.constant([0], tf.int64))
        assert images.shape == (1, 8, 8, 3) and labels == [0]
        height, width = upright_size(content, MOST_PIXELS)
        assert height * width <= MOST_PIXELS
        assert read_image(content, (height, width, 3), resize=False).any() in (0, 1)

    fuzz(num_examples, changed(image_files()), read)


# Names of files and folders.

NAMES = st.text(
    st.characters(exclude_categories=[], exclude_characters="/\0"),
    min_size=1,
    max_size=70,
)


@pytest.mark.parametrize("num_examples", [10, slow(1000)])
@pytest.mark.row(40)
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


# Records.


@few_and_many
@pytest.mark.row(40)
def test_any_file_of_tensorflow_records(tmp_path, num_examples):
    path = tmp_path / "records"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for content in (b"ab", b"", b"cde"):
            writer.write(content)

    def read(content):
        path.write_bytes(content)
        try:
            records = tfds.Records([str(path)])
        except ValueError as error:
            raise DataError(str(error)) from None
        assert sum(len(records.read(i)) + 16 for i in range(len(records))) == len(
            content
        )

    fuzz(num_examples, changed([path.read_bytes()]), read)


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
    fuzz(num_examples, changed([file.read_bytes()]), read, **options)
