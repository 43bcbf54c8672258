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


def test_programs_import_keras_quietly_and_without_optional_packages(tmp_path):
    (tmp_path / "sklearn.py").touch()
    (tmp_path / "keras.py").write_text("""
import gc, os, sys
for line in (
    "WARNING: All log messages before absl::InitializeLog() ...",
    "I0000 00:00:17.6 2687 port.cc:153] oneDNN is on.",
    "E0000 00:00:17.6 2687 dnn.cc:10] Unable to register cuDNN",
    "To enable the following instructions: AVX2 FMA",
    "W0000 00:00:17.6 2687 dso.cc:9] no libcudnn.so",
):
    print(line, file=sys.stderr, flush=True)
assert not gc.isenabled()
try:
    import sklearn
except ImportError:
    sklearn = None
""")
    script = f"""
import gc, os, sys; sys.path.insert(0, {str(tmp_path)!r})
from towers.cli.imports import Finder
finders = list(sys.meta_path)
sys.meta_path.insert(0, Finder)
import keras; assert keras.sklearn is None
import sklearn
assert gc.isenabled() and gc.get_freeze_count() and sys.meta_path == finders
os.write(2, b"afterwards")
"""
    done = run("-c", script)
    shown = "W0000 00:00:17.6 2687 dso.cc:9] no libcudnn.so\nafterwards"
    assert (done.returncode, done.stderr) == (0, shown)


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
