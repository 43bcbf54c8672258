"""Image folders: how they are listed, split and refused (row 23)."""

import dataclasses
import os
import shutil

import numpy as np
import pytest
import small_runs
import tensorflow as tf
from marks import slow
from pictures import png, png_file, random_pixels, write_folder
from PIL import Image

from towers import build, data, evaluation, training
from towers.config import Config
from towers.data import image_folder
from towers.data.augment import create_augment
from towers.data.batches import TrainBatches
from towers.data.image_files import FolderFiles, ImageOptions
from towers.data.sources import ArraySource, split_off_test
from towers.errors import ConfigError, DataError, data_errors_of_tensorflow
from towers.export.examples import images_of
from towers.run.dataset_info import DatasetInfo

COUNTS = {"cat": 5, "ant": 3, "dog": 4}
TEST_COUNTS = {"ant": 2, "dog": 1, "cat": 2}


@pytest.fixture
def root(tmp_path):
    """A sound folder: three classes, in no order on the disk."""
    write_folder(tmp_path / "root", "train", COUNTS)
    write_folder(tmp_path / "root", "test", TEST_COUNTS, seed=1)
    return tmp_path / "root"


def load(root, **decoding):
    return image_folder.load(str(root), ImageOptions(**decoding))


def all_of(source):
    images, labels = source.read(tf.range(source.num_examples, dtype=tf.int64))
    return images.numpy(), labels.numpy()


def message(root, **decoding):
    with pytest.raises(DataError) as caught:
        load(root, **decoding)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_classes_and_files_come_in_the_order_of_their_names(root):
    data_set = load(root)
    assert data_set.name == "image_folder"
    assert data_set.class_names == ("ant", "cat", "dog")
    assert data_set.origin == f"{root} (test/ for testing)"
    trained = [
        random_pixels([0, k, i]) for k, n in ((1, 3), (0, 5), (2, 4)) for i in range(n)
    ]
    tested = [
        random_pixels([1, k, i]) for k, n in ((0, 2), (2, 2), (1, 1)) for i in range(n)
    ]
    images, labels = all_of(data_set.train)
    np.testing.assert_array_equal(images, trained)
    np.testing.assert_array_equal(labels, [0] * 3 + [1] * 5 + [2] * 4)
    np.testing.assert_allclose(data_set.mean, np.mean(trained, (0, 1, 2)))
    np.testing.assert_allclose(data_set.deviation, np.std(trained, (0, 1, 2)))
    images, labels = all_of(data_set.test)
    np.testing.assert_array_equal(images, tested)
    np.testing.assert_array_equal(labels, [0, 0, 1, 1, 2])


def test_the_table_of_data_sets_hands_the_options_on(root, monkeypatch):
    data_set = data.load("image_folder", str(root), image_size=4, image_cache_mb=0.0)
    assert data_set.train.image_shape == (4, 4, 3)
    monkeypatch.chdir(root.parent)
    root.rename(root.parent / "data")
    assert data.load("image_folder").train.image_shape == (8, 6, 3)


def test_row_40_a_run_decodes_no_image_of_too_many_pixels(root):
    options = {"data_dir": str(root), "model": "lenet", "augment": "none"}
    options |= {"dataset": "image_folder", "image_size": 14, "device": "cpu"}
    build.build(Config(**options, max_image_pixels=196))
    path = root / "train" / "ant" / "01.png"
    path.write_bytes(png_file(15, 15, 8, 2, bytes(46 * 15)))
    with pytest.raises(DataError) as caught:
        build.build(Config(**options, max_image_pixels=224))
    assert str(caught.value).startswith(f"{path}: has 225 pixels, and at most ")


