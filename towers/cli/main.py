"""The programs: `towers-train` and `run_train.py` call `run_train`, and so on.

Each has a module with its flags and its `main`. Its imports take time: signals are
caught before.
"""

import functools
import importlib
import os
import sys

import towers
from towers.run.signals import exit_on_signals

# Imported by Keras 3.15 and TensorFlow 2.21 where they are installed, for functions
# that no program calls; a third of the time of the import.
OPTIONAL = ("matplotlib", "pandas", "scipy", "sklearn")


class ImportHook:
    """A finder for `sys.meta_path` that finds nothing: it refuses modules of TensorFlow
    and Keras the packages `OPTIONAL`, as if they were not installed. Functions that
    import them when they are called get them, and so does everybody else.
    """

    def find_spec(self, name, path=None, target=None):
        if name in OPTIONAL:
            frame = sys._getframe(1)
            while "importlib" in frame.f_globals.get("__name__", ""):
                frame = frame.f_back
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            is_import = frame.f_code.co_name == "<module>"
            if is_import and package in ("keras", "tensorflow"):
                raise ModuleNotFoundError(f"{name} is not needed", name=name)
        return


def _start(name: str, *at_signals: str) -> None:
    """Starts the program of `towers.NAME`."""
    exit_on_signals(*at_signals)
    sys.meta_path.insert(0, ImportHook())
    towers.keeps_imports = True
    program = importlib.import_module(f"towers.{name}")
    flags = importlib.import_module("towers.cli.flags")
    program.define_flags()
    parse = getattr(program, "parse", flags.parse)
    flags.start(program.main, parse, getattr(program, "PROGRAM", ""))


def run_check() -> None:
    """Starts `python -m towers.check`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # they may be training
    _start("check.program")


run_train, run_eval, run_export = (
    functools.partial(_start, f"cli.{name}") for name in ("train", "eval", "export")
)
run_predict = functools.partial(
    _start, "cli.predict", "the same command begins again", "stderr"
)
