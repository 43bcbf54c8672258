"""The programs: `towers-train` and `run_train.py` call `run_train`, and so on.

Each has a module with its flags and its `main`. Its imports take time: signals are
caught before.
"""

from towers.run.signals import exit_on_signals


def run_train() -> None:
    """Trains, see `train`."""
    exit_on_signals()
    from towers.cli import train

    train.run()


def run_eval() -> None:
    """Evaluates, see `eval`."""
    exit_on_signals()
    from towers.cli import eval

    eval.run()


def run_predict() -> None:
    """Predicts, see `predict`."""
    exit_on_signals("the same command begins again", "stderr")
    from towers.cli import predict

    predict.run()


def run_export() -> None:
    """Exports, see `export`."""
    exit_on_signals()
    from towers.cli import export

    export.run()


def run_data() -> None:
    """Checks a data set, see `data`."""
    exit_on_signals()
    from towers.cli import data

    data.run()