@pytest.mark.parametrize("name", ["val", "VALID", "Validation"])
def test_evaluations_during_training_use_the_images_for_validation(root, name):
    write_folder(root, name, {"dog": 2, "ant": 1}, seed=2)
    data_set = load(root)
    assert f"({name}/ for validation, test/ for testing)" in data_set.origin
    images, labels = all_of(data_set.validation)
    assert labels.tolist() == [0, 2, 2] and data_set.test.num_examples == 5
    np.testing.assert_array_equal(images[0], random_pixels([2, 1, 0]))
    options = {"dataset": "image_folder", "data_dir": str(root), "model": "lenet"}
    config = Config(**options, augment="none", image_size=14, device="cpu")
    split, source = build.build(config).eval_split
    assert split == "validation" and source.num_examples == 3
    config = dataclasses.replace(config, validation_fraction=0.1)
    with pytest.raises(ConfigError, match="validation_fraction=0.1: the data set has"):
        build.build(config)
    shutil.rmtree(root / "test")
    data_set = load(root)
    assert f"({name}/ for validation and testing)" in data_set.origin
    assert data_set.test.num_examples == data_set.validation.num_examples == 3
    shutil.copytree(root / name, root / "Val")
    assert "two folders for the same" in message(root)


def test_endings_in_any_case_links_and_jpeg_files_are_read(root):
    cats = root / "train" / "cat"
    (cats / "01.png").rename(cats / "01.PNG")
    (cats / "02.png").rename(cats / "02.JPEG")
    pixels = np.full((8, 6, 3), 77, np.uint8)
    (cats / "03.png").unlink()
    (cats / "03.jpg").write_bytes(tf.io.encode_jpeg(pixels).numpy())
    (cats / "04.png").rename(root / "elsewhere")
    (cats / "04.png").symlink_to(root / "elsewhere")
    images, labels = all_of(load(root).train)
    assert (labels == 1).sum() == 5
    np.testing.assert_array_equal(images[labels == 1][3], pixels)
    np.testing.assert_array_equal(images[labels == 1][4], random_pixels([0, 0, 4]))


def test_images_of_several_sizes_are_brought_to_one_also_in_a_run(root):
    (root / "train" / "cat" / "03.png").write_bytes(png(random_pixels(0, 30, 40)))
    data_set = load(root, image_size=5)
    assert data_set.train.image_shape == data_set.test.image_shape == (5, 5, 3)
    assert all_of(data_set.train)[0].shape == (12, 5, 5, 3)
    assert "sizes differ" not in data_set.origin
    parts = build.build(
        Config(dataset="image_folder", data_dir=str(root), model="lenet", device="cpu")
    )
    assert parts.data.train.image_shape == parts.data.test.image_shape == (64, 64, 3)
    assert "sizes differ: resized to 64x64, --image_size=N for" in parts.data.origin
    assert all_of(parts.data.test)[0].shape == (5, 64, 64, 3)


def test_gray_and_color_images_of_all_formats_are_read_together(root):
    pixels = random_pixels(5, 8, 6)
    image, dogs = Image.fromarray(pixels), root / "train" / "dog"
    image.convert("L").save(dogs / "gray.JPG", quality=100)
    image.save(dogs / "lossless.webp", lossless=True)
    image.save(dogs / "true.bmp")
    image.quantize(16).save(dogs / "palette.BMP")
    images, labels = all_of(load(root).train)
    first, *_, gray, lossless, palette, true = images[labels == 2]
    np.testing.assert_array_equal(first, random_pixels([0, 2, 0]))
    assert (gray == gray[..., :1]).all() and np.ptp(gray) > 50
    np.testing.assert_array_equal(lossless, pixels)
    np.testing.assert_array_equal(palette, image.quantize(16).convert("RGB"))
    np.testing.assert_array_equal(true, pixels)


# Without a folder train/.


def test_classes_without_a_folder_train_are_read_and_a_part_held_out(tmp_path):
    write_folder(tmp_path, ".", {"ant": 20, "bee": 9})
    data_set = load(tmp_path)
    assert data_set.class_names == ("ant", "bee")
    assert data_set.origin == f"{tmp_path} (10% of each class held out for testing)"
    assert (data_set.train.num_examples, data_set.test.num_examples) == (26, 3)
    # The same images are held out as in a folder train/.
    write_folder(tmp_path / "other", "train", {"ant": 20, "bee": 9})
    for source, other in (
        (data_set.train, load(tmp_path / "other").train),
        (data_set.test, load(tmp_path / "other").test),
    ):
        np.testing.assert_array_equal(all_of(source)[0], all_of(other)[0])


