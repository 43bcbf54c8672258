"""Image folders: how they are listed, split and refused."""

import dataclasses
import shutil

import fsspec
import numpy as np
import pytest
from containers import assert_equal_images, names_of
from pictures import png, random_pixels, tiff, write_folder
from PIL import Image, ImageOps
from prepared_sets import all_of
from prepared_sets import message as line_of

from towers import data
from towers.build import builder
from towers.config import Config
from towers.data.files import image_folder
from towers.data.files.image_files import ImageOptions
from towers.data.files.unlabeled import Labels
from towers.data.sets.photos import photo_options
from towers.errors import ConfigError
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


def message(root):
    return line_of(load, root)


def test_the_table_of_data_sets_hands_the_options_on(root, monkeypatch):
    data_set = data.load("image_folder", str(root), image_size=4, image_cache_mb=0.0)
    assert data_set.train.image_shape == (4, 4, 3)
    expected = {"training": "train/", "test": "test/"}
    assert data_set.origin == str(root) and data_set.inventory.splits == expected
    monkeypatch.chdir(root.parent)
    root.rename(root.parent / "data")
    assert data.load("image_folder").train.image_shape == (8, 6, 3)


def test_evaluations_during_training_use_the_images_for_validation(root):
    write_folder(root, "val", {"dog": 2, "ant": 1}, seed=2)
    for former, name in (("val", "Validation"), ("Validation", "VALID")):
        (root / former).rename(root / name)
        data_set = load(root)
        assert data_set.inventory.splits["validation"] == f"{name}/"
        assert data_set.inventory.splits["test"] == "test/"
        images, labels = all_of(data_set.validation)
        assert labels.tolist() == [0, 2, 2] and data_set.test.num_examples == 5
        np.testing.assert_array_equal(images[0], random_pixels([2, 1, 0]))
    options = {"dataset": "image_folder", "data_dir": str(root), "model": "lenet"}
    config = Config(**options, augment="none", image_size=14, device="cpu")
    split, source = builder.build(config).eval_split
    assert split == "validation" and source.num_examples == 3
    config = dataclasses.replace(config, validation_fraction=0.1)
    with pytest.raises(ConfigError, match="the data set has"):
        builder.build(config)
    shutil.rmtree(root / "test")
    data_set = load(root)
    uses = data_set.inventory.splits
    assert uses["validation"] == uses["test"] == f"{name}/"
    assert data_set.test.num_examples == data_set.validation.num_examples == 3
    shutil.copytree(root / name, root / "Val")
    assert "two folders for the same" in message(root)


@pytest.mark.row(23)
def test_row_23_all_that_pillow_reads_is_read_and_names_may_lack_endings(root):
    cats, image = root / "train" / "cat", Image.fromarray(np.full((8, 6, 3), 77, "u1"))
    kinds = "PPM DIB PCX TGA JPEG2000 ICO SGI QOI DDS PNG WEBP AVIF TIFF".split()
    names = "x.ppm x.dib x.pcx x.TGA x.jp2 x.ico x.sgi x.qoi x.dds IMG_0001".split()
    names += ["x.webp", "x.avif", "x.tif"]
    for kind, name in zip(kinds, names, strict=True):
        image.save(cats / name, kind, **({"sizes": [(6, 8)]} if kind == "ICO" else {}))
    (cats / "x.pgm").write_bytes(b"P5 6 8 65535\n" + bytes([77, 200]) * 48)
    for name in ("photo.1", "photo.jpg?w=60", "x.jfif", "x.jpe"):
        image.save(cats / name, "JPEG")
    (cats / "notes").write_text("words")
    images, labels = all_of(load(root).train)
    assert (labels == 1).sum() == 5 + 13 + 5
    assert (
        np.abs(images[labels == 1].astype(int) - 77).max((1, 2, 3)) <= 1
    ).sum() == 18
    assert load(root).inventory.names == {"other files": [str(cats / "notes")]}
    for name in ("x.eps", "x.nef", "x.icns", "x.dng"):
        image.save(cats / name, "TIFF")
        assert message(root).startswith(f"{cats / name}: is of a format that is not re")
        (cats / name).unlink()


