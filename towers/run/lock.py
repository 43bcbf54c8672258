"""The lock of the process that trains in a run's folder."""

import fcntl
import json
import os
import pathlib
import socket
import time

from towers.config import parse_json
from towers.errors import ConfigError, RunFolderError
from towers.run import files

_NAME = ".lock"
_MOST_BYTES = 4096


class Lock:
    """Holds the lock of a folder until it is closed; a context manager.

    The operating system releases the lock when the process ends, however it ends.

    Args:
        folder: of the run.

    Raises:
        ConfigError: another process holds the lock, or it cannot be opened.
    """

    def __init__(self, folder: pathlib.Path):
        self._path = folder / _NAME
        self._about = {"pid": os.getpid(), "host": socket.gethostname()}
        try:
            descriptor = files.open_file(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigError(
                f"the lock {self._path} cannot be opened: {error.strerror}; remove it "
                "or choose another --workdir"
            ) from None
        self._file = open(descriptor, "r+b", buffering=0)
        try:
            _take(descriptor)
        except BlockingIOError:
            with self._file:
                about = _parsed(self._file.read(_MOST_BYTES))
            raise ConfigError(
                f"another process trains in {folder}: process {about.get('pid', '?')} "
                f"on {about.get('host', '?')}; wait for it, stop it, or choose another "
                "--workdir"
            ) from None
        except OSError as error:  # such as a network file system without locks
            self._file.close()
            raise ConfigError(
                f"the lock {self._path} cannot be taken: {error.strerror}; choose a "
                "--workdir on another file system"
            ) from None
        self.describe()
        self.check()

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

    def check(self) -> None:
        """Raises RunFolderError where the folder is no longer the one that was locked:
        it was removed, moved or replaced, and perhaps another process trains there."""
        try:
            found = os.lstat(self._path)
        except OSError:
            found = None
        if found is None or not os.path.samestat(found, os.fstat(self._file.fileno())):
            raise RunFolderError(
                f"{self._path.parent} is no longer the folder that this run locked: it "
                "was removed, moved or replaced"
            )

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()


def holder(folder: pathlib.Path) -> dict | None:
    """The description of the process that holds the lock of a folder; None if none
    does."""
    try:
        with open(files.open_file(folder / _NAME, os.O_RDONLY), "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _parsed(file.read(_MOST_BYTES))
    except OSError:
        pass
    return None


def _take(descriptor):
    """The lock, or BlockingIOError."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.1)  # `holder`, in another process, holds it for a moment
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _parsed(content):
    try:
        about = parse_json(content)
    except ValueError:
        about = None
    return about if isinstance(about, dict) else {}
