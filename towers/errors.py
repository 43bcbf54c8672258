"""Errors that end a run in one line, and the exit code of each.

They are mistakes of the user, bad data, a bad checkpoint and so on; the programs end
with the exit codes in the table of docs/reliability.md. Any other error is a defect of
towers; its exit code is DEFECT.
"""

import contextlib
import difflib
import os
import platform
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator

from towers import console
from towers.messages import MAX_CHARACTERS, one_line

# Exit code of an error that is not a TowersError (EX_SOFTWARE of sysexits.h).
DEFECT = 70

# Exit code -> whether the same command may succeed when a launcher starts it again. A
# restart may help after a defect, as faults of a GPU or the network end as one. The
# meanings are in docs/reliability.md; 1 is TensorFlow's, if it did not connect workers.
IS_RETRYABLE = dict.fromkeys(range(6), False)
IS_RETRYABLE |= dict.fromkeys([1, 6, DEFECT, 75], True)


def is_retryable(code: int) -> bool:
    """Return whether the same command may succeed after this exit code."""
    return IS_RETRYABLE.get(code, True)


# The environment variable with the name of a job, which its restarts keep.
JOB = "TOWERS_JOB"

# Messages of TensorFlow, XLA, CUDA, cuDNN, cuBLAS and NCCL that no memory is left.
_NO_MEMORY = re.compile(
    r"OOM when|out.of.memory|failed to allocate|\w*ALLOC(?:ATION)?_FAILED"
    r"|exceeds the memory limit|MemoryError|Dst tensor is not initialized"
    # ": Operation not permitted" follows if a disk forbids execution.
    r"|failed to map segment from shared object(?!: op)|cannot allocate memory",
    re.IGNORECASE,
)
# In these messages: what was to be allocated, the operation, and the device.
_WANTED = re.compile(
    r"tensor (?:with|of) shape ?\[[\d,]*\] and type \w+"
    r"|(?<=alloc)\w* .{0,40}?(\d[\d.]* ?(?:[KMGTPE]i?B|B|bytes))\b"
)
_NODE = re.compile(r"\{\{.*?\}\} ?")
# In other messages: parts that do not tell the cause.
_PLACES = re.compile(r"\{\{.*?\}\} |Error in user.* \w*Iterator::\S+: | ?\[Op:.*")
_DEVICE = re.compile(r"[CG]PU:\d+|device ordinal \d+")


class TowersError(Exception):
    """Base class of errors that end a run in one line, or one for each of `lines`."""

    exit_code: int
    lines: tuple[str, ...] = ()


class ConfigError(TowersError, ValueError):
    """An option, a recipe or the environment is wrong or does not fit the others."""

    exit_code = 2


class DataError(TowersError):
    """A data set is missing, incomplete or damaged."""

    exit_code = 3


class UnavailableDataError(DataError):
    """This machine or a server keeps data from being read, perhaps for a while."""

    exit_code = 75


class CheckpointError(TowersError):
    """A checkpoint cannot be written, read, or does not fit the model."""

    exit_code = 4


class RunFolderError(TowersError):
    """The run's folder is gone, was replaced, or holds what is not a run's."""

    exit_code = 4


class ExportError(TowersError):
    """An export cannot be written."""

    exit_code = 4


class DoubtfulExport(ExportError):
    """An export differs from the run's network."""

    exit_code = 3


class NumericError(TowersError):
    """A loss, a gradient or a parameter is not finite."""

    exit_code = 5


class StuckError(TowersError):
    """A step, or a save, was not finished in the time allowed."""

    exit_code = 6


class WorkerLostError(TowersError):
    """Another worker ended, or does not answer; the same command continues the run."""

    exit_code = 75


class Preempted(TowersError):
    """A signal stopped the run; without --overwrite the command continues it."""

    exit_code = 75