@pytest.mark.row(60)
def test_row_60_masks_and_thumbnails_next_to_images_are_counted(root):
    for name in ("ant/00_mask.png", "cat/00-Thumb.PNG", "dog/with_masks_1.png"):
        shutil.copy(root / "train/ant/00.png", root / "train" / name)
    assert load(root).inventory.inferred["masks"].startswith("2 images")


@pytest.mark.row(60)
def test_row_60_frames_after_the_first_are_counted(root):
    pages = [Image.fromarray(random_pixels(i, 8, 6)) for i in range(3)]
    for name in ("ant/a.tif", "cat/a.gif"):
        path = root / "train" / name
        pages[0].save(path, save_all=True, append_images=pages[1:])
    assert "2 of 14 images" in load(root).inventory.inferred["frames"]


def test_images_that_are_nearly_black_are_a_data_set(root):
    for path in root.glob("*/*/*.png"):
        Image.fromarray(np.eye(8, 6, dtype=np.uint8)).save(path)
    found = data.load("image_folder", str(root))
    np.testing.assert_allclose(found.mean, [6 / 48] * 3)


def test_images_become_rectangles_as_by_pillow(root):
    data_set = data.load("image_folder", str(root), image_size="9x20")
    images = all_of(data_set.test)[0]
    paths = sorted((root / "test").glob("*/*.png"))
    bilinear = Image.Resampling.BILINEAR
    for image, path in zip(images, paths, strict=True):
        expected = ImageOps.fit(Image.open(path), (20, 9), bilinear)
        assert np.abs(image.astype(int) - np.asarray(expected)).max() <= 1
    # An evaluation alone reads them so, too.
    trained = DatasetInfo.of(data_set)
    options = ImageOptions(image_size="9x20")
    alone = image_folder.load(str(root), options, trained)
    np.testing.assert_array_equal(all_of(alone.test)[0], images)


# Without folders train/ or test/.


def test_a_tenth_of_each_class_is_held_out(tmp_path):
    counts = {"a": 20, "b": 9, "c": 1}
    write_folder(tmp_path, "train", counts)
    data_set = load(tmp_path)
    assert data_set.inventory.splits["test"].startswith("10% of each class of these")
    (train_images, train_labels), (images, labels) = map(
        all_of, (data_set.train, data_set.test)
    )
    assert np.bincount(train_labels).tolist() == [18, 8, 1]
    assert np.bincount(labels).tolist() == [2, 1]
    seen = {image.tobytes() for image in [*train_images, *images]}
    assert len(seen) == 30
    np.testing.assert_allclose(data_set.mean, train_images.mean((0, 1, 2)))
    # The same ones again, also where there is no folder train/.
    write_folder(tmp_path / "flat", ".", counts)
    for folder in (tmp_path, tmp_path / "flat"):
        again = load(folder)
        assert again.class_names == ("a", "b", "c")
        np.testing.assert_array_equal(all_of(again.test)[0], images)
        np.testing.assert_array_equal(all_of(again.train)[0], train_images)


# Refused and skipped files.


@pytest.mark.row(23)
def test_row_23_bad_images_are_left_out_and_named(root):
    names = "train/dog/x.svg", "train/cat/03.png", "train/dog/00.png", "test/ant/01.png"
    planar = tiff([bytes(96)] * 3, 8, 6, {258: [16] * 3, 262: [6], 277: [3], 284: [2]})
    contents = b"", planar, b"\x89PNG\r\n\x1a\n" + bytes(99), png(random_pixels(0))[:60]
    for name, content in zip(names, contents, strict=True):
        (root / name).write_bytes(content)
    data_set = load(root, bad_images="skip")
    bad = data_set.inventory.names["bad images"]
    assert data_set.inventory.unused["bad images"] == 4 and len(bad) == 3
    assert all(any(f"{root}/{name} (" in x for name in names) for x in bad)
    assert "train/cat/03.png (is a TIFF" in str([*data_set.inventory.lines(data_set)])
    # What is left is a folder without them.
    for name in names:
        (root / name).unlink()
    clean = load(root, bad_images="skip")
    assert not clean.inventory.unused
    assert_equal_images(data_set.train, clean.train)
    assert_equal_images(data_set.test, clean.test)