def test_names_of_any_bytes_are_kept_in_the_order_of_strings(tmp_path):
    """Which is not the order of their bytes."""
    names = ["\U00010000.png", "\uffee.png", "a.png"]
    names += [os.fsdecode(b"\xff.png"), os.fsdecode(b"\x80\xc3.png")]
    for class_name in ("b", "\u00e4"):
        (tmp_path / "train" / class_name).mkdir(parents=True)
        for name in names:
            place = tmp_path / "train" / class_name / name
            place.write_bytes(png(random_pixels(0)))
    skipped = image_folder.Skipped()
    listed = image_folder._list_classes(str(tmp_path / "train"), skipped, None)
    files = FolderFiles("root", listed)
    expected = [f"root/{c}/{name}" for c in ("b", "\u00e4") for name in sorted(names)]
    assert [files.place(i) for i in range(len(files))] == expected
    assert files.labels.tolist() == [0] * 5 + [1] * 5


# Without a folder for testing.


def test_a_tenth_of_each_class_is_held_out(tmp_path):
    write_folder(tmp_path, "train", {"a": 20, "b": 9, "c": 1})
    data_set = load(tmp_path)
    assert "10% of each class held out for testing" in data_set.origin
    (train_images, train_labels), (images, labels) = map(
        all_of, (data_set.train, data_set.test)
    )
    assert np.bincount(train_labels).tolist() == [18, 8, 1]
    assert np.bincount(labels).tolist() == [2, 1]
    seen = {image.tobytes() for image in [*train_images, *images]}
    assert len(seen) == 30
    np.testing.assert_allclose(data_set.mean, train_images.mean((0, 1, 2)))
    again, _ = all_of(load(tmp_path).test)
    np.testing.assert_array_equal(again, images)


def test_held_out_images_come_from_everywhere():
    labels = np.arange(10_000) % 4
    source = ArraySource(np.zeros((10_000, 1, 1, 1), np.uint8), np.arange(10_000))
    rest, held_out = (all_of(x)[1] for x in split_off_test(source, labels, "here"))
    np.testing.assert_array_equal(np.sort([*rest, *held_out]), np.arange(10_000))
    np.testing.assert_array_equal(np.bincount(labels[held_out]), [250] * 4)
    # The mean of 1,000 places, each with a standard deviation of 2,900.
    assert abs(held_out.mean() - 5000) < 5 * 2900 / 1000**0.5


# Refused and skipped files.


@pytest.mark.row(23)
def test_row_23_stray_files_and_empty_folders_are_skipped_and_counted(root):
    (root / "train" / "cat" / "notes.txt").touch()
    (root / "train" / "cat" / "Thumbs.db").touch()
    (root / "test" / "labels.csv").touch()
    (root / "train" / ".DS_Store").touch()
    (root / "train" / ".cache").mkdir()
    (root / "train" / "__MACOSX" / "cat").mkdir(parents=True)
    (root / "train" / "__MACOSX" / "cat" / "._01.png").touch()
    (root / "train" / "eel").mkdir()
    (root / "train" / "cat" / "more").mkdir()
    (root / "test" / "eel").mkdir()
    (root / "readme.md").touch()
    data_set = load(root)
    assert data_set.class_names == ("ant", "cat", "dog")
    assert "; 7 other file(s) or empty folder(s), as " in data_set.origin


