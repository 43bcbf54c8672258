"""Starts the workers of a cluster on this machine, and ends them together.

    python -m towers.launch --num_workers=3 -- --config=cifar10_cnn

Each worker runs `python run_train.py --strategy=multi_worker` with the flags that
follow `--`, and finds its place in TF_CONFIG. GPUs, or the cores of a CPU, are divided
among the workers. SIGTERM and SIGINT are passed on once to each worker. The exit code
is the worst of theirs: a defect or a signal that killed one before 2 to 6, these before
75, and that before 0.
"""

from towers.run.signals import exit_on_signals

if __name__ == "__main__":  # before the imports that take time
    exit_on_signals()

import os
import shutil
import sys
from collections.abc import Sequence

from absl import flags

from towers.cli import flags as config_flags
from towers.errors import ConfigError
from towers.launch.supervisor import GRACE_SECS, NOTICE_SECS, SAVE_FACTOR, launch
from towers.messages import IS_WHEEL, ROOT, program

PROGRAM = "towers.launch"
MAX_WORKERS = 64
HINT = f"the flags of {program('train')} follow --, such as -- --config=quickstart"


def train_command(arguments: Sequence[str]) -> list[str]:
    """`python run_train.py`, or installed `towers-train`, with arguments. A strategy
    among them overrides the one set here.
    """
    path = str(ROOT / "run_train.py")
    if IS_WHEEL:
        folders = [os.path.dirname(sys.executable), *os.get_exec_path()]
        path = shutil.which("towers-train", path=os.pathsep.join(folders)) or path
    return [sys.executable, path, "--strategy=multi_worker", *arguments]


def define_flags() -> None:
    """The flags before `--`."""
    about = "Number of worker processes."
    flags.DEFINE_integer("num_workers", None, about, 1, MAX_WORKERS, required=True)
    about = "Maximum number of restarts of all workers after one was killed, was "
    about += "stuck, met a defect, or stopped without a signal to the launcher."
    flags.DEFINE_integer("max_restarts", 0, about, 0)
    about = "Seconds for the other workers to notice a failed one and end, at most "
    about += f"{NOTICE_SECS:g}, and again after SIGTERM; then they are killed. After a "
    about += f"stop they have {SAVE_FACTOR} times as long: one may be saving."
    flags.DEFINE_float("grace_secs", GRACE_SECS, about, 0.0)


def parse(argv: Sequence[str]) -> list[str]:
    """Gives the flags their values; returns the program and what follows `--`."""
    end = argv.index("--") if "--" in argv else len(argv)
    try:
        config_flags.parse(argv[:end])
    except ConfigError as error:
        hint = "" if "--" in argv else f"; {HINT}"
        raise ConfigError(f"{str(error).rstrip('.')}{hint}") from None
    return [argv[0], *argv[end + 1 :]]


def device_of(arguments: Sequence[str]) -> str:
    """The value of --device among the arguments of run_train.py."""
    values = flags.FlagValues()
    values.set_gnu_getopt(True)
    config_flags.define_config_flags(["device"], values)
    try:
        values([PROGRAM, *arguments], known_only=True)
    except flags.Error:
        return "auto"  # run_train.py reports the mistake
    return values["device"].value


def main(argv: Sequence[str]) -> int:
    """Runs the workers; returns their exit code."""
    arguments, values = argv[1:], flags.FLAGS
    if not arguments:
        raise ConfigError(f"no command: {HINT}")
    if "TF_CONFIG" in os.environ:
        raise ConfigError(
            "TF_CONFIG is set: the launcher starts a cluster of its own; unset it, or "
            f"run {program('train')} itself as a worker of that cluster"
        )
    return launch(
        train_command(arguments),
        values.num_workers,
        max_restarts=values.max_restarts,
        grace_secs=values.grace_secs,
        device=device_of(arguments),
    )


if __name__ == "__main__":
    define_flags()
    config_flags.start(main, parse, PROGRAM)
