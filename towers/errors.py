"""Errors that end a run in one line, and the exit code of each.

They are mistakes of the user, bad data, a bad checkpoint and so on; `run_train.py` and
`run_eval.py` end with the exit codes in the table of the README. Any other error is a
defect of towers and keeps its traceback.
"""

import contextlib
import re
from collections.abc import Iterator


class TowersError(Exception):
    """The base of all errors that end a run with one line instead of a traceback."""

    exit_code = 1


class ConfigError(TowersError, ValueError):
    """An option, a recipe or the environment is wrong or does not fit the others."""

    exit_code = 2


class DataError(TowersError):
    """A data set is missing, incomplete or damaged."""

    exit_code = 3


class CheckpointError(TowersError):
    """A checkpoint cannot be written, read, or does not fit the model."""

    exit_code = 4


class NumericError(TowersError):
    """A loss or a gradient is not finite."""

    exit_code = 5


class StuckError(TowersError):
    """A step was not finished in the time allowed."""

    exit_code = 6


class Preempted(TowersError):
    """A signal asked the run to stop; the same command continues it."""

    exit_code = 75


def one_line(error: Exception) -> str:
    """The message of any error in a line of at most 800 characters."""
    text = " ".join(str(error).split())
    if len(text) > 800:
        text = text[:797] + "..."
    return text or type(error).__name__


@contextlib.contextmanager
def data_errors_of_tensorflow() -> Iterator[None]:
    """Raises a DataError again as itself where TensorFlow has wrapped it.

    An error in a Python function that a graph or `tf.data` calls is raised as one of
    TensorFlow's, with its type and message somewhere in the text.
    """
    try:
        yield
    except TowersError:
        raise
    except Exception as error:
        match = re.search(rf"\b{DataError.__name__}: (.*)", str(error))
        if match is None:
            raise
        raise DataError(match[1]) from None
