"""Training processes that are killed; as a program, it starts them.

That process imports TensorFlow and never uses it, so that it can fork children which
train at once. It reads a job per line, trains it in a child, and prints how it ended.
"""

import dataclasses
import json
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable

from processes import Server

# Before these operations of Python `sys.audit` tells the killer, if a save does them.
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir"}


@dataclasses.dataclass(frozen=True)
class Kill:
    """When a process gets SIGKILL; numbers count from 1, from the start of the process.

    Attributes:
        after_secs: after the start of the process.
        step: after the end of this step.
        save: after the beginning of this save,
        operation: or before this file operation of the save, and of what follows it.
        delay_secs: so much after the step, or the beginning of the save.
    """

    after_secs: float = 0.0
    step: int = 0
    save: int = 0
    operation: int = 0
    delay_secs: float = 0.0


class Processes(Server):
    """Training processes, one at a time; a context manager.

    Args:
        folder: for their output.
    """

    def __init__(self, folder: pathlib.Path):
        super().__init__([__file__], folder)

    def train(self, workdir: pathlib.Path, config, kill: Kill | None = None) -> bool:
        """Trains or continues a run; False where the process was killed before its
        end."""
        job = {"workdir": str(workdir), "config": dataclasses.asdict(config)}
        self.send(job | {"kill": dataclasses.asdict(kill or Kill())})
        status = int(self.answer())
        if os.WIFSIGNALED(status):
            assert kill and os.WTERMSIG(status) == signal.SIGKILL
            return False
        assert status == 0, self.output
        return True


def said_steps(workdir: pathlib.Path) -> list[int]:
    """Steps of the saves that have returned, over all processes of a run."""
    said = pathlib.Path(f"{workdir}.said")
    return list(map(int, said.read_text().split())) if said.exists() else []


def serve() -> None:
    """Trains the jobs that come through the standard input, each in a child."""
    import small_runs  # noqa: F401  (imported once, for all children)
    import tensorflow as tf

    from towers.training import train  # noqa: F401

    # These are imported at their first use.
    _ = tf.keras, tf.random, tf.raw_ops, tf.summary, tf.compat
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if not pid:
            try:
                os.dup2(2, 1)
                train_job(job["workdir"], job["config"], job["kill"])
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        if job["kill"]["after_secs"]:
            time.sleep(job["kill"]["after_secs"])
            os.kill(pid, signal.SIGKILL)
        print(os.waitpid(pid, 0)[1], flush=True)


def train_job(workdir: str, config: dict, kill: dict | None = None) -> None:
    """Trains until the end, or the kill; really syncs files only without one."""
    import pytest
    import small_runs

    from towers.config import Config
    from towers.run.checkpointer import Checkpointer
    from towers.training import train

    patch = pytest.MonkeyPatch()
    small_runs.use(patch, small_runs.full_network)
    killer = Killer(Kill(**kill) if kill else Kill())
    save = Checkpointer.save

    def saying(checkpointer, snapshot):
        killer.begins_save()
        save(checkpointer, snapshot)
        with open(f"{workdir}.said", "a") as file:
            file.write(f"{snapshot.step}\n")

    patch.setattr(Checkpointer, "save", saying)
    if kill:
        killer.watch(patch)
    train(workdir, Config(**config), after_call=killer.after_call)


class Killer:
    """Kills its own process."""

    def __init__(self, kill: Kill):
        self._kill = kill
        self._num_calls = self._num_saves = self._num_operations = 0

    def after_call(self) -> None:
        self._num_calls += 1
        if self._num_calls == self._kill.step:
            self._kill_later()

    def begins_save(self) -> None:
        self._num_saves += 1
        if self._num_saves == self._kill.save and not self._kill.operation:
            self._kill_later()

    def watch(self, patch) -> None:
        """Counts the file operations of the thread that saves.

        Nothing is really synced: it takes most of the time on a busy disk, and matters
        only in a power cut.
        """
        import tensorflow as tf

        write = self._counted("write", tf.raw_ops.SaveV2)
        patch.setattr(tf.raw_ops, "SaveV2", write)
        patch.setattr(os, "fsync", self._counted("fsync", lambda descriptor: None))
        sys.addaudithook(lambda event, _: event in EVENTS and self._operates(event))

    def _counted(self, name: str, operation: Callable) -> Callable:
        def counted(*args, **kwargs):
            self._operates(name)
            return operation(*args, **kwargs)

        return counted

    def _operates(self, name):
        in_save = threading.current_thread().name == "background"
        if not in_save or self._num_saves != self._kill.save:
            return
        self._num_operations += 1
        if self._num_operations == self._kill.operation:
            os.write(1, f"killed before {name}\n".encode())
            _kill_itself()

    def _kill_later(self):
        threading.Timer(self._kill.delay_secs, _kill_itself).start()


def _kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve()
