"""What can go wrong, and the exit code of each.

A mistake of the user, bad data, a bad checkpoint and so on are told in one line;
`run_train.py` and `run_eval.py` turn them into the exit codes of the table in the
README. Anything else is a defect of ours and keeps its traceback.
"""

import contextlib
import re
from collections.abc import Iterator


class TowersError(Exception):
    """The base of all errors that end a run with one line instead of a traceback."""

    exit_code = 1


class ConfigError(TowersError, ValueError):
    """A flag, a recipe or the environment asks for what cannot be."""

    exit_code = 2


class DataError(TowersError):
    """A data set is missing, incomplete or not what it should be."""

    exit_code = 3


class CheckpointError(TowersError):
    """A checkpoint cannot be written, read, or does not fit the model."""

    exit_code = 4


class NumericError(TowersError):
    """A loss or a gradient is not finite."""

    exit_code = 5


class StuckError(TowersError):
    """A step did not end in the time allowed."""

    exit_code = 6


class Preempted(TowersError):
    """A signal asked the run to stop; the same command continues it."""

    exit_code = 75


def one_line(error: Exception) -> str:
    """The words of any error in a line of at most 800 characters."""
    text = " ".join(str(error).split())
    if len(text) > 800:
        text = text[:797] + "..."
    return text or type(error).__name__


@contextlib.contextmanager
def data_errors_of_tensorflow() -> Iterator[None]:
    """Raises a DataError as what it was where TensorFlow has passed it on.

    An error in a Python function that a graph or `tf.data` calls comes out as one of
    TensorFlow's, which holds its type and its words somewhere in its text.
    """
    try:
        yield
    except TowersError:
        raise
    except Exception as error:
        told = re.search(rf"\b{DataError.__name__}: (.*)", str(error))
        if told is None:
            raise
        raise DataError(told[1]) from None
