"""`metrics.jsonl`: one JSON object a line, with strictly increasing "step"."""

import contextlib
import itertools
import json
import math
import os
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from towers import store
from towers.config import parse_json

# Bytes of a line; a longer one is not a record.
_MOST_BYTES = 2**20

# Lines that are no records, after which a file is read no further: it may have any
# length where nothing was ever written, and costs 4 s a gigabyte.
_MOST_OTHERS = 1000

# Records that are in memory until they are flushed to the disk.
_MOST_UNSYNCED = 1000


class MetricsFile:
    """The file of a run that trains.

    It is a log, and never worth ending a run: what cannot be written is kept back and
    written with the next line; a file that is damaged is moved aside, one that is
    removed, replaced or cut short meanwhile is written anew. One thread may append
    while another one flushes.

    Args:
        path: of the file.
        resume_step: lines of later steps, and an incomplete last line, are dropped:
            the run takes those steps again.
        unwritten: records that the run kept back when it was stopped.
        say: takes a line for the user.

    Attributes:
        unwritten: the records that are kept back, in their order.
    """

    def __init__(
        self,
        path: pathlib.Path,
        resume_step: int,
        unwritten: Sequence[Mapping[str, Any]] = (),
        say: Callable[[str], None] = print,
    ):
        self._path, self._say = path, say
        self._lock = threading.RLock()  # of all that follows
        self._descriptor, self._size = None, 0
        self._unsynced = []  # records in the file that may not be on the disk yet
        self.unwritten, self._is_damaged = read_metrics(path, resume_step)
        last = self.unwritten[-1]["step"] if self.unwritten else 0
        self.unwritten += [r for r in unwritten if last < r["step"] <= resume_step]

    def _move_aside(self):
        aside = self._path.with_name(f"{self._path.name}.damaged")
        numbered = (aside.with_name(f"{aside.name}-{i}") for i in itertools.count(2))
        paths = itertools.chain([aside], numbered)
        aside = next(path for path in paths if not os.path.lexists(path))
        os.rename(self._path, aside)
        self._is_damaged = False
        self._say(
            f"warning: {self._path} has lines that are no records of increasing steps; "
            f"it is kept as {aside.name}, and its other lines, up to {_MOST_OTHERS:,} "
            "such, are taken over"
        )

    def append(self, record: Mapping[str, object]) -> None:
        """Adds a record, which is kept back until the next `flush`."""
        with self._lock:
            self.unwritten.append(_plain(record))

    def flush(self) -> None:
        """Writes the records that are kept back.

        Raises:
            OSError: they cannot be written now, and stay kept back.
        """
        self._flush()
        if len(self._unsynced) > _MOST_UNSYNCED:
            self.sync()

    def _flush(self):
        with self._lock:
            if self._is_damaged:
                self._move_aside()
            is_lost = self._descriptor is not None and not self._is_in_place()
            if is_lost:
                self.unwritten = self.records()
                self._size, self._unsynced = 0, []
                self.close()
            content = _lines(self.unwritten)
            if self._descriptor is None:
                store.write_aside(self._path, content)
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            else:
                self._write(content)
                self._unsynced += self.unwritten
            self._size += len(content)
            self.unwritten = []
        if is_lost:
            self._say(
                f"warning: {self._path} was removed, replaced or cut short by something"
                " else; what could be read of it was written anew"
            )

    def _is_in_place(self):
        """Whether the open file is still the one with that name, and whole."""
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            return False
        is_same = os.path.samestat(found, os.fstat(self._descriptor))
        return is_same and found.st_size >= self._size

    def _write(self, content):
        """All of it or nothing."""
        written = 0
        try:
            while written < len(content):
                place = self._size + written
                written += os.pwrite(self._descriptor, content[written:], place)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise

    def sync(self) -> None:
        """Flushes the file to the disk, with what was kept back; OSError as in `flush`.

        Others may append and flush meanwhile: a slow disk does not hold them up.
        """
        with self._lock:
            self._flush()
            unsynced, num_records = self._unsynced, len(self._unsynced)
            descriptor = os.dup(self._descriptor)
        try:
            os.fsync(descriptor)
        except OSError:
            with self._lock:
                if unsynced is self._unsynced:  # else the file was written anew
                    # The next fsync would succeed, though the content is lost.
                    self.unwritten = unsynced + self.unwritten
                    self._size -= len(_lines(unsynced))
                    self._unsynced = []
            raise
        finally:
            os.close(descriptor)
        with self._lock:
            del unsynced[:num_records]

    def kept_back(self, step: int) -> list[Mapping[str, Any]]:
        """The records until a step that are kept back."""
        with self._lock:
            return [record for record in self.unwritten if record["step"] <= step]

    def records(self) -> list[Mapping[str, Any]]:
        """All records, also where the file has been moved or removed meanwhile, or has
        got lines that are none; of a file that was cut short, those that are left.

        Raises:
            OSError: the file cannot be read.
        """
        with self._lock:
            lines = []
            if self._descriptor is not None:
                lines = os.pread(self._descriptor, self._size, 0).splitlines()
            found = filter(None, map(_parsed, lines))
            in_memory = [*self._unsynced, *self.unwritten]
            by_step = {record["step"]: record for record in (*found, *in_memory)}
            return [by_step[step] for step in sorted(by_step)]

    def close(self) -> None:
        """Closes the file. An error says nothing that `sync` has not said: a network
        file system may report here that the disk is full."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def read_metrics(
    path: pathlib.Path, last_step: float = math.inf
) -> tuple[list[dict[str, Any]], bool]:
    """The records of a file, and whether it is damaged: whether it has any other lines
    than an incomplete last one, as a kill leaves it, or cannot be read to its end.
    Behind _MOST_OTHERS such lines it is not read.

    Args:
        path: of the file.
        last_step: records of later steps are ignored, wherever they stand.
    """
    records, num_others, is_torn = [], 0, False
    try:
        with open(path, "rb") as file:
            while num_others < _MOST_OTHERS and (line := file.readline(_MOST_BYTES)):
                record = _parsed(line)
                is_torn = record is None and not line.endswith(b"\n")
                if record and record["step"] > last_step:
                    continue
                if record and (not records or record["step"] > records[-1]["step"]):
                    records.append(record)
                else:
                    num_others += 1
    except FileNotFoundError:
        return [], False
    except OSError:  # also of the disk, anywhere in the file
        return records, True
    return records, num_others > is_torn


def _parsed(line):
    """The object of a line; None if it is no object with a step, which is an int64."""
    try:
        record = parse_json(line.decode("utf-8"))
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < 2**63 else None


def last_accuracy(path: pathlib.Path, step: int) -> float | None:
    """The accuracy of the last evaluation until a step, with the moving averages where
    there are any; None if there was none, or the file cannot be read."""
    records, _ = read_metrics(path, step)
    for record in reversed(records):
        for suffix in ("_ema", "_averaged", ""):  # the second by former versions
            for split in ("validation", "test"):
                accuracy = record.get(f"{split}_accuracy{suffix}")
                if isinstance(accuracy, float):
                    return accuracy
    return None


def _plain(value):
    """The value as JSON holds it, which has only finite numbers."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    is_number = isinstance(value, float)
    return None if is_number and not math.isfinite(value) else value