def touch(name):
    return lambda root: (root / name).touch()


def empty_test(root):
    shutil.rmtree(root / "test")
    (root / "test" / "cat").mkdir(parents=True)


def only(counts):
    """A folder of these classes alone."""

    def write(root):
        shutil.rmtree(root)
        write_folder(root, "train", counts)

    return write


@pytest.mark.parametrize(
    "spoil,place,words",
    [
        (only({"ant": 2}), "train", "one class folder, ant/"),
        (shutil.rmtree, "", "no such folder; an image folder has train/CLASS"),
        (
            lambda root: shutil.move(root / "train", root / "photos"),
            "",
            "has no folder train/; --data_dir=",
        ),
        (touch("train/x.png"), "train/x.png", "is an image outside of class"),
        (touch("train/cat/x.SVG"), "train/cat/x.SVG", "of a format that is n"),
        (touch("train/cat/x.HEIC"), "train/cat/x.HEIC", "pillow-heif"),
        (
            lambda root: (root / "train/cat/x.png").symlink_to("x.png"),
            "train/cat/x.png",
            "is a broken symbolic link",
        ),
        (
            lambda root: write_folder(root, "test", {"eel": 1}),
            "test/eel",
            "has the class eel, which is not in train/",
        ),
        (empty_test, "test", "has no images"),
        (only({"ant": 1, "cat": 1}), "", "no class has two images"),
    ],
)
@pytest.mark.row(23)
def test_row_23_what_is_wrong_is_named(root, spoil, place, words):
    spoil(root)
    text = message(root)
    assert text.startswith(f"{root / place}") and words in text


def test_folders_of_splits_have_the_names_that_archives_give_them(tmp_path):
    for number, (train_name, val, test) in enumerate(
        [
            ("Training", "", "Testing"),
            ("train_images", "Validation Data", "TEST-SET"),
            ("trainset", "dev", "test/test"),
            ("seg_train/seg_train", "seg_val", "seg_test/seg_test"),
            ("TRAIN", "eval", "testing_images"),
            ("train2017", "val2017", "test2017"),
            ("01_train", "", "02_test"),
            ("train.v1", "val.v1", "test.v1"),
            ("train-256", "val_v2", "test-256"),
            ("train", "val2017", "test_v2"),
        ]
    ):
        root = tmp_path / str(number)
        write_folder(root, train_name, {"b": 4, "a": 3})
        write_folder(root, test, {"a": 2, "b": 2}, seed=1)
        if val:
            write_folder(root, val, {"b": 1}, seed=2)
        data_set = load(root)
        assert (data_set.train.num_examples, data_set.test.num_examples) == (7, 4)
        assert (data_set.validation is not None) == bool(val)
        assert data_set.class_names == ("a", "b")
        assert photo_options(str(root))["num_epochs"] == 100
    # Short names come first, as before, and a class may be a steam_train.
    write_folder(tmp_path / "0", "train", {"a": 2, "b": 2, "c": 1})
    assert load(tmp_path / "0").class_names == ("a", "b", "c")
    write_folder(tmp_path / "trains", ".", {"steam_train": 3, "toy_train": 3})
    assert load(tmp_path / "trains").class_names == ("steam_train", "toy_train")


