"""The folder of a run: its files, and the lock of the process that trains there.

config.json    the configuration of the run
checkpoints/   one folder per save
metrics.jsonl  a line per step that was logged
tensorboard/   event files
result.json    the last evaluation by run_eval.py
"""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import socket
import time

from towers.config import Config, from_json, replace
from towers.errors import ConfigError

_LOCK = ".lock"

# Images of a batch in an evaluation.
EVALUATION_BATCH_SIZE = 500


class RunFolder:
    """Paths of a run, and its small JSON files."""

    def __init__(self, workdir: str | os.PathLike):
        self.path = pathlib.Path(workdir)
        self.config = self.path / "config.json"
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.result = self.path / "result.json"

    def create(self) -> None:
        """Makes the folder, or refuses one that cannot be written."""
        probe = self.path / ".writable"
        try:
            self._make()
            probe.write_text("")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"the run folder {self.path} cannot be written: {error.strerror}; "
                "choose another --workdir"
            ) from None

    def _make(self):
        """Makes the folder; its name is on the disk, as are those of its parents, which
        a process that was killed may have made."""
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in self.path.resolve().parents:
            with contextlib.suppress(OSError):  # one that may not be listed is not new
                fsync(folder)

    def clear(self) -> None:
        """Removes the files of earlier runs, and nothing else that is in the folder.

        Raises:
            ConfigError: something cannot be removed, such as a link to a folder.
        """
        for path in (self.checkpoints, self.tensorboard):
            try:
                shutil.rmtree(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise ConfigError(
                    f"{path} cannot be removed: {error.strerror or error}; remove it "
                    "yourself or choose another --workdir"
                ) from None
        for path in (self.config, self.metrics, self.result):
            path.unlink(missing_ok=True)

    def stored_config(self) -> Config:
        """The Config of the run in this folder; ConfigError where there is none."""
        try:
            return from_json(self.config.read_text())
        except ValueError as error:
            raise ConfigError(f"{self.config}: {error}") from None
        except OSError:
            raise ConfigError(
                f"{self.path} holds no run: there is no {self.config.name} in it; give "
                "the folder of a run as --workdir"
            ) from None

    def evaluation_config(self, **changes) -> Config:
        """The stored Config, with the device, the towers and the batch size of an
        evaluation in place of those of the training.

        Args:
            **changes: options that the evaluation sets otherwise.

        Raises:
            ConfigError: as `stored_config`, or the options do not fit.
        """
        stored = self.stored_config()
        settings = {
            "device": "auto",
            "device_order": "",
            "parameter_device": "cpu",
            "batch_size": EVALUATION_BATCH_SIZE,
            # One group where the network is split, else one tower per device.
            "num_towers": stored.group_size if stored.group_size > 1 else 0,
        }
        return replace(stored, settings | changes)

    def write(self, path: pathlib.Path, text: str) -> None:
        """Writes a small file so that a reader sees the old or the new one, whole."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text)
        fsync(temporary)
        os.replace(temporary, path)
        fsync(path.parent)

    @contextlib.contextmanager
    def lock(self, **about):
        """Locks the folder for this process; `about` describes it to other processes.

        Yields a function that adds to this description. The operating system releases
        the lock when the process ends, however it ends.

        Raises:
            ConfigError: another process holds it, or the lock cannot be written.
        """
        try:
            file = open(self.path / _LOCK, "a+")
        except OSError as error:
            raise ConfigError(
                f"the lock {self.path / _LOCK} cannot be written: {error.strerror}; "
                "choose another --workdir"
            ) from None
        with file:
            try:
                _take(file)
            except BlockingIOError:
                file.seek(0)
                holder = _parsed(file.read())
                raise ConfigError(
                    f"another process trains in {self.path}: process "
                    f"{holder.get('pid', '?')} on {holder.get('host', '?')}; wait for "
                    "it, stop it, or choose another --workdir"
                ) from None
            self._describe(file, about)
            yield lambda **more: self._describe(file, about | more)

    def _describe(self, file, about):
        file.seek(0)
        file.truncate()
        json.dump({"pid": os.getpid(), "host": socket.gethostname()} | about, file)
        file.flush()

    def holder(self) -> dict | None:
        """The description of the process that holds the lock; None if none does."""
        try:
            with open(self.path / _LOCK) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return _parsed(file.read())
        except OSError:
            pass
        return None


def fsync(path: pathlib.Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take(file):
    """The lock, or BlockingIOError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.1)  # `holder`, in another process, holds it for a moment
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _parsed(text):
    try:
        return json.loads(text)
    except ValueError:
        return {}
