"""What is read from disk executes nothing: no unpickling, no imports by name."""

import ast
import json
import pathlib
import pickle
import shutil

import pytest
from prepared_sets import features, message, random_examples, store
from small_runs import half_way, small_config, use

from towers import data, training
from towers.config.storage import from_json
from towers.data import tfds
from towers.errors import CheckpointError, TowersError
from towers.run.metrics import last_accuracy, read_metrics
from towers.run.weights import open_weights

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = sorted([*(ROOT / "towers").rglob("*.py"), *ROOT.glob("run_*.py")])

# Modules that execute what they read, or that begin programs.
MODULES = {
    "code", "ctypes", "dill", "cloudpickle", "importlib", "joblib", "marshal",
    "pickle", "runpy", "shelve", "subprocess", "torch", "yaml",
}  # fmt: skip
CALLS = {"eval", "exec", "__import__"}
METHODS = {"exec_module", "load_model", "popen", "system", "unsafe_load"}

# (file, what it uses): the reason.
ALLOWED = {
    ("towers/__init__.py", "importlib"): "our own packages, when they are called",
    ("towers/config/factories.py", "importlib"): "rows of our tables, FILE.py:FUNCTION",
    ("towers/config/factories.py", "exec_module"): "a recipe or FILE.py:FUNCTION",
    ("towers/parallel/devices.py", "importlib"): "metadata: versions of packages",
    ("towers/config/flags.py", "importlib"): "metadata: versions for --version",
    ("towers/export/__init__.py", "importlib"): "find_spec: is a package installed",
    ("towers/export/comparison.py", "subprocess"): "a list: load_in_new_process.py",
    ("towers/export/load_in_new_process.py", "load_model"): "just written",
    ("towers/launch/process.py", "subprocess"): "run_train.py, its arguments as a list",
    ("towers/__init__.py", "subprocess"): "grep, its arguments as a list",
    ("towers/errors.py", "ctypes"): "prctl, which Python does not have",
}


def uses(source):
    """What a source uses of the lists above, and options that make a call dangerous."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & MODULES
            found |= {alias.name for alias in node.names} & METHODS
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & METHODS
        elif isinstance(node, ast.Name):
            found |= {node.id} & CALLS
        elif isinstance(node, ast.keyword):
            off = isinstance(node.value, ast.Constant) and not node.value.value
            if node.arg in ("allow_pickle", "shell") and not off:
                found.add(node.arg)
    return found


def test_the_sources_execute_nothing_that_they_read():
    found = {
        (str(path.relative_to(ROOT)), use)
        for path in SOURCES
        for use in uses(path.read_text())
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "source,use",
    [
        ("import pickle", "pickle"),
        ("from torch.serialization import load", "torch"),
        ("import os\nos.system('x')", "system"),
        ("eval('1')", "eval"),
        ("np.load(path, allow_pickle=True)", "allow_pickle"),
        ("np.load(path, allow_pickle=flag)", "allow_pickle"),
        ("run('x', shell=1)", "shell"),
        ("keras.models.load_model(path)", "load_model"),
    ],
)
def test_each_kind_of_use_is_noticed(source, use):
    assert uses(source) == {use}
    assert not uses("import re\nre.compile('x')\nnp.load(path, allow_pickle=False)")


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


@pytest.mark.slow
@pytest.mark.row(22)
def test_no_file_of_a_run_is_unpickled(tmp_path, monkeypatch, bomb):
    use(monkeypatch)
    original = half_way(tmp_path / "original")
    names = [p.relative_to(original) for p in original.rglob("*") if p.is_file()]
    assert {"config.json", "metrics.jsonl"} <= {str(name) for name in names}
    assert {"MANIFEST.json", "trainer_state.json", "tensors.index"} <= {
        name.name for name in names
    }
    for name in names:
        workdir = shutil.copytree(original, tmp_path / "run")
        (workdir / name).write_bytes(bomb)
        try:
            training.train(workdir, small_config())
        except TowersError:
            pass
        shutil.rmtree(workdir)


def test_a_config_and_metrics_are_not_unpickled(tmp_path, bomb):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(bomb)
    assert read_metrics(path) == ([], True) and last_accuracy(path, 9) is None
    with pytest.raises((ValueError, TowersError)):
        from_json(bomb.decode("latin-1"))


@pytest.mark.parametrize(
    "name", ["a.keras", "a.h5", "a.weights.h5", "a.index", "variables/variables.index"]
)
def test_no_file_of_weights_is_unpickled(name, tmp_path, bomb):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bomb)
    with pytest.raises(CheckpointError):
        with open_weights(str(tmp_path if "variables" in name else path)):
            pass


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion_mnist"])
@pytest.mark.row(22)
def test_no_file_of_a_data_set_is_unpickled(name, tmp_path, monkeypatch, bomb):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))
    for file in (
        *(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta",
        *(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin",
        "train", "test", "meta", "train.bin", "test.bin", "batches.meta.txt",
        "cifar-10-python.tar.gz", "cifar-100-python.tar.gz",
        "cifar-10-binary.tar.gz", "cifar-100-binary.tar.gz",
        *(f"{split}-{kind}{ending}" for split in ("train", "t10k") for kind in
          ("images-idx3-ubyte", "labels-idx1-ubyte") for ending in ("", ".gz")),
    ):  # fmt: skip
        for folder in ("", "cifar-10-batches-py", "cifar-10-batches-bin",
                       "cifar-100-python", "cifar-100-binary"):  # fmt: skip
            (tmp_path / "data" / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / "data" / folder / file).write_bytes(bomb)
    assert str(tmp_path / "data") in message(data.load, name, str(tmp_path / "data"))


# Data that tensorflow-datasets has prepared.


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    home = tmp_path_factory.mktemp("stored")
    store(home, random_examples(6, 0), random_examples(2, 1), spec=features(id=None))
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
        try:
            load(prepared)
        except TowersError:
            pass
        path.write_bytes(content)


def named(form, name):
    """A features.json that names a class, in each of the forms that TFDS reads."""
    legacy = {"type": name, "content": {}}
    sequence = "tensorflow_datasets.core.features.sequence_feature.Sequence"
    if form == "class":
        return {"pythonClassName": name, "jsonFeature": {"json": "{}"}}
    if form == "snake_case":
        return {"python_class_name": name, "json_feature": {"json": "{}"}}
    if form == "legacy":
        return legacy
    content = {"feature": legacy, "length": None}
    if form == "nested":
        return {"type": sequence, "content": content}
    return {"pythonClassName": sequence, "jsonFeature": {"json": json.dumps(content)}}


FORMS = ["class", "snake_case", "legacy", "nested", "in_a_string"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "read", [load, lambda folder: tfds.read_arrays(str(folder), (8, 6, 3))]
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
