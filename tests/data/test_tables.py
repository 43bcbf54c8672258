"""Tables of image files: their formats, columns, splits and faults."""

import errno
import itertools
import json
import os
import pathlib
import re
import shutil
import textwrap
from unicodedata import normalize

import numpy as np
import pyarrow
import pytest
from containers import assert_equal_sets, examples, names_of, serving, write_images
from prepared_sets import all_of, message
from pyarrow import parquet

from towers import data
from towers.config import Config
from towers.data.augment.augmentation import none
from towers.data.batches import TrainBatches
from towers.data.files.image_files import Survey
from towers.data.sets.photos import photo_options
from towers.errors import ConfigError, DataError

PAGE = pathlib.Path(__file__).parents[2] / "docs/coming_from.md"
# Two texts of labels, and the classes that they become.
TEXTS = re.findall(
    r"^\| (`.*?`, `.*?`) \|.*\| (.*) \|$",
    PAGE.read_text().partition("\n### Texts of labels\n")[2],
    re.MULTILINE,
)
ROWS = examples(12)
FILES = [path for path, *_ in ROWS]
LABELS = [path.split("/")[0] for path in FILES]


@pytest.fixture
def root(tmp_path):
    write_images(tmp_path, ROWS)
    return tmp_path


def write(root, columns, name="labels.csv"):
    """A table in the format of its name."""
    path, rows = root / name, list(zip(*columns.values(), strict=True))
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.table(columns), path)
    elif name.endswith(".jsonl"):
        lines = (json.dumps(dict(zip(columns, row, strict=True))) for row in rows)
        path.write_text("\n".join(lines))
    else:
        mark = "\t" if name.endswith(".tsv") else ";" if ";" in name else ","
        lines = (mark.join(map(str, row)) for row in [list(columns), *rows])
        path.write_text("\ufeff" + "\n".join(lines) + "\n\n")
    return str(path)


def load(path, **options):
    return data.load("table", path, **options)


def splits_of(data_set):
    """Split -> the names of its files, sorted."""
    return {split: sorted(names_of(x)) for split, x in data_set.sources.items()}


@pytest.mark.parametrize(
    "name", ["x.csv", "x;.csv", "x.tsv", "x.jsonl", "x.parquet", "metadata.csv"]
)
def test_every_format_has_the_images_of_the_folder(root, name):
    folder = data.load("image_folder", str(root))
    path = write(root, {"label": LABELS, "File Name": FILES}, name)
    for place in (path, str(root)):
        assert_equal_sets(load(place), folder)


def test_integers_are_classes_by_their_value_and_ids_are_files(root):
    numbers = [{"ant": 10, "cat": 9, "dog": 100}[x] for x in LABELS]
    ids = [path.removesuffix(".png") for path in FILES]
    data_set = load(write(root, {"id": ids, "breed": numbers}))
    for number in (0, 1):
        (root / f"{number}.png").write_bytes(ROWS[0][2])
    path = write(root, {"id": [0, 1, *ids[2:4]], "label": [0, 1, 0, 1]}, "x.jsonl")
    assert load(path).train.num_examples == 2
    assert data_set.class_names == ("9", "10", "100")
    for source in data_set.sources.values():
        expected = [name.split("/")[0] for name in names_of(source)]
        assert [("cat", "ant", "dog")[x] for x in all_of(source)[1]] == expected


def test_splits_are_a_column_tables_or_a_fold(root):
    names = ["Train", "val", "TEST"] * 4
    path = write(root, {"path": FILES, "label": LABELS, "split": names})
    expected = {
        split: sorted(FILES[place::3])
        for place, split in enumerate(("training", "validation", "test"))
    }
    assert splits_of(load(path)) == expected
    for place, name in enumerate(("train", "valid", "test")):
        columns = {"path": FILES[place::3], "label": LABELS[place::3]}
        write(root, columns, f"{name}.csv")
    (root / "labels.csv").unlink()
    assert splits_of(load(str(root))) == expected
    write(root, {"path": FILES[2::3]}, "test.csv")
    data_set = load(str(root))
    assert data_set.inventory.names["splits without labels"] == ["test"]
    assert splits_of(data_set)["test"] == expected["validation"]
    folds = [number % 5 for number in range(12)]
    path = write(root, {"path": FILES, "label": LABELS, "fold": folds})
    for fold in (0, 3):
        assert splits_of(load(path, fold=fold))["test"] == sorted(FILES[fold::5])
    assert len(splits_of(load(path))["test"]) == 3
    # What is for testing without folds is never trained on.
    columns = {"path": FILES, "label": LABELS, "split": ["train", "test"] * 6}
    path = write(root, columns | {"fold": [0, "", 1, "", 0, "", 1, "", 0, "", 1, ""]})
    assert splits_of(load(path, fold=1))["training"] == sorted(FILES[::4])


