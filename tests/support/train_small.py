"""run_train.py on the small data set, halted at one place; for test_commands.py.

python train_small.py PLACE NTH HOLD_SECS [flags of run_train.py]

When the run reaches PLACE for the n-th time (see `small_runs.halt_at`; "nowhere" for an
ordinary run) it prints a line with the place, and waits there for some seconds.
"""

import pathlib
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from towers.cli import flags, train
from towers.cli.imports import Finder
from towers.signals import exit_on_signals


class Halt:
    """Waits once, at the n-th time; each later time waits for the end of that."""

    def __init__(self, place: str, nth: int, hold_secs: float):
        self._place, self._nth, self._hold_secs = place, nth, hold_secs
        self._lock, self._times = threading.Lock(), 0
        self._released = threading.Event()

    def __call__(self) -> None:
        with self._lock:
            self._times += 1
            times = self._times
        if times == self._nth:
            print(f"halted at {self._place}", flush=True)
            time.sleep(self._hold_secs)
            self._released.set()
        elif times > self._nth:
            self._released.wait()


def main() -> None:
    exit_on_signals()
    place, nth, hold_secs = sys.argv[1:4]
    del sys.argv[1:4]
    sys.meta_path.insert(0, Finder)
    import pytest
    import small_runs

    patch = pytest.MonkeyPatch()
    small_runs.use(patch, small_runs.full_network)
    if place != "nowhere":
        small_runs.halt_at(patch, place, Halt(place, int(nth), float(hold_secs)))
    train.define_flags()
    flags.start(train.main)


if __name__ == "__main__":
    main()
