"""The programs: `towers-train` and `run_train.py` call `run_train`, and so on.

Each has a module with its flags and its `main`. What a program changes in the process,
signals, imports, warnings and memory, is changed here.
"""

import contextlib
import ctypes
import functools
import importlib
import logging
import os
import sys
import warnings

from towers.cli.exits import exiting_at_once
from towers.cli.imports import Finder
from towers.signals import exit_on_signals

# Options of glibc's `mallopt`: no trim, no mmap.
_KEEP_FREED = ((-1, -1), (-4, 0))


def _keep_freed_memory():
    """Let malloc reuse freed activations, which costs less than mapping new pages."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        for option, value in _KEEP_FREED:
            ctypes.CDLL(None).mallopt(option, value)


@exiting_at_once()
def _start(name, *at_signals):
    exit_on_signals(*at_signals)
    if name in ("cli.eval", "cli.predict"):
        _keep_freed_memory()
    sys.meta_path.insert(0, Finder)
    # Damaged metadata are ignored; both packages log faults that they raise.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    os.environ.setdefault("HF_HUB_VERBOSITY", "critical")
    program = importlib.import_module(f"towers.{name}")
    flags = importlib.import_module("towers.cli.flags")
    program.define_flags()
    parse = getattr(program, "parse", flags.parse)
    flags.start(program.main, parse, getattr(program, "PROGRAM", ""))


def run_check() -> None:
    """Start `python -m towers.check`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # they may be training
    _start("check.program")


run_train, run_eval, run_export = (
    functools.partial(_start, f"cli.{name}") for name in ("train", "eval", "export")
)
run_predict = functools.partial(
    _start, "cli.predict", "the same command begins again", "stderr"
)