def test_folders_inside_a_class_are_read_and_flat_ones_keep_their_order(tmp_path):
    """In the order of torchvision's ImageFolder where each folder is flat."""
    pixels = write_folder(tmp_path, "train", {"cat": 2, "cat/wild/big": 2, "dog": 3})
    (tmp_path / "train/dog/loop").symlink_to(tmp_path / "train/dog")
    text = message(tmp_path)
    assert "dog/loop: is a symbolic link to a parent folder" in text
    (tmp_path / "train/dog/loop").unlink()
    (tmp_path / "train/dog/more").symlink_to(tmp_path / "train/cat/wild")
    write_folder(tmp_path, "test", {"cat/any": 1, "dog/train": 1})
    data_set = load(tmp_path)
    names = "cat/00 cat/01 big/00 big/01 dog/00 dog/01 dog/02 big/00 big/01".split()
    assert names_of(data_set.train) == [f"{name}.png" for name in names]
    images, labels = all_of(data_set.train)
    assert labels.tolist() == [0] * 4 + [1] * 5
    assert data_set.inventory.inferred["folders"].startswith("6 images in folders")
    wild = pixels["cat/wild/big"]
    expected = [*pixels["cat"], *wild, *pixels["dog"], *wild]
    np.testing.assert_array_equal(images, expected)


NESTED = {"pets/cat": 3, "pets/dog/big": 2, "wild/cat": 2, "wild/fox": 2}


@pytest.mark.parametrize("splits", [["."], ["train", "test"]])
def test_folders_without_images_of_their_own_group_classes(tmp_path, splits):
    root = tmp_path / "root"
    for split in splits:
        write_folder(root, split, NESTED)
    data_set = load(root)
    assert data_set.class_names == ("pets/cat", "pets/dog", "wild/cat", "wild/fox")
    label_of = Labels(data_set.class_names, [str(root)])
    for source in data_set.sources.values():
        for index, label in enumerate(source.labels):
            place = source.location(index)
            assert f"/{data_set.class_names[label]}/" in place
            assert label_of(place) == label
    # A network that was trained on them names the classes of other folders.
    write_folder(tmp_path, "new", {"pets/dog": 1, "pets/dog/more": 1}, seed=1)
    new = image_folder.load(str(tmp_path / "new"), trained=DatasetInfo.of(data_set))
    assert new.test.labels.tolist() == [1, 1]
    # Not if a group has an image.
    for split in splits:
        shutil.copy(root / split / "wild/fox/00.png", root / split / "wild")
    assert load(root).class_names == ("pets", "wild")


@pytest.mark.parametrize("split", ["test", "val"])
def test_images_for_testing_without_labels_are_said_and_not_used(tmp_path, split):
    write_folder(tmp_path, "train", {"cat": 10, "dog": 10})
    before = load(tmp_path)
    (tmp_path / split).mkdir()
    shutil.copy(tmp_path / "train/cat/00.png", tmp_path / split)
    data_set = load(tmp_path)
    assert data_set.test.num_examples == 2 and data_set.validation is None
    assert [f"{split}/"] in data_set.inventory.names.values()
    assert data_set.train.checksum == before.train.checksum
    again = image_folder.training_images(str(tmp_path), data_set.image_shape)
    assert again.checksum == before.train.checksum


@pytest.mark.row(60)
@pytest.mark.parametrize(
    "outer, inner",
    [
        (("color", "grayscale", "segmented"), ("healthy", "rust", "scab")),
        (("fold1", "fold2"), ("cat", "dog")),
        (("40X", "100X"), ("benign", "malignant", "other")),
    ],
)
def test_row_60_folders_with_the_same_folders_inside_have_two_readings(
    tmp_path, outer, inner
):
    root, counts = tmp_path / "root", {f"{a}/{b}": 2 for a in outer for b in inner}
    write_folder(root, ".", counts)
    text = message(root)
    assert "which folders are the classes" in text
    assert all(name in text for name in (*outer[:2], *inner[:2]))
    assert f"--data_dir={root}/{min(outer)}" in text
    for level, names, number in ((1, outer, len(inner)), (2, inner, len(outer))):
        assert f"--class_level={level}" in text
        data_set = data.load("image_folder", str(root), class_level=level)
        assert data_set.class_names == tuple(sorted(names))
        labels = np.concatenate([x.labels for x in data_set.sources.values()])
        assert np.bincount(labels).tolist() == [2 * number] * len(names)
    again = image_folder.training_images(str(root), (8, 6, 3), class_level=2)
    assert again.checksum == data_set.train.checksum
    fsspec.filesystem("memory").put(str(root), f"/{tmp_path.name}", recursive=True)
    url = f"memory://{tmp_path.name}"
    assert "--class_level=2" in line_of(data.load, "image_folder", url)
    remote = data.load("image_folder", url, class_level=2)
    assert remote.train.labels.tolist() == data_set.train.labels.tolist()
    # One image outside of the folders inside decides nothing.
    shutil.copy(root / outer[0] / inner[0] / "00.png", root / outer[0])
    assert "which folders are the classes" in message(root)


