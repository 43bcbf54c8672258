"""Tables of image files: their formats, columns, splits and faults."""

import json

import numpy as np
import pyarrow
import pytest
from containers import examples, write_images
from prepared_sets import all_of, message
from pyarrow import parquet

from towers import data
from towers.config import Config
from towers.data.augment.augmentation import none
from towers.data.batches import TrainBatches
from towers.data.sets.photos import photo_options
from towers.errors import ConfigError, DataError

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
    return {
        split: sorted(
            "/".join(source.location(i).split("/")[-2:])
            for i in range(source.num_examples)
        )
        for split, source in data_set.sources.items()
    }


@pytest.mark.parametrize(
    "name", ["x.csv", "x;.csv", "x.tsv", "x.jsonl", "x.parquet", "metadata.csv"]
)
def test_every_format_has_the_images_of_the_folder(root, name):
    folder = data.load("image_folder", str(root))
    path = write(root, {"label": LABELS, "File Name": FILES}, name)
    for place in (path, str(root)):
        data_set = load(place)
        assert data_set.class_names == ("ant", "cat", "dog")
        for split, source in folder.sources.items():
            for actual, expected in zip(
                all_of(data_set.sources[split]), all_of(source), strict=True
            ):
                np.testing.assert_array_equal(actual, expected)


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
        for index, label in enumerate(all_of(source)[1].tolist()):
            name = source.location(index).split("/")[-2]
            assert name == ["cat", "ant", "dog"][label]


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
    by_file = dict(zip(FILES, weights, strict=True))
    for index, weight in enumerate(source.sample_weights):
        assert by_file["/".join(source.location(index).split("/")[-2:])] == weight
    indices = batches.indices(np.int64(0)).numpy()
    np.testing.assert_array_equal(
        batch["sample_weights"], source.sample_weights[indices]
    )


@pytest.mark.parametrize(
    "columns, words",
    [
        ({"path": [*FILES[:3], "ant/x.png"], "label": LABELS[:4]},
         "row 5: there is no file {root}/ant/x.png; "),
        ({"path": [*FILES, FILES[1]], "label": [*LABELS, "ant"]},
         "row 14: {root}/ant/00001.png is also in {root}/labels.csv: row 3"),
        ({"path": FILES, "label": [*LABELS[:-1], ""]}, "row 13: has no label"),
        ({"path": FILES, "file": FILES, "label": LABELS},
         "is the path in column path or file? --columns=path:path names it"),
        ({"picture": FILES, "label": LABELS},
         "no column is named like a path, only picture, label; name it, as in "
         "--columns=path:picture"),
        ({"path": FILES, "label": ["cat"] * 12}, "has one class, cat; two are needed"),
        ({"path": FILES, "label": LABELS, "split": ["train"] * 11 + ["x"]},
         "row 13: the split 'x' is none of train, validation and test"),
        ({"path": FILES, "label": LABELS, "weight": ["1"] * 11 + ["-1"]},
         "row 13: the weight '-1' is no number of at least 0"),
        ({"path": FILES, "label": LABELS, "split": ["train"] * 8 + ["test"] * 4},
         "dog/00008.png: has the class dog, and there is no such class in split tr"),
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
        ({"label": LABELS[6:]}, "label, path, not label, path, weight"),
        ({"label": LABELS[6:], "weight": [1] * 6, "split": ["train"] * 6},
         "label, path, split, weight, not"),
        ({"a": [0] * 6, "b": [1] * 6, "weight": [1] * 6}, "a, b, path, weight, not"),
    ],
)  # fmt: skip
def test_tables_of_a_split_have_the_same_columns(root, columns, words):
    first = {"path": FILES[:6], "label": LABELS[:6], "weight": [1] * 6}
    write(root, first, "train-0.csv")
    write(root, {"path": FILES[6:]} | columns, "train-1.csv")
    text = message(load, str(root))
    begin = f"{root}/train-1.csv: has other columns than {root}/train-0.csv: "
    assert text.startswith(begin) and words in text


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("x.csv", b'path,label\nant/00000.png,"ant\n', "row "),
        ("x.csv", b"path,label\nant/00000.png\n", "row 2 has 1 values, and the first"),
        ("x.csv", b"path,label\n\xff,ant\n", "row 2: "),
        (
            "x.jsonl",
            b'{"path": "ant/00000.png", "label": 1}\n[1]\n',
            "row 2: is no obj",
        ),
        (
            "x.jsonl",
            b'{"path": "ant/00000.png", "label": 1}\n{"a": 1}',
            "row 2: has ot",
        ),
        ("x.parquet", b"PAR1 and more", "x.parquet: "),
    ],
)
def test_a_damaged_table_is_named(root, name, content, words):
    (root / name).write_bytes(content)
    text = message(load, str(root / name))
    assert text.startswith(f"{root / name}: ") and words in text


def test_images_elsewhere_are_found_by_their_folder(root, monkeypatch):
    path = write(root, {"image": [x[4:] for x in FILES[:4]], "label": [0, 1, 0, 1]})
    text = message(load, path)
    assert f"; {root}/ant has one: --image_dir names the folder" in text
    monkeypatch.setenv("HOME", str(root))
    for image_dir in (f"{root}/ant", "~/ant"):
        assert load(path, image_dir=image_dir).train.num_examples == 2
    (root / "ant" / "00000.jpg").write_bytes(b"x")
    path = write(root, {"image": ["ant/00000"], "label": [0]})
    assert "is ant/00000 the file " in message(load, path)
    path = write(root, {"picture": FILES, "a": LABELS, "b": LABELS})
    data_set = load(path, columns="path:picture,label:b")
    assert data_set.train.num_examples == 9


def test_columns_are_roles_and_names(root):
    path = write(root, {"path": FILES, "label": LABELS})
    for columns in ("path", "paths:path", "path:", "path:a,path:b"):
        with pytest.raises(ConfigError, match="expected ROLE:NAME by commas"):
            load(path, columns=columns)
    with pytest.raises(DataError, match="has no column 'labels', .* mean 'label'"):
        load(path, columns="label:labels")


def test_what_is_in_a_folder_decides(root, tmp_path_factory):
    alone = tmp_path_factory.mktemp("alone")
    write_images(alone / "images", [("a.png", 0, ROWS[0][2])])
    path = write(alone, {"path": ["images/a.png"], "label": [1]})
    assert photo_options(path) == photo_options(str(alone)) == {"dataset": "table"}
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
