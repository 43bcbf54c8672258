"""Texts, paths and commands as parts of a line for the user."""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import sys
from collections.abc import Sequence

VERSION = "0.2.0"

# Maximum number of characters of a message of towers, which ends with what to do, of
# another library's message in one of ours, of a path, and of a name in a table.
MAX_CHARACTERS, MAX_FOREIGN, MAX_SHOWN, MAX_NAME = 2000, 400, 200, 40

# The folder that holds the package: the checkout, or site-packages.
ROOT = pathlib.Path(__file__).resolve().parents[1]
# Only a wheel has this folder: it is configs/ in the checkout.
IS_WHEEL = (ROOT / "towers" / "recipes").is_dir()


def printable(text: str) -> str:
    r"""Return the text in one line, with what a terminal obeys as escapes such as \n.

    The passwords of URLs are hidden.
    """
    if "@" in text:
        text = re.sub(r"(://[^\s/:@]*):[^\s/@]*@", r"\1:***@", text)
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def shown(text: str, most: int = MAX_SHOWN) -> str:
    """Return the end of a path or a name, at most `most` characters, printable."""
    text = printable(text)
    return text if len(text) <= most else "..." + text[3 - most :]


def one_line(error: object, most: int | None = None) -> str:
    """Return the message of an error in a line of at most `most` printable characters.

    The middle of a longer message is omitted, as its end says what to do.
    """
    is_ours = hasattr(error, "exit_code")
    if most is None:
        most = MAX_CHARACTERS if is_ours else MAX_FOREIGN
    try:
        text = " ".join(str(error).split())
    except Exception:  # of a class of the user
        text = ""
    if len(text) > 2 * most:  # nothing of the middle is left
        text = text[:most] + text[-most:]
    text = printable(text or type(error).__name__)
    if len(text) <= most:
        return text
    kept = most * (2 if is_ours else 1) // 3  # of its end
    head, tail = text[: most - kept - 5], text[-kept:]
    # Between words, unless the next space is far.
    space = (head + text[len(head)]).rfind(" ", len(head) - most // 6)
    head = head if space < 0 else head[:space]
    space = (text[-len(tail) - 1] + tail).find(" ", 0, most // 6)
    return f"{head} ... {tail if space < 0 else tail[space:]}"


def version_line() -> str:
    """Return the versions of towers and its main dependencies."""
    versions = [f"towers {VERSION}"]
    for package in ("TensorFlow", "Keras"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package.lower())
            versions.append(f"{package} {version}")
    return ", ".join([*versions, f"Python {platform.python_version()}"])


def program(name: str) -> str:
    """Return a program as the user types it: `run_train.py`, or `towers-train`."""
    typed = os.path.basename(sys.argv[0]) if sys.argv else ""
    is_installed = IS_WHEEL or typed.startswith("towers-")
    return f"towers-{name}" if is_installed else f"run_{name}.py"


def command_of(path: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the arguments of a command that starts the program at a path."""
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
    """Return a text with its commands `python run_train.py` as the user types them."""
    pattern = r"python run_(\w+)\.py"
    return re.sub(pattern, lambda m: " ".join(command_of(program(m[1]))), text)


def counted(number: float, noun: str) -> str:
    """Return a number of things, such as "1 epoch" or "1,200 steps"."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{text} {noun}{'' if number == 1 else 's'}"


def duration(secs: float) -> str:
    """Return a time, such as "42 s", "3 min 20 s" or "2 h 05 min"."""
    secs = round(secs)
    if secs < 60:
        return f"{secs} s"
    if secs < 3600:
        return f"{secs // 60} min {secs % 60:02d} s"
    return f"{secs // 3600} h {secs % 3600 // 60:02d} min"
