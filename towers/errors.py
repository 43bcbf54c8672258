"""What can go wrong, and the exit code of each.

A mistake of the user, bad data, a bad checkpoint and so on are told in one line;
`run_train.py` and `run_eval.py` turn them into the exit codes of the table in the
README. Anything else is a defect of ours and keeps its traceback.
"""


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
