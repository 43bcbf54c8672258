"""The first second of a program."""

import re

import pytest
from processes import ROOT, run


def test_command_lines_and_options_import_without_tensorflow():
    """Every module of cli/ and config/, in a process of its own."""
    paths = (
        p for room in ("cli", "config") for p in (ROOT / "towers" / room).glob("*.py")
    )
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in paths]
    names.insert(0, "towers")
    assert len(names) > 20
    script = f"import importlib, sys\nfor name in {names}:\n"
    script += "    importlib.import_module(name.removesuffix('.__init__'))\n"
    script += "    assert not {'tensorflow', 'keras'} & set(sys.modules), name\n"
    done = run("-c", script)
    assert done.returncode == 0, done.stderr


def test_keras_alone_goes_without_optional_packages(tmp_path):
    """A package of the name is there, and others get it."""
    (tmp_path / "keras.py").write_text(
        "try:\n    import sklearn\nexcept ImportError:\n    sklearn = None\n"
        "def later():\n    import sklearn\n    return sklearn\n"
    )
    (tmp_path / "sklearn.py").touch()
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    script += "from towers.cli.main import ImportHook\n"
    script += "sys.meta_path.insert(0, ImportHook())\n"
    script += "import keras; assert keras.sklearn is None\n"
    script += "import sklearn; assert keras.later() is sklearn\n"
    done = run("-c", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("continues", [False, True])
def test_a_training_says_what_it_does_before_it_imports_tensorflow(tmp_path, continues):
    for name in ("keras", "tensorflow"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the import begins')")
    workdir, recipe = tmp_path / "run", []
    if continues:
        (workdir / "checkpoints").mkdir(parents=True)
    else:
        recipe = ["--config=quickstart"]
    arguments = [*recipe, f"--workdir={workdir}"]
    done = run(str(ROOT / "run_train.py"), *arguments, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stderr == "the import begins\n"
    versions, activity = done.stdout.splitlines()
    assert re.match(r"towers [\d.]+, TensorFlow [\d.]+, Keras [\d.]+, Python", versions)
    assert (str(workdir) if continues else "shapes") in activity
