"""What is read from disk executes nothing: no unpickling, no imports by name."""

import contextlib
import json
import pathlib
import pickle
import re
import shutil

import pytest
from prepared_sets import features, message, random_examples, store

from towers.data.sets import tfds
from towers.errors import TowersError

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_no_call_of_the_package_unpickles_or_runs_a_shell():
    for path in (ROOT / "towers").rglob("*.py"):
        assert not re.search(r"\b(allow_pickle|shell)=(?!False\b)", path.read_text())


# Files of others.


class Bomb:
    """Creates a file where it is unpickled."""

    def __init__(self, path):
        self._path = str(path)

    def __reduce__(self):
        return open, (self._path, "w")


@pytest.fixture
def bomb(tmp_path):
    """A pickle; at the end nothing has executed it, but unpickling it does."""
    fired = tmp_path / "fired"
    content = pickle.dumps(Bomb(fired), protocol=2)
    yield content
    assert not fired.exists()
    pickle.loads(content).close()
    assert fired.exists()


# Data that tensorflow-datasets has prepared.


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    home, spec = tmp_path_factory.mktemp("stored"), features(id=None)
    store(home, random_examples(6, 0), random_examples(2, 1), spec=spec)
    return home


@pytest.fixture
def prepared(stored, tmp_path, monkeypatch):
    """The folder of a data set, to do with as one likes."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))
    shutil.copytree(stored / "shapes", tmp_path / "shapes")
    return tmp_path / "shapes" / "1.2.3"


def load(folder):
    return tfds.load("shapes", str(folder.parent.parent))


def test_no_prepared_file_is_unpickled(prepared, bomb):
    load(prepared)
    files = sorted(prepared.iterdir())
    assert len(files) >= 5
    for path in files:
        content = path.read_bytes()
        path.write_bytes(bomb)
        with contextlib.suppress(TowersError):
            load(prepared)
        path.write_bytes(content)


def named(form, name):
    """A features.json that names a class, in each of the forms that TFDS reads."""
    legacy = {"type": name, "content": {}}
    sequence = "tensorflow_datasets.core.features.sequence_feature.Sequence"
    content = {"feature": legacy, "length": None}
    return {
        "class": {"pythonClassName": name, "jsonFeature": {"json": "{}"}},
        "snake_case": {"python_class_name": name, "json_feature": {"json": "{}"}},
        "legacy": legacy,
        "nested": {"type": sequence, "content": content},
        "in_a_string": {
            "pythonClassName": sequence,
            "jsonFeature": {"json": json.dumps(content)},
        },
    }[form]


@pytest.mark.parametrize(
    "form,read",
    [
        *((x, load) for x in ("class", "snake_case", "legacy", "nested")),
        ("in_a_string", lambda folder: tfds.read_arrays(str(folder), (8, 6, 3))),
    ],
)
@pytest.mark.row(22)
def test_a_module_that_prepared_data_name_is_not_imported(
    form, read, prepared, tmp_path, monkeypatch
):
    fired = tmp_path / "fired"
    (tmp_path / "bomb.py").write_text(f"open({str(fired)!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    (prepared / "features.json").write_text(json.dumps(named(form, "bomb.Feature")))
    text = message(read, prepared)
    assert "names the class bomb.Feature, which is not one of " in text
    assert not fired.exists()
