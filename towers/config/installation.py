"""The installation of towers, a checkout or a wheel: its recipes, names of programs."""

import contextlib
import functools
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import sys
from collections.abc import Sequence

import towers
from towers import console

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]

# The folder that holds the package: of the checkout, or site-packages.
ROOT = _PACKAGE.parent
# Only a wheel has this folder: it is configs/ of the checkout.
IS_WHEEL = (_PACKAGE / "recipes").is_dir()
RECIPES = _PACKAGE / "recipes" if IS_WHEEL else ROOT / "configs"


def version_line() -> str:
    """Versions of towers and of its main dependencies, without importing them."""
    versions = [f"towers {towers.__version__}"]
    for package in ("TensorFlow", "Keras"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package.lower())
            versions.append(f"{package} {version}")
    return ", ".join([*versions, f"Python {platform.python_version()}"])


def print_versions(*lines: str) -> None:
    """Prints `version_line`, once in a process, and more lines."""
    _print_once(version_line())
    for line in lines:
        console.line(line)


_print_once = functools.cache(console.line)


def program(name: str) -> str:
    """Return a program as the user types it: `run_train.py`, or `towers-train`."""
    typed = os.path.basename(sys.argv[0]) if sys.argv else ""
    is_installed = IS_WHEEL or typed.startswith("towers-")
    return f"towers-{name}" if is_installed else f"run_{name}.py"


def command_of(path: str, arguments: Sequence[str] = ()) -> list[str]:
    """Arguments of a command that starts the program of a path."""
    if path.endswith(".py"):
        return ["python", path, *arguments]
    name = os.path.basename(path)
    return [name if shutil.which(name) == path else path, *arguments]


def command_of_program(name: str) -> list[str]:
    """Return the arguments of a command that starts a program, see `program`."""
    folder, typed = os.path.split(sys.argv[0] if sys.argv else "")
    folder = folder if typed == program("train") else ""
    return command_of(os.path.join(folder, program(name)))


def with_programs(text: str) -> str:
    """A text with its commands `python run_train.py` as the user types them."""
    pattern = r"python run_(\w+)\.py"
    return re.sub(pattern, lambda m: " ".join(command_of(program(m[1]))), text)