def test_weights_are_factors_on_the_losses(root):
    weights = [0.5 * number for number in range(12)]
    path = write(root, {"path": FILES, "label": LABELS, "weight": weights})
    source = load(path).train
    batches = TrainBatches(source, none((8, 6, 3), (0.0,) * 3, (1.0,) * 3), 0, 4)
    batch = next(batches.stream(0).as_numpy_iterator())
    expected = [weights[FILES.index(name)] for name in names_of(source)]
    assert source.sample_weights.tolist() == expected
    indices = batches.indices(np.int64(0)).numpy()
    expected = source.sample_weights[indices]
    np.testing.assert_array_equal(batch["sample_weights"], expected)


@pytest.mark.parametrize(
    "columns, words",
    [
        ({"path": [*FILES[:3], "ant/x.png"], "label": LABELS[:4]},
         "row 5: no file {root}/ant/x.png; "),
        ({"path": [*FILES, FILES[1]], "label": [*LABELS, "ant"]},
         "row 14: {root}/ant/00001.png is also in {root}/labels.csv: row 3"),
        ({"path": FILES, "label": [*LABELS[:-1], ""]}, "row 13: has no label"),
        ({"path": FILES, "file": FILES, "label": LABELS},
         "ambiguous path column: path or file; choose one with --columns=path:path"),
        ({"thing": ["x"] * 12, "label": LABELS},
         "no path column found among thing, label; choose one with --columns=path:"),
        ({"path": FILES, "label": ["cat"] * 12}, "has one class, cat; two are needed"),
        ({"path": FILES, "label": LABELS, "split": ["train"] * 11 + ["x"]},
         "row 13: the split 'x' is not train"),
        ({"path": FILES, "label": LABELS, "weight": ["1"] * 11 + ["-1"]},
         "row 13: the weight '-1' is not 0"),
        ({"path": FILES, "label": LABELS, "split": ["train"] * 8 + ["test"] * 4},
         "dog/00008.png: has the class dog, which is not in labels.csv"),
        ({"path": FILES, "a": [1] * 11 + [2], "b": [0] * 12},
         "row 13: column a has '2', not 0 or 1"),
        ({"emotion": [1], "pixels": ["0 255 7"]}, "has pixels in its cells, not files"),
        ({"label": [1], "pixel0": [0], "pixel1": [0]}, "has pixels in its cells"),
        ({"path": [], "label": []}, "has no rows"),
        ({}, "the file is empty"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_row(root, columns, words):
    path = write(root, columns)
    text = message(load, path)
    assert text.startswith(str(root)) and words.format(root=root) in text


def test_a_table_of_a_split_may_be_divided_by_a_column(root):
    columns = {"path": FILES[::2], "label": LABELS[::2], "split": ["train", "val"] * 3}
    write(root, columns, "train.csv")
    columns = {"path": FILES[1::2], "label": LABELS[1::2], "split": ["test"] * 6}
    write(root, columns, "test.csv")
    assert splits_of(load(str(root))) == {
        "training": sorted(FILES[::4]),
        "validation": sorted(FILES[2::4]),
        "test": sorted(FILES[1::2]),
    }
    write(root, columns | {"split": ["train", "test"] * 3}, "test.csv")
    assert "the split train are in another table too" in message(load, str(root))


@pytest.mark.parametrize(
    "columns, words",
    [
        ({"label": LABELS[6:]},
         "'weight', only path, label; {root}/train-0.csv is another table for"),
        ({"label": LABELS[6:], "weight": [1] * 6, "split": ["train"] * 6},
         "has a column 'split', unlike {root}/train-0.csv"),
        ({"a": [0] * 6, "b": [1] * 6, "weight": [1] * 6}, "has no column 'label'"),
    ],
)  # fmt: skip
def test_tables_of_a_split_have_the_same_columns(root, columns, words):
    first = {"path": FILES[:6], "label": LABELS[:6], "weight": [1] * 6}
    write(root, first, "train-0.csv")
    write(root, {"path": FILES[6:]} | columns, "train-1.csv")
    text = message(load, str(root))
    assert text.startswith(f"{root}/train-1.csv: ") and words.format(root=root) in text


def test_images_elsewhere_are_found_by_their_folder(root, monkeypatch):
    path = write(root, {"image": [x[4:] for x in FILES[:4]], "label": [0, 1, 0, 1]})
    assert f"; --image_dir={root}/ant has 4 of 4" in message(load, path)
    monkeypatch.setenv("HOME", str(root))
    for image_dir in (f"{root}/ant", "~/ant"):
        assert load(path, image_dir=image_dir).train.num_examples == 2
    (root / "ant" / "00000.jpg").write_bytes(b"x")
    path = write(root, {"image": ["ant/00000"], "label": [0]})
    assert "ant/00000 is ambiguous: " in message(load, path)
    path = write(root, {"picture": FILES, "a": LABELS, "b": LABELS})
    data_set = load(path, columns="path:picture,label:b")
    assert data_set.train.num_examples == 9


def test_names_are_found_in_the_other_form_of_unicode(root):
    names = [f"ant/{normalize('NFD', x)}.png" for x in ("ä0", "ä1", "é2", "plain")]
    for new, old in zip(names, FILES, strict=False):
        shutil.copy(root / old, root / new)
    columns = {"file": [normalize("NFC", x) for x in names], "choice": [0, 1, 0, 1]}
    sets = load(write(root, columns)).sources.values()
    assert sorted(name for x in sets for name in names_of(x)) == sorted(names)


def text_of(rows, mark=","):
    return "".join(mark.join(map(str, row)) + "\n" for row in rows)


PAIRS = list(zip(FILES, LABELS, strict=True))
TEXT = text_of([("image", "label"), *PAIRS])
OBJECTS = text_of([[json.dumps({"file": x, "class": y})] for x, y in PAIRS])


@pytest.mark.parametrize(
    "name, content",
    [
        ("x.csv", TEXT.encode("utf-16")),
        ("x.csv", ("\ufeff" + TEXT).encode("utf-16-be")),
        ("x.csv", TEXT.replace("\n", "\r").encode()),
        ("x.csv", TEXT.replace("/", "\\").encode()),
        ("x.csv", "sep=;\r\n" + TEXT.replace(",", ";")),
        ("x.csv", "\n" + TEXT.replace(",", "|")),
        ("x.csv", text_of([("path", " label"), *((x, f' "{y}"') for x, y in PAIRS)])),
        ("x.txt", text_of(PAIRS, " ").encode()),
        ("x.txt", text_of(PAIRS, "\t").encode()),
        ("x.lst", text_of([(7, y, x) for x, y in PAIRS], "\t").encode()),
        ("x.json", json.dumps([{"image": x, "label": y} for x, y in PAIRS], indent=1)),
        ("x.json", OBJECTS),
        ("x.jsonl", OBJECTS.replace("}", ', "age": 3}', 1)),  # a key of few rows
    ],
)  # fmt: skip
def test_texts_of_other_programs_are_read(root, name, content):
    content = content if isinstance(content, bytes) else content.encode()
    (root / name).write_bytes(content)
    assert photo_options(str(root / name)) == {"dataset": "table"}
    assert_equal_sets(load(str(root / name)), data.load("image_folder", str(root)))


def test_a_table_without_a_header_numbers_its_columns(root):
    rows = [("TRAIN" if i % 3 else "TEST", *pair) for i, pair in enumerate(PAIRS)]
    for name, mark, endings in (("x.csv", ",", True), ("x.tsv", "\t", False)):
        text = text_of(rows, mark)
        (root / name).write_text(text if endings else text.replace(".png", ""))
        hint = "--columns=split:1,path:2,label:3"
        text = message(load, str(root / name))
        assert "row 1 looks like data (ant/00000" in text and text.endswith(hint)
        data_set = load(str(root / name), columns=hint.partition("=")[2])
        assert splits_of(data_set)["test"] == sorted(FILES[::3])
        assert len(splits_of(data_set)["training"]) == 8
        assert data_set.inventory.inferred["columns"] == "path: 2, label: 3, split: 1"


def test_a_text_file_may_have_more_columns(root):
    stems = [x.removesuffix(".png") for x in FILES]
    numbers = [i // 4 + 1 for i in range(12)]
    for names in (FILES, stems):  # as in Oxford-IIIT Pet: image, class, species, breed
        text = text_of([(x, n, 1, 1) for x, n in zip(names, numbers, strict=True)], " ")
        (root / "list.txt").write_text(text)
        data_set = load(str(root / "list.txt"), columns="path:1,label:2")
        assert sorted(itertools.chain(*splits_of(data_set).values())) == FILES
        assert data_set.class_names == ("1", "2", "3")
        assert data_set.inventory.names["columns"] == ["3", "4"]


def test_paths_of_another_machine_are_matched_by_their_ends(root):
    for begin in ("/content/drive/set/", "C:\\Users\\me\\"):
        paths = [begin + x.replace("/", begin[-1]) for x in FILES]
        path = write(root, {"image": paths, "label": LABELS})
        text = message(load, path)
        assert f"--image_dir={root} has 12 of 12, by the ends" in text
        write_images(root / "above" / "deep", ROWS)
        for image_dir, folder in ((root, root), (root / "above", root / "above/deep")):
            data_set = load(path, image_dir=str(image_dir))
            assert sorted(itertools.chain(*splits_of(data_set).values())) == FILES
            about = data_set.inventory.inferred["paths"]
            assert about.endswith(f"{folder.name}/ant/00000.png")
    write(root, {"image": ["ant/00000.PNG"], "label": ["ant"]}, "case.csv")
    text = message(load, str(root / "case.csv"))
    assert f"{root}/ant/00000.png differs in upper and lower case" in text


def test_the_folder_with_every_file_is_named(tmp_path):
    for folder, count in (("test", 4), ("train", 4), ("a", 3)):
        rows = [(f"{folder}/{i}.png", 0, ROWS[i][2]) for i in range(count)]
        write_images(tmp_path, rows)
    columns = {"id": ["0", "1", "2", "3"], "label": LABELS[3:7]}
    train, test = f"{tmp_path}/train", f"{tmp_path}/test"
    path = write(tmp_path, columns, "labels.csv")
    assert f"--image_dir={train} has 4 of 4; {test} has" in message(load, path)
    # The folder above is ambiguous, unless the table has the name of a split.
    text = message(lambda x: load(x, image_dir=str(tmp_path)), path)
    assert f"--image_dir={train} has 4 of 4; {test} has" in text
    for split, folder in (("train", train), ("test", test)):
        path = write(tmp_path, columns, f"{split}Labels.csv")
        text = message(load, path)
        assert text.endswith(f"--image_dir={folder} has 4 of 4")
    # The table may be in a folder next to the images.
    (tmp_path / "csv").mkdir()
    path = write(tmp_path / "csv", columns, "train.csv")
    assert message(load, path).endswith(f"--image_dir={train} has 4 of 4")
    assert load(path, image_dir=train).train.num_examples == 3


@pytest.mark.row(60)
def test_row_60_images_in_several_folders_are_found_by_their_names(tmp_path):
    for number in range(8):
        write_images(tmp_path, [(f"part_{number % 2}/a{number}.png", 0, ROWS[0][2])])
    columns = {"image_id": [f"a{i}" for i in range(8)], "dx": LABELS[:4] * 2}
    path = write(tmp_path, columns | {"label": ["x", "y"] * 4}, "metadata.csv")
    data_set = load(path)
    assert data_set.train.num_examples + data_set.test.num_examples == 8
    assert "2 folders" in data_set.inventory.inferred["paths"]
    write_images(tmp_path, [("more/a0.png", 0, ROWS[0][2])])
    assert ": no file" in message(load, path)


@pytest.mark.row(60)
def test_row_60_a_table_does_not_take_the_images_of_another_split(tmp_path):
    for split, first in (("train", 0), ("val", 4)):
        write_images(tmp_path, [(f"{split}/{i}.png", 0, ROWS[i][2]) for i in range(8)])
        numbers = [f"{i}.png" for i in range(first, first + 4)]
        columns = {"image": numbers, "label": ["a", "b"] * 2}
        write(tmp_path, columns, f"{split}.csv")
    text = message(load, str(tmp_path))
    assert f"--image_dir={tmp_path} has 4 of 4" in text
    data_set = load(str(tmp_path), image_dir=str(tmp_path))
    places = [data_set.validation.location(i) for i in range(4)]
    assert places == [f"{tmp_path}/val/{i}.png" for i in range(4, 8)]
    wrong = message(lambda x: load(x, image_dir=f"{tmp_path}/train"), str(tmp_path))
    assert "is named like another split" in wrong


@pytest.mark.row(60)
def test_row_60_a_column_of_image_names_is_before_one_of_ids(root):
    ids = [str(i) for i in range(12)]
    for number, name in enumerate(FILES):
        shutil.copy(root / name, root / f"{11 - number}.png")
    path = write(root, {"id": ids, "fname": FILES, "label": LABELS})
    data_set = load(path)
    assert data_set.inventory.inferred["columns"].startswith("path: fname")
    assert data_set.inventory.names["columns"] == ["id"]
    both = {"id": ids, "one": FILES, "two": FILES, "label": LABELS}
    assert "ambiguous path column: one or two;" in message(load, write(root, both))


@pytest.mark.row(60)
def test_row_60_a_table_of_the_images_in_class_folders_is_a_rival(root):
    write(root, {"path": FILES, "label": LABELS[::-1]})
    text = message(photo_options, str(root))
    assert "--dataset=image_folder" in text and "--dataset=table" in text
    # The first hint, followed.
    assert photo_options(str(root), is_named=True)["dataset"] == "image_folder"
    write(root, {"id": range(3), "class": ["ant", "cat", "dog"]})
    assert photo_options(str(root))["dataset"] == "image_folder"
    # Tables of splits are read together.
    for split, first in (("test", 1), ("train", 0)):
        columns = {"path": FILES[first::2], "label": LABELS[first::2]}
        write(root, columns, f"{split}.csv")
    text = message(photo_options, str(root))
    assert text.endswith(f"--dataset=table --data_dir={root}?")
    assert load(str(root)).test.num_examples == 6


@pytest.mark.row(60)
def test_row_60_images_that_no_row_labels_are_counted(root):
    labels = ["a", "", "a", "b", "", "b", "a", "", "a"]
    columns = {
        "image": FILES[:9],
        "label": labels,
        "split": ["train", "test", "val"] * 3,
    }
    unused = load(write(root, columns)).inventory.unused
    assert unused["images without a labeled row"] == 6


def test_labels_that_are_measurements_are_warned_about(root, capsys):
    load(write(root, {"image": FILES, "age": [0.5, 1.5, 2.25] * 4}))
    assert "labels are numbers such as 0.5" in capsys.readouterr().out.replace(
        "\n", " "
    )
    path = write(root, {"image": FILES, "split": ["train"] * 12})
    assert "no label column found among image, split" in message(load, path)


def test_an_unlabeled_test_table_needs_no_files(root):
    write(root, {"image": FILES, "label": LABELS}, "train.csv")
    for columns in ({"image": ["x.png"]}, {"image": ["x.png"], "a": [1], "b": [2]}):
        write(root, columns, "test.csv")
        write(root, columns | {"label": ["ant"]}, "sample_submission.csv")
        data_set = load(str(root))
        unused = data_set.inventory.names
        assert unused["splits without labels"] == ["test"]
        assert unused["files of no split"] == [f"{root}/sample_submission.csv"]
        assert unused.get("columns", []) == [*columns][1:]
    write(root, {"image": ["./" + FILES[3]], "label": ["ant"]}, "test.csv")
    text = message(load, str(root))
    assert "ant/00003.png is also in" in text and "train.csv: row 5" in text


@pytest.mark.row(60)
def test_row_60_an_example_of_an_answer_is_not_trained_on(root):
    submission = write(
        root, {"image": FILES, "label": [0] * 12}, "sampleSubmission.csv"
    )
    assert photo_options(str(root), is_named=True)["dataset"] == "image_folder"
    assert ": no .csv" in message(load, str(root))
    write(root, {"image": FILES, "label": LABELS})
    data_set = load(str(root))
    assert data_set.class_names == ("ant", "cat", "dog")
    assert data_set.inventory.names["files of no split"] == [submission]


def test_tables_of_roboflow_lie_in_the_folders_of_splits(root):
    for split, first in (("train", 0), ("valid", 1)):
        names = [x.replace("/", "-") for x in FILES[first::2]]
        write_images(root / split, [(x, 0, ROWS[0][2]) for x in names])
        columns = {"filename": names, " cat": [0, 1, 1] * 2, " dog": [1, 0, 1] * 2}
        write(root / split, columns, "_classes.csv")
    data_set = load(str(root))
    assert data_set.validation.labels.tolist() == [[0, 1], [1, 0], [1, 1]] * 2


@pytest.mark.parametrize(
    "name, values, held",
    [
        ("is_valid", ["True", "False"], [0]),
        ("is_valid", [0, 1], [1]),
        ("is_test", ["0.0", "1.0"], [1]),
        ("Is Train", [1, 0], [1]),
        ("Usage", ["Training", "PublicTest"], [1]),
        ("partition", [2, 0], [0]),
        ("set", ["train", "dev"], [1]),
        ("data set", ["train", "valid"], [1]),
        ("phase", ["test", "train"], [0]),
    ],
)
def test_columns_of_splits_have_many_names(root, name, values, held):
    columns = {"image": FILES, "label": LABELS, name: values * 6, "age": [3] * 12}
    data_set = load(write(root, columns))
    assert splits_of(data_set)["test"] == sorted(FILES[held[0] :: 2])
    assert f"split: {name}" in data_set.inventory.inferred["columns"]
    assert data_set.inventory.names["columns"] == ["age"]
    columns[name] = ["A", "B"] * 6
    unused = load(write(root, columns)).inventory.names["columns"]
    assert unused == ["age", name]
    columns[name] = [values[0], "trian"] * 6
    assert "row 3: the split 'trian'" in message(load, write(root, columns))


@pytest.mark.parametrize(
    "value, words",
    [
        (None, "has no label"),
        (float("nan"), "has no label"),
        ("nan", "is nan a missing label, or a class"),
        ("NA", "is NA a missing label, or a class"),
        (["ant", None], "has an empty label"),
        ([["ant"]], "is not a label"),
        ({"ant": 1}, "is not a label"),
        (0.5, "is not a label"),
    ],
)
def test_what_is_not_a_label_is_not_a_class(root, value, words):
    labels = [*LABELS[:4], value, *LABELS[5:]]
    path = write(root, {"image": FILES, "label": labels}, "x.jsonl")
    text = message(load, path)
    assert text.startswith(f"{path}: row 5: ") and words in text


def test_labels_are_texts_without_spaces_around_them(root, capsys):
    values = [" cat", "cat ", "Cat", 1, "01", 1.0, "1.0", True, "true", "TRUE", 1, 1]
    data_set = load(write(root, {"image": FILES, "label": values}, "x.jsonl"))
    assert data_set.class_names == ("01", "1", "Cat", "True", "cat")
    assert "01 and 1; " in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("texts, classes", TEXTS)
def test_texts_of_labels_become_the_classes_of_the_page(root, texts, classes, capsys):
    labels = [*re.findall("`(.*?)`", texts), "rest"] * 4
    path = write(root, {"path": FILES, "label": labels})
    if classes == "an error":
        assert message(load, path).startswith(f"{path}: row 2: ")
        return
    names = {*load(path).class_names} - {"rest"}
    assert sorted(names) == re.findall("`(.*?)`", classes)
    is_warned = "warning: classes whose names differ" in capsys.readouterr().out
    assert is_warned == classes.endswith("with a warning")


def test_labels_with_a_separator_are_sets(root, capsys):
    names = ["cat", "dog", "cat|dog", "dog|bird"] * 3
    path = write(root, {"image": FILES, "label": names})
    assert not load(path).multi_label
    assert "--label_separator='|'" in capsys.readouterr().out
    data_set = load(path, label_separator="|")
    assert data_set.class_names == ("bird", "cat", "dog")
    for source in data_set.sources.values():
        for name, labels in zip(names_of(source), source.labels, strict=True):
            expected = names[FILES.index(name)].split("|")
            assert [x in expected for x in data_set.class_names] == labels.tolist()
    semicolons = [name.replace("|", ";") for name in names]
    path = write(root, {"image": FILES, "label": semicolons})
    assert load(path).multi_label and not load(path, label_separator="").multi_label
    # No separator divides the labels of a list.
    lists = [["a;b", "c"], ["c"]] * 6
    path = write(root, {"image": FILES, "label": lists}, "x.jsonl")
    assert load(path).class_names == ("a;b", "c")


def test_one_1_in_each_row_is_one_label(root):
    values = {"cat": [1.0, 0.0, 0.0], " dog;x": [0.0, 1.0, 1.0], "owl": [0.0] * 3}
    columns = {"image": FILES} | {name: x * 4 for name, x in values.items()}
    data_set = load(write(root, columns, "x.tsv"))
    assert data_set.class_names == ("cat", "dog;x", "owl")
    assert "one for each image" in data_set.inventory.inferred["labels"]
    for source in data_set.sources.values():
        expected = [FILES.index(name) % 3 > 0 for name in names_of(source)]
        assert source.labels.tolist() == expected
    columns["owl"] = [1] + [0] * 11
    data_set = load(write(root, columns, "x.tsv"))
    assert data_set.multi_label
    assert "any number" in data_set.inventory.inferred["labels"]


def test_rows_without_a_file_are_named_and_left_out(root):
    paths = [*FILES[:5], "gone/1.png", *FILES[6:11], "gone/2.png"]
    path = write(root, {"image": paths, "label": LABELS})
    assert "(2 of 12 rows have none, --bad_images=skip" in message(load, path)
    data_set = load(path, bad_images="skip")
    assert {*itertools.chain(*splits_of(data_set).values())} == {*FILES} - {
        FILES[5],
        FILES[11],
    }
    assert data_set.inventory.unused["bad images"] == 2
    survey = Survey()
    load(path, survey=survey)
    assert [*survey.misplaced] == [f"{path}: row 7", f"{path}: row 13"]


def test_rows_in_a_folder_that_cannot_be_read_are_not_left_out(root, monkeypatch):
    def listdir(path, listdir=os.listdir):
        if str(path).endswith("/cat"):
            raise OSError(errno.EIO, "Input/output error", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", listdir)
    path = write(root, {"image": FILES, "label": LABELS})
    text = message(lambda x: load(x, bad_images="skip"), path)
    assert text == f"{root}/cat: Input/output error"


def test_folds_are_integers_that_some_rows_have(root):
    columns = {"image": FILES, "label": LABELS, "fold": ["0.0", "1.0", "2"] * 4}
    data_set = load(write(root, columns), fold=1)
    assert splits_of(data_set)["test"] == sorted(FILES[1::3])
    text = message(lambda x: load(x, fold=9), write(root, columns))
    assert "no row has the fold 9, only 0, 1, 2" in text
    columns["fold"][4] = 2.7
    text = message(lambda x: load(x, fold=2), write(root, columns))
    assert "row 6: the fold '2.7' is not an integer" in text


@pytest.mark.parametrize("weight", ["1e39", "1e-46", "nan", "", "inf"])
def test_weights_are_numbers_of_float32(root, weight):
    columns = {"image": FILES, "label": LABELS, "weight": ["1"] * 11 + [weight]}
    assert "row 13: " in message(load, write(root, columns))
    # Images for testing need no weight.
    columns |= {"label": ["a", "b"] * 6, "split": ["train"] * 11 + ["test"]}
    if not weight:
        assert load(write(root, columns)).test.num_examples == 1
    columns["weight"] = [0] * 12
    assert "all weights for training are 0" in message(load, write(root, columns))


def test_urls_in_a_table_are_read(root):
    with serving(root) as server:
        urls = [f"{server.url}/{x}" for x in FILES]
        data_set = load(write(root, {"image_url": urls, "label": LABELS}))
        assert_equal_sets(data_set, data.load("image_folder", str(root)))


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("x.csv", b'path,label\nant/00000.png,"ant\n', "row "),
        ("x.csv", b"path,label\nant/00000.png\n", "row 2: has 1 values, and the first"),
        ("x.csv", b"path,label\n\xff,ant\n", "row 2: "),
        ("x.jsonl", b'{"path": "ant/00000.png", "label": 1}\n[1]', "row 2: is not an"),
        ("x.jsonl", b'{"path": "ant/00000.png", "label": 1}{}', "row 2: has no label"),
        ("x.parquet", b"PAR1 and more", "x.parquet: "),
        ("x.csv", TEXT.replace("dog\n", "é\n").encode("latin1"), "row 10: is not"),
        ("x.csv", TEXT.encode("utf-16-le"), "is not UTF-8"),
        ("x.json", b'{"images": [],\n "annotations": []}', "annotations of COCO"),
        ("x.json", b'{"shapes": [], "imagePath": "a.png"}', "annotations of LabelMe"),
        ("x.json", b"[1, 2]", "row 1: is not an object"),
        ("x.json", b'{"a.png": "cat"}', "names of images as keys"),
        ("x.json", b"[" * 100_000, "is nested too deeply"),
        ("x.csv", b"image,label,label\n", "two columns are called 'label'"),
        ("x.zip", b"PK", "is an archive; unpack it"),
        ("x.xlsx", b"PK", "is a spreadsheet; save it as CSV"),
        ("x.npy", b"PK", "data=((x, y), (x_test, y_test))"),
        ("x.arrow", b"A", "to_parquet"),
    ],
)  # fmt: skip
def test_other_files_say_what_to_do(root, name, content, words):
    (root / name).write_bytes(content)
    text = message(load, str(root / name))
    assert text.startswith(f"{root / name}: ") and words in text
    if name.endswith(("zip", "xlsx", "npz", "arrow")):
        assert words in message(photo_options, str(root / name))


def test_pixels_in_cells_are_read_as_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, [20, 48 * 48])
    rows = [(i % 2, " ".join(map(str, x)), "Training") for i, x in enumerate(pixels)]
    text = text_of([("emotion", "pixels", "Usage"), *rows])
    (tmp_path / "fer2013.csv").write_text(text)
    page = (PAGE.parent / "data.md").read_text()
    exec(textwrap.dedent(re.search(r"    import csv\n(    .+\n|\n)+", page)[0]), {})
    data_set = data.load("npz", "fer2013.npz")
    images = [image[..., 0].ravel() for image in all_of(data_set.train)[0]]
    assert len(images) == 18 and {*map(tuple, images)} < {*map(tuple, pixels)}


def test_columns_are_roles_and_names(root):
    path = write(root, {"path": FILES, "label": LABELS})
    for columns in ("path", "paths:path", "path:", "path:a,path:b"):
        with pytest.raises(ConfigError, match="expected ROLE:NAME by commas"):
            load(path, columns=columns)
    with pytest.raises(DataError, match=r"has no column 'labels', .* mean 'label'"):
        load(path, columns="label:labels")


def test_what_is_in_a_folder_decides(root, tmp_path_factory):
    alone = tmp_path_factory.mktemp("alone")
    write_images(alone / "images", [("a.png", 0, ROWS[0][2])])
    path = write(alone, {"path": ["images/a.png"], "label": [1]})
    assert photo_options(path) == photo_options(str(alone)) == {"dataset": "table"}
    (alone / "images/a.png").rename(alone / "a.png")
    write(alone, {"path": ["a.png"], "label": [1]})
    assert photo_options(str(alone), class_level=2) == {"dataset": "table"}
    for name, kind in (
        ("train/a.tfrec", "tfrecord"),
        ("data/train-0.parquet", "parquet"),
        ("train/metadata.csv", "table"),
        ("valid/_classes.csv", "table"),
        ("a/b/train-0.tar", "webdataset"),
    ):
        folder = tmp_path_factory.mktemp("nested")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_bytes(b"x")
        assert photo_options(str(folder)) == {"dataset": kind}
    (folder / "train.arrow").write_bytes(b"x")
    assert "to_parquet" in message(photo_options, str(folder))
    for name, pattern in (
        ("webdataset", "s3://bucket/train-{000..146}.tar"),
        ("parquet", f"{alone}/train-*.parquet"),
        ("tfrecord", "gs://bucket/train-?????-of-01024"),
        ("image_folder", "https://host/photos"),
    ):
        assert photo_options(pattern) == {"dataset": name}
        assert Config(dataset=name, data_dir=pattern).data_dir == pattern
    with pytest.raises(ConfigError, match="is a URL"):
        data.load("cifar10", "s3://bucket")