@pytest.mark.row(60)
def test_row_60_folders_named_like_splits_are_not_classes_in_silence(tmp_path):
    write_folder(tmp_path / "a", "train2017", {"cat": 3, "dog": 3})
    write_folder(tmp_path / "a", ".", {"extra": 2})
    text = message(tmp_path / "a")
    assert f"--data_dir={tmp_path}/a/train2017 or --class_level=1" in text
    assert load(tmp_path / "a/train2017").class_names == ("cat", "dog")
    data_set = data.load("image_folder", str(tmp_path / "a"), class_level=1)
    assert data_set.class_names == ("extra", "train2017")
    write_folder(tmp_path / "b", ".", {"train2017": 2, "val2017": 2})
    assert "named like splits and have no class folders" in message(tmp_path / "b")
    data_set = data.load("image_folder", str(tmp_path / "b"), class_level=1)
    assert data_set.class_names == ("train2017", "val2017")
    write_folder(tmp_path / "d", ".", {"a/train": 2, "a/test": 2, "b": 2})
    assert f"{tmp_path}/d/a: contains folders for train" in message(tmp_path / "d")
    data_set = data.load("image_folder", str(tmp_path / "d"), class_level=1)
    assert data_set.class_names == ("a", "b")
    write_folder(tmp_path / "c", ".", {"test_tube": 2, "steam_train/old": 2, "cup": 2})
    assert load(tmp_path / "c").class_names == ("cup", "steam_train", "test_tube")
    write_folder(tmp_path / "e", "train", {"test_tube": 3, "cup": 3})
    found = {x: len(all_of(y)[1]) for x, y in load(tmp_path / "e").sources.items()}
    assert found == {"training": 4, "test": 2}


@pytest.mark.row(60)
def test_row_60_patients_splits_and_masks_are_no_classes_in_silence(tmp_path):
    patients = [("benign/P01", 3), ("benign/P02", 3), ("malignant/P03", 4)]
    places = [("data_256/a", 3), ("data_256/b", 3), ("val_256", 2)]
    office = [
        (f"{x}/images/{y}", 2) for x in ("amazon", "dslr") for y in ("bag", "cup")
    ]
    cells = [(x, 3) for x in ("bad", "good", "cells/bad", "cells/good")]
    for name, counts, flat in (
        ("patients", patients, ("benign", "malignant")),
        ("places", places, ("data_256", "val_256")),
        ("masks", [("images", 3), ("masks", 3)], ("images", "masks")),
        ("office", office, ("amazon", "dslr")),
        ("cells", cells, ("bad", "cells", "good")),
    ):
        root = tmp_path / name
        write_folder(root, ".", dict(counts))
        assert "--class_level=1" in message(root)
        data_set = data.load("image_folder", str(root), class_level=1)
        assert data_set.class_names == flat
    data_set = data.load("image_folder", str(tmp_path / "patients"), class_level=2)
    assert data_set.class_names == ("P01", "P02", "P03")
    assert "--class_level=3" in message(tmp_path / "office")
    # One folder in each class changes no labels.
    write_folder(tmp_path / "one", ".", {"cat/v1": 3, "dog/v2": 3})
    assert load(tmp_path / "one").class_names == ("cat/v1", "dog/v2")
    assert f"--data_dir={tmp_path}/places/data_256" in message(tmp_path / "places")


