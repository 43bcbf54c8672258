"""`metrics.jsonl`: one JSON object a line, with strictly increasing "step"."""

import contextlib
import itertools
import json
import math
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from towers.run import files

# Bytes of a line; a longer one is not a record.
_MOST_BYTES = 2**20


class MetricsFile:
    """The file of a run that trains.

    It is a log, and never worth ending a run: what cannot be written is kept back and
    written with the next line; a file that is damaged is moved aside. One thread may
    append while another one flushes.

    Args:
        path: of the file.
        resume_step: lines of later steps, and an incomplete last line, are dropped:
            the run takes those steps again.
        unwritten: records that the run kept back when it was stopped.
        say: takes a line for the user.

    Attributes:
        unwritten: the records that are kept back.
    """

    def __init__(
        self,
        path: pathlib.Path,
        resume_step: int,
        unwritten: Sequence[Mapping[str, Any]] = (),
        say: Callable[[str], None] = print,
    ):
        self._path, self._say = path, say
        self._descriptor, self._size = None, 0
        self._lock = threading.RLock()  # of `unwritten` and of the file's end
        records, is_damaged = read_metrics(path)
        if is_damaged:
            self._move_aside()
        last = records[-1]["step"] if records else 0
        records += [record for record in unwritten if record["step"] > last]
        self.unwritten = [r for r in records if r["step"] <= resume_step]

    def _move_aside(self):
        aside = self._path.with_name(f"{self._path.name}.damaged")
        numbered = (aside.with_name(f"{aside.name}-{i}") for i in itertools.count(2))
        paths = itertools.chain([aside], numbered)
        aside = next(path for path in paths if files.kind(path) is None)
        with contextlib.suppress(OSError):
            os.rename(self._path, aside)
        self._say(
            f"warning: {self._path} has lines that are no records of increasing steps; "
            f"it is kept as {aside.name}, and its other lines are taken over"
        )

    def append(self, record: Mapping[str, object]) -> None:
        """Writes a record and those kept back.

        Raises:
            OSError: they cannot be written now, and are kept back.
        """
        with self._lock:
            self.unwritten.append(_plain(record))
            self.flush()

    def flush(self) -> None:
        """Writes the records that are kept back; OSError as in `append`."""
        with self._lock:
            text = "".join(json.dumps(record) + "\n" for record in self.unwritten)
            if self._descriptor is None:
                files.write_text(self._path, text)
                self._descriptor = files.open_file(self._path, os.O_RDWR)
            else:
                self._write(text.encode())
            self._size += len(text)
            self.unwritten.clear()

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
        """Flushes the file to the disk, with what was kept back; OSError as in
        `append`."""
        self.flush()
        os.fsync(self._descriptor)

    def records(self) -> Iterable[Mapping[str, Any]]:
        """All records, also where the file has been moved or removed meanwhile."""
        if self._descriptor is not None:
            lines = os.pread(self._descriptor, self._size, 0).splitlines()
            yield from map(json.loads, lines)
        yield from self.unwritten

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def read_metrics(path: pathlib.Path) -> tuple[list[dict[str, Any]], bool]:
    """The records of a file, and whether it is damaged: whether it has any other lines
    than an incomplete last one, as a kill leaves it."""
    try:
        file = open(files.open_file(path, os.O_RDONLY), "rb")
    except FileNotFoundError:
        return [], False
    except OSError:
        return [], True
    records, num_others, is_torn = [], 0, False
    with file:
        while line := file.readline(_MOST_BYTES):
            is_torn = not line.endswith(b"\n")
            record = _parsed(line)
            if record and (not records or record["step"] > records[-1]["step"]):
                records.append(record)
                is_torn = False
            else:
                num_others += 1
    return records, num_others > is_torn


def _parsed(line):
    """The object of a line; None if it is no object with a step."""
    try:
        record = files.parse_json(line.decode("utf-8"))
    except ValueError:
        return None
    is_record = isinstance(record, dict) and type(record.get("step")) is int
    return record if is_record else None


def last_accuracy(path: pathlib.Path, step: int) -> float | None:
    """The accuracy of the last evaluation until a step, with the moving averages where
    there are any; None if there was none, or the file cannot be read."""
    records, _ = read_metrics(path)
    for record in reversed(records):
        for suffix in ("_averaged", ""):
            for split in ("validation", "test"):
                accuracy = record.get(f"{split}_accuracy{suffix}")
                if isinstance(accuracy, float) and record["step"] <= step:
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