def out_of_memory(error: BaseException | str) -> str:
    """Return, for example, 'out of memory on GPU:0: 3.2GiB'; "" for other errors."""
    try:
        text = str(error)
    except Exception:  # of a class of the user
        text = ""
    lines = [line for line in text.splitlines() if _NO_MEMORY.search(line)]
    if isinstance(error, MemoryError):
        lines.append(text or type(error).__name__)
    if not lines:
        return ""
    # The last device is the destination of a copy "from CPU:0 to GPU:0".
    devices, wanted = _DEVICE.findall(lines[0]), _WANTED.search(lines[0])
    place = f" on {devices[-1]}" if devices else ""
    size = (wanted[1] or wanted[0]) if wanted else _NODE.sub("", lines[0])
    return f"out of memory{place}: {one_line(size, 150)}"


def cause(error: Exception) -> str:
    """Return the first line of an error of the user's code or of TensorFlow."""
    text = f"{type(error).__name__}: {error}"
    if type(error).__module__.startswith("tensorflow"):
        text = getattr(error, "message", "").strip() or text
    return one_line(_PLACES.sub("", text.splitlines()[0]), 200)


def refuse_url(name: str, path: str | os.PathLike) -> None:
    """Raise ConfigError for a URL (`pathlib` makes its two slashes one)."""
    if re.match(r"\s*[A-Za-z][A-Za-z0-9+.-]+:/", os.fsdecode(path)):
        raise ConfigError(
            f"{name}={one_line(os.fsdecode(path), 150)}: is a URL, and only local "
            "files are read and written; give a local path, such as a mounted bucket's"
        )


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return 'did you mean ...? ' for the nearest of some names, or nothing."""
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def with_nearest(text: str, name: str, names: Iterable[str]) -> str:
    """Return the text, followed by '; did you mean ...?' if there is a near name."""
    question = did_you_mean(name, names).rstrip()
    return f"{text}; {question}" if question else text


def report(program: str, error: BaseException, folder: str | None = None) -> int:
    """Print an error in a line, or a defect in three; return the exit code.

    The traceback of a defect is saved in a folder.
    """
    if isinstance(error, TowersError):
        code, most = error.exit_code, MAX_CHARACTERS - len(f"{program}: ")
        lines = [one_line(line, most) for line in error.lines or [error]]
    else:
        code, lines = DEFECT, _defect(error, folder)

    console.flush()
    for line in lines:
        console.error(f"{program}: {line}")
    return code


def end_process(program: str, error: BaseException, folder: str | None = None) -> None:
    """End the process after `report`, without waiting for its threads."""
    exit_code = report(program, error, folder)
    console.finish()
    os._exit(exit_code)


def _defect(error, folder):
    """Save the traceback of a defect; return three lines."""
    content = (
        f"command: {sys.argv}\n"
        f"Python {platform.python_version()} on {platform.platform()}\n"
        + "".join(
            f"{name} {getattr(sys.modules[name], '__version__', '?')}\n"
            for name in ("towers", "tensorflow", "keras", "numpy")
            if name in sys.modules
        )
        + "".join(traceback.format_exception(error))
    ).encode("utf-8", "backslashreplace")
    path = _saved(content, folder)
    if path is None:
        for line in content.decode().splitlines():
            console.error(line)
    return [
        one_line(f"a defect in towers: {type(error).__name__}: {one_line(error)}"),
        "please report it, with the file named below and what was done before",
        f"the traceback: {path or 'it could not be saved'}",
    ]


def _saved(content, folder):
    """Return the path of a new file in a folder, or else a temporary one."""
    for place in (folder, None):
        with contextlib.suppress(OSError):
            descriptor, path = tempfile.mkstemp(".txt", "towers-defect-", place)
            with open(descriptor, "wb") as file:
                file.write(content)
            return path
    return None


@contextlib.contextmanager
def data_errors_of_tensorflow() -> Iterator[None]:
    """Raise a DataError again that TensorFlow has wrapped, in graphs and `tf.data`."""
    try:
        yield
    except TowersError:
        raise
    except Exception as error:
        for kind in (DataError, UnavailableDataError):
            if match := re.search(rf"\b{kind.__name__}: (.*)", str(error)):
                raise kind(match[1]) from None
        raise
