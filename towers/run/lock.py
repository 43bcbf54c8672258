"""The lock of the process that trains in a run's folder."""

import errno
import fcntl
import json
import os
import pathlib
import socket
import time
from collections.abc import Mapping
from typing import Any

from towers import console
from towers.config import parse_json
from towers.errors import ConfigError, RunFolderError, WorkerLostError, one_line

_NAME = ".lock"
_MOST_BYTES = 4096
HINT = "wait for it, stop it, or choose another --workdir"
_GONE = errno.ENOENT, errno.ENOTDIR, errno.ESTALE


class Lock:
    """Holds the lock of a folder until it is closed; a context manager.

    The operating system releases the lock when the process ends, however it ends.

    Args:
        folder: of the run.
        wait_secs: so long it waits for a process that holds the lock.
        is_new: whether the folder is removed again where nothing is written to it.

    Raises:
        ConfigError: another process holds the lock, or it cannot be opened.
        WorkerLostError: another process holds the lock, after a wait: perhaps its
            machine is lost, and a network file system keeps the lock for longer.
    """

    def __init__(
        self, folder: pathlib.Path, wait_secs: float = 0.0, is_new: bool = False
    ):
        self._path, self._is_new = folder / _NAME, is_new
        self._about = {"pid": os.getpid(), "host": socket.gethostname()}
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"the lock {self._path} cannot be opened: {error.strerror}; remove it "
                "or choose another --workdir"
            ) from None
        self._file = open(descriptor, "r+b", buffering=0)
        try:
            self._take(wait_secs)
            self.describe()
            self.assert_same_folder()
        except BaseException:
            self._file.close()
            raise

    def _take(self, wait_secs):
        begun, is_announced = time.monotonic(), False
        while not self._try_to_take():
            about = _parsed(os.pread(self._file.fileno(), _MOST_BYTES, 0))
            line = busy(self._path.parent, about)
            if not wait_secs:
                raise ConfigError(f"{line}; {HINT}")
            if time.monotonic() - begun >= wait_secs:
                raise WorkerLostError(
                    f"{line}, and has not ended within {wait_secs:g} s; {HINT}"
                )
            if not is_announced:
                console.line(
                    one_line(f"{line}; waiting for its lock, up to {wait_secs:g} s")
                )
                is_announced = True

    def _try_to_take(self):
        """Tries for 0.1 s to take the lock; True on success."""
        for delay_secs in (0.1, 0.0):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                # `holder`, in another process, holds it for a moment.
                time.sleep(delay_secs)
            except OSError as error:  # such as a network file system without locks
                raise ConfigError(
                    f"the lock {self._path} cannot be taken: {error.strerror}; choose "
                    "a --workdir on another file system"
                ) from None
        return False

    def describe(self, **more: str) -> None:
        """Adds to the description of this process, see `holder`. It only informs: a
        full disk is no error."""
        self._about |= more
        try:
            self._file.seek(0)
            self._file.truncate()
            self._file.write(json.dumps(self._about).encode())
        except OSError:
            pass

    def assert_same_folder(self) -> None:
        """Raises RunFolderError where the folder is no longer the one that was locked:
        it was removed, moved or replaced, and perhaps another process trains there.

        Other errors of the disk are ignored: the next call may succeed, and a save
            fails with its own error."""
        try:
            own = os.fstat(self._file.fileno())
            is_in_place = os.path.samestat(os.stat(self._path), own)
        except OSError as error:
            is_in_place = error.errno not in _GONE
        if not is_in_place:
            raise RunFolderError(
                f"{self._path.parent} is no longer the folder that this run locked: it "
                "was removed, moved or replaced; put it back, and the same command "
                "continues"
            )

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_) -> None:
        folder = self._path.parent
        try:
            if self._is_new and os.listdir(folder) == [_NAME]:  # a failed start
                self._path.unlink()
                folder.rmdir()
        except OSError:
            pass
        self._file.close()


def holder(folder: pathlib.Path) -> dict | None:
    """The description of the process that holds the lock of a folder; None if none
    does."""
    try:
        with open(folder / _NAME, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _parsed(file.read(_MOST_BYTES))
    except OSError:
        pass
    return None


def busy(folder: pathlib.Path, about: Mapping[str, Any]) -> str:
    """Names the process that holds the lock of a folder, by its description."""
    return (
        f"another process trains in {folder}: process {about.get('pid', '?')} on "
        f"{about.get('host', '?')}"
    )


def _parsed(content):
    try:
        about = parse_json(content)
    except ValueError:
        about = None
    return about if isinstance(about, dict) else {}
