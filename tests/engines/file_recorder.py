"""The file operations of code that runs in this process, in order, for `disk.Disk`."""

import contextlib
import os
import pathlib
import random
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from engines.disk import Disk, Tree, read_tree

# A method of `disk.Disk` and its arguments, or ("said", what).
Operation = tuple

# Before these the interpreter calls `_before`, see `sys.audit`.
EVENTS = {"open", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link"}


class Recorder:
    """A context manager that records what happens below a folder.

    Renames and fsyncs are patched in `os`; nothing is really synced. Other changes,
    also of TensorFlow, are found by comparing the files before each operation of
    Python. Folders named in `leave_out` are not recorded.
    """

    def __init__(self, root: pathlib.Path, leave_out: tuple[str, ...] = ()):
        self.operations: list[Operation] = []
        self._root, self._leave_out = str(root), leave_out
        self._lock, self._is_observing = threading.RLock(), False
        self._patch = pytest.MonkeyPatch()
        self._known = self._read()

    def say(self, what: object) -> None:
        """Record what the code has promised by now."""
        with self._observed():
            self.operations.append(("said", what))

    def observe(self) -> None:
        with self._observed():
            pass

    def __enter__(self) -> "Recorder":
        for name in ("rename", "replace"):
            self._patch.setattr(os, name, self._renaming(getattr(os, name)))
        for name in ("fsync", "fdatasync"):
            self._patch.setattr(os, name, self._sync, raising=False)
        _RECORDERS.append(self)
        return self

    def __exit__(self, *_) -> None:
        _RECORDERS.remove(self)
        self._patch.undo()
        self.observe()

    def _renaming(self, rename):
        def renaming(old, new, **folders):
            with self._observed():
                rename(old, new, **folders)
                old, new = map(self._relative, (old, new))
                if old and new:
                    self.operations.append(("rename", old, new))
                    self._known = self._read()

        return renaming

    def _sync(self, descriptor):
        with self._observed():
            status = os.fstat(descriptor)
            for path in ("", *self._known):
                if os.path.samestat(status, os.stat(f"{self._root}/{path}")):
                    self.operations.append(("sync", path))

    @contextlib.contextmanager
    def _observed(self) -> Iterator[None]:
        """Record how the files differ from the known ones, one thread at a time."""
        with self._lock:
            if self._is_observing:  # reading the files is observed, too
                yield
                return
            self._is_observing = True
            try:
                self._record(self._read())
                yield
            finally:
                self._is_observing = False

    def _record(self, tree):
        for path in sorted(self._known.keys() - tree.keys(), reverse=True):
            self.operations.append(("remove", path))
        for path, content in tree.items():
            if path not in self._known:
                kind = "mkdir" if content is None else "create"
                self.operations.append((kind, path))
            if content is not None and content != self._known.get(path, b""):
                self.operations.append(("write", path, content))
        self._known = tree

    def _read(self):
        tree = read_tree(pathlib.Path(self._root))
        left_out = set(self._leave_out)
        return {k: v for k, v in tree.items() if not left_out & set(k.split("/"))}

    def _relative(self, path):
        path = os.path.abspath(os.fspath(path))
        below = path.startswith(f"{self._root}/")
        return path.removeprefix(f"{self._root}/") if below else None


_RECORDERS: list[Recorder] = []


def _before(event, args):
    if event in EVENTS:
        for recorder in _RECORDERS:
            recorder.observe()


sys.addaudithook(_before)


def crash_states(
    folder: pathlib.Path, act: Callable[[], object], most: int
) -> Iterator[list[Tree]]:
    """Yield what a power cut may leave before each file operation, and after all.

    The first state is what a kill leaves; `most` as of `Disk.crash_states`.
    """
    disk, before = Disk(), read_tree(folder)
    for path, content in before.items():
        disk.mkdir(path) if content is None else disk.create(path)
        if content is not None:
            disk.write(path, content)
    for path in (*before, ""):
        disk.sync(path)
    with Recorder(folder) as recorder:
        act()
    for kind, *args in [*recorder.operations, ("sync", "")]:
        yield list(disk.crash_states(random.Random(0), most))
        getattr(disk, kind)(*args)