@pytest.mark.row(60)
@pytest.mark.parametrize(
    "counts, words",
    [
        # With a folder of annotations, as in COCO.
        ({"train2017": 2, "val2017": 2, "annotations": 0}, "no class folders inside"),
        ({"cars_train": 2, "cars_test": 2, "more": 2}, "no class folders inside"),
        ({f"{x}/day": 1 for x in ("train_station", "test_center")}, "--class_level=1"),
    ],
)
def test_row_60_splits_next_to_other_folders_are_no_classes(tmp_path, counts, words):
    write_folder(tmp_path, ".", counts)
    if "annotations" in counts:
        (tmp_path / "annotations").mkdir(exist_ok=True)
        (tmp_path / "annotations/instances.json").touch()
    else:
        write_folder(tmp_path, ".", {"mall": 2})
    assert words in message(tmp_path)


@pytest.mark.row(60)
def test_row_60_images_below_the_folders_of_classes_are_counted(tmp_path):
    counts = {"a/abbey": 3, "a/apt/indoor": 2, "a/apt/outdoor": 2, "b/bar": 3}
    write_folder(tmp_path, ".", counts)
    data_set = load(tmp_path)
    assert data_set.class_names == ("a/abbey", "a/apt", "b/bar")
    assert "4 images in folders" in data_set.inventory.inferred["folders"]


@pytest.mark.row(60)
def test_row_60_what_is_next_to_the_training_images_is_named(tmp_path):
    """The layout of Tiny ImageNet, and a test folder for Keras."""
    write_folder(tmp_path, "train", {"n01/images": 8, "n02/images": 8})
    write_folder(tmp_path, "val", {"images": 2})
    (tmp_path / "val/val_annotations.txt").write_text("00.png\tn01\t0\t0\t9\t9\n")
    write_folder(tmp_path, "test", {"unknown": 2})
    write_folder(tmp_path, "holdout", {"n01": 2})
    (tmp_path / "words.txt").touch()
    data_set = load(tmp_path)
    assert data_set.class_names == ("n01", "n02") and data_set.validation is None
    assert data_set.test.num_examples == 2
    folders, files, unlabeled = data_set.inventory.names.values()
    assert (folders, files) == (["holdout/"], ["words.txt"])
    assert "test/" in unlabeled and any("val_annotations.txt" in x for x in unlabeled)


def test_names_of_classes_differ_where_their_folders_do(tmp_path):
    long = "x" * 210
    names = [f"a{long}", f"b{long}", "c\\td", "c\td"]
    write_folder(tmp_path, "train", dict.fromkeys(names, 3))
    data_set = load(tmp_path)
    assert len(set(data_set.class_names)) == 4
    label_of = Labels(data_set.class_names, [str(tmp_path)])
    for index, label in enumerate(data_set.train.labels):
        assert label_of(data_set.train.location(index)) == label
    # The same letters in two forms of Unicode are one name, of one folder.
    write_folder(tmp_path, "train", {"e\u0301": 3}, seed=1)
    write_folder(tmp_path, "test", {"\u00e9": 2})
    assert (load(tmp_path).test.labels == 4).all()
    write_folder(tmp_path, "train", {"\u00e9": 3}, seed=2)
    assert "two folders of this name" in message(tmp_path)


def test_all_images_of_another_folder_are_evaluated(root, tmp_path, capfd):
    shutil.rmtree(root / "test")
    trained = DatasetInfo.of(load(root))
    root.rename(tmp_path / "moved")
    moved = image_folder.load(str(tmp_path / "moved"), trained=trained)
    assert (moved.train.num_examples, moved.test.num_examples) == (9, 3)
    assert "warning" not in capfd.readouterr().out
    write_folder(tmp_path, "new", {"dog": 4, "cat/wild": 1}, seed=3)
    new = image_folder.load(str(tmp_path / "new"), trained=trained)
    assert new.train is None and new.test.labels.tolist() == [1, 2, 2, 2, 2]
    assert "are for testing" in capfd.readouterr().out