def spoil_some(root):
    """Files of a few kinds; the names of those that are wrong."""
    (root / "train" / "cat" / "03.png").write_bytes(b"")
    (root / "train" / "dog" / "00.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99))
    (root / "train" / "dog" / "x.jp2").touch()
    (root / "test" / "ant" / "01.png").write_bytes(png(random_pixels(0))[:60])
    return "train/dog/x.jp2", "train/cat/03.png", "train/dog/00.png", "test/ant/01.png"


@pytest.mark.row(23)
def test_row_23_bad_images_are_left_out_and_named(root):
    names = spoil_some(root)
    data_set = load(root, bad_images="skip")
    assert "; 4 bad image(s) skipped: " in data_set.origin
    assert sum(f"{root}/{name} (" in data_set.origin for name in names) == 3
    images, labels = all_of(data_set.train)
    np.testing.assert_array_equal(np.bincount(labels), [3, 4, 3])
    np.testing.assert_array_equal(images[3 + 3], random_pixels([0, 0, 4]))
    assert all_of(data_set.test)[1].tolist() == [0, 1, 1, 2]
    # A batch is that of a folder without them.
    for name in names:
        (root / name).unlink()
    clean = load(root, bad_images="skip")
    assert "bad image" not in clean.origin
    augment = create_augment("none", (8, 6, 3), [0] * 3, [1] * 3)
    step = tf.constant(5, tf.int64)
    for one, other in ((data_set.train, clean.train), (data_set.test, clean.test)):
        batch, expected = (
            TrainBatches(x, augment, 1, 4)(step)["images"] for x in (one, other)
        )
        np.testing.assert_array_equal(batch, expected)


def test_a_file_that_is_spoiled_later_stops_a_run_that_skips(root):
    data_set = load(root, bad_images="skip", cache_mb=0)
    (root / "train" / "cat" / "03.png").write_bytes(b"")
    with pytest.raises(DataError, match="03.png: the file is empty"):
        with data_errors_of_tensorflow():
            all_of(data_set.train)


def one_class(root):
    shutil.rmtree(root / "train" / "cat")
    shutil.rmtree(root / "train" / "dog")


def no_train(root):
    (root / "train").rename(root / "training")


def image_of_no_class(root):
    (root / "train" / "x.png").touch()


def other_kind(root):
    (root / "train" / "cat" / "x.JP2").touch()


def folder_in_a_class(root):
    (root / "train" / "cat" / "images.png").mkdir()
    (root / "train" / "cat" / "images.png" / "0.png").touch()


def dead_link(root):
    (root / "train" / "cat" / "x.png").symlink_to(root / "nowhere")


def link_in_a_circle(root):
    (root / "train" / "circle").symlink_to("circle")
    (root / "train" / "cat" / "x.png").symlink_to("x.png")


def unknown_class(root):
    write_folder(root, "test", {"eel": 1})


def empty_test(root):
    shutil.rmtree(root / "test")
    (root / "test" / "cat").mkdir(parents=True)


def one_image_each(root):
    shutil.rmtree(root)
    write_folder(root, "train", {"ant": 1, "cat": 1})


def empty_image(root):
    (root / "train" / "ant" / "00.png").write_bytes(b"")


def broken_image(root):
    (root / "train" / "dog" / "02.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99))


@pytest.mark.parametrize(
    "spoil,place,words",
    [
        (one_class, "train", "1 folder(s) with JPEG, PNG"),
        (no_train, "", "has no folder train/; an image folder has train/CLASS/*.jpg"),
        (image_of_no_class, "train/x.png", "is an image of no class"),
        (
            other_kind,
            "train/cat/x.JP2",
            "only JPEG, PNG, ",
        ),
        (folder_in_a_class, "train/cat/images.png", "is a folder in the folder of a"),
        (dead_link, "train/cat/x.png", "is a link that leads nowhere"),
        (link_in_a_circle, "train/cat/x.png", "is a link that leads nowhere"),
        (unknown_class, "test/eel", "there is no such class in train/"),
        (empty_test, "test", "holds no images"),
        (one_image_each, "train", "no class has two images"),
        (empty_image, "train/ant/00.png", "the file is empty"),
        (broken_image, "train/dog/02.png", "cannot be decoded: broken PNG"),
    ],
)
@pytest.mark.row(23)
def test_row_23_what_is_wrong_is_named(root, spoil, place, words):
    spoil(root)
    text = message(root)
    assert text.startswith(f"{root / place}") and words in text


def test_a_folder_that_is_not_there(tmp_path):
    start = f"{tmp_path}/none: there is no such folder; an image folder has train/"
    assert message(tmp_path / "none").startswith(start)


# In a run.


def test_row_23_a_run_that_meets_a_broken_file_names_it_and_can_go_on(
    root, tmp_path, monkeypatch
):
    """The file is spoiled after the start, as one is that the sample did not hold."""
    small_runs.use(monkeypatch, data_set=load(root, cache_mb=0))
    config = small_runs.small_config(batch_size=4, num_epochs=2.0)
    path = root / "train" / "dog" / "02.png"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError) as caught:
        training.train(tmp_path / "run", config)
    assert str(caught.value).startswith(f"{path}: cannot be decoded: ")
    path.write_bytes(png(random_pixels([0, 2, 2])))
    assert training.train(tmp_path / "run", config).step == 6

    path = root / "test" / "cat" / "01.png"
    path.write_bytes(b"")
    with pytest.raises(DataError) as caught:
        evaluation.evaluate(tmp_path / "run", config)
    assert str(caught.value).startswith(f"{path}: the file is empty")


def folder_run(tmp_path, monkeypatch, **options):
    """A short run on a folder whose training images have several sizes, one class of
    which has no test images: (the folder, the run's folder, its Config)."""
    root, counts = tmp_path / "root", {"c\tat": 4, "ant": 3, "dog": 5}
    write_folder(root, "train", counts)
    (root / "train" / "dog" / "07.png").write_bytes(png(random_pixels(7, 9, 12)))
    write_folder(root, "test", {"dog": 4, "c\tat": 3}, seed=1)
    options |= {"dataset": "image_folder", "data_dir": str(root)}
    small_runs.use(monkeypatch)
    config = small_runs.small_config(batch_size=4, num_epochs=3.0, **options)
    training.train(tmp_path / "run", config)
    return root, tmp_path / "run", config


@pytest.mark.parametrize(
    "options", [{}, slow({"image_size": 7, "validation_fraction": 0.3})]
)
def test_an_evaluation_needs_no_training_images(tmp_path, monkeypatch, options):
    root, run, config = folder_run(tmp_path, monkeypatch, **options)
    # One that follows the run counts its epochs, so it loads all images.
    expected = evaluation.evaluate(run, config, eval_interval_secs=1.0)
    mistakes = (run / "mistakes.csv").read_text()
    assert 0 < expected["test_correct"] < expected["test_images"] == 7
    shutil.rmtree(root / "train")
    assert evaluation.evaluate(run, config) == expected
    assert (run / "mistakes.csv").read_text() == mistakes
    with pytest.raises(DataError, match="has no folder train/"):
        evaluation.evaluate(run, config, eval_interval_secs=1.0)
    write_folder(root, "test", {"eel": 1})
    with pytest.raises(DataError) as caught:
        evaluation.evaluate(run, config)
    words = "there is no such class in the run; that has ant, c\\tat, dog"
    assert str(caught.value) == f"{root / 'test' / 'eel'}: {words}"


def test_an_export_reads_training_images_for_int8_alone(tmp_path, monkeypatch):
    root, path, _ = folder_run(tmp_path, monkeypatch)
    run = evaluation.load_run(path)
    compared, calibration, words = images_of(run, calibrate=True)
    assert (len(compared), len(calibration), words) == (7, 13, "test images")
    shutil.move(root / "train", tmp_path / "classes")
    again, calibration, words = images_of(run)
    assert calibration is None and words == "test images"
    np.testing.assert_array_equal(again, compared)
    drawn, calibration, words = images_of(run, calibrate=True)
    assert calibration is None and words.startswith("drawn images")
    with pytest.raises(DataError, match="has no folder train/"):
        images_of(run, data_dir=str(root), calibrate=True)


def test_held_out_test_images_are_those_of_the_training_also_in_an_evaluation(
    root, monkeypatch
):
    """They are drawn from all images, which have to be there."""
    shutil.rmtree(root / "test")
    classes = shutil.move(root / "train", root.parent / "classes")
    whole = load(classes)
    # Their mean and standard deviation are known.
    monkeypatch.setattr(image_folder, "sampled_moments", None)
    again = image_folder.load(str(classes), trained=DatasetInfo.of(whole))
    assert (again.mean, again.deviation) == (whole.mean, whole.deviation)
    assert again.train.num_examples == whole.train.num_examples
    np.testing.assert_array_equal(all_of(again.test)[0], all_of(whole.test)[0])


@pytest.mark.parametrize("change", ["rename", "move", "swap"])
@pytest.mark.row(34)
def test_the_checksum_notices_other_names_of_as_many_images(root, change):
    first, second = sorted((root / "train").iterdir())[:2]
    ours, theirs = sorted(first.iterdir())[0], sorted(second.iterdir())[0]
    before = load(root).train.checksum
    assert load(root).train.checksum == before
    if change == "rename":
        ours.rename(ours.with_name("z" + ours.name))
    elif change == "move":
        ours.rename(second / ("z" + ours.name))
    else:
        ours.rename(second / ("z" + ours.name))
        theirs.rename(first / ("z" + theirs.name))
    assert load(root).train.checksum != before
