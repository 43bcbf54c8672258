"""The programs: `towers-train` and `run_train.py` call `run_train`, and so on.

Each has a module with its flags and its `main`. Its imports take time: signals are
caught before.
"""

import importlib
import sys

from towers.cli.import_hook import ImportHook
from towers.run.signals import exit_on_signals


def run_train() -> None:
    """Trains, see `train`."""
    _run("train")


def run_eval() -> None:
    """Evaluates, see `eval`."""
    _run("eval")


def run_predict() -> None:
    """Predicts, see `predict`."""
    _run("predict", "the same command begins again", "stderr")


def run_export() -> None:
    """Exports, see `export`."""
    _run("export")


def run_data() -> None:
    """Checks a data set, see `data`."""
    _run("data")


def _run(name, *at_signals):
    exit_on_signals(*at_signals)
    sys.meta_path.insert(0, ImportHook())
    importlib.import_module(f"towers.cli.{name}").run()
