"""`metrics.jsonl`: one JSON object a line, with strictly increasing "step"."""

import itertools
import json
import math
import os
import pathlib
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from towers import console, store
from towers.config import parse_json


class MetricsFile:
    """The file of a run that trains.

    Records that cannot be written wait in a queue, and are written with the next ones.
    One thread may append while another one syncs.

    Args:
        path: of the file.
        resume_step: lines of later steps, and an incomplete last line, are dropped:
            the run takes those steps again.

    Attributes:
        queue: records that are not in the file yet.
    """

    def __init__(self, path: pathlib.Path, resume_step: int):
        self._path, self._lock = path, threading.RLock()
        self.queue, self._is_damaged = read_metrics(path, resume_step)
        self._is_new = True  # the file is to be written as a whole

    def append(self, record: Mapping[str, object]) -> None:
        """Adds a record to the queue."""
        with self._lock:
            self.queue.append(_plain(record))

    def flush(self) -> None:
        """Appends the queue to the file. OSError where it stays in the queue."""
        with self._lock:
            if self._is_damaged:
                self._move_aside()
            content = "".join(f"{json.dumps(record)}\n" for record in self.queue)
            if self._is_new:
                store.write_aside(self._path, content)
            else:
                store.append(self._path, content.encode())
            self.queue, self._is_new = [], False

    def sync(self) -> None:
        """Flushes the queue and the file to the disk; OSError as in `flush`. Others may
        append meanwhile: a slow disk does not hold them up."""
        self.flush()
        store.sync(self._path)

    def _move_aside(self):
        suffixes = itertools.chain([""], (f"-{i}" for i in itertools.count(2)))
        names = (f"{self._path.name}.damaged{suffix}" for suffix in suffixes)
        paths = map(self._path.with_name, names)
        aside = next(path for path in paths if not os.path.lexists(path))
        os.rename(self._path, aside)
        self._is_damaged = False
        console.warn(
            f"{self._path} has lines that are no records of increasing steps; it is "
            f"kept as {aside.name}, and its other lines are taken over"
        )

    def records(self) -> list[Mapping[str, Any]]:
        """All records, as far as the file can be read."""
        with self._lock:
            read = [] if self._is_new else read_metrics(self._path)[0]
            return [*read, *self.queue]


def read_metrics(
    path: pathlib.Path, last_step: float = math.inf
) -> tuple[list[dict[str, Any]], bool]:
    """The records of a file, and whether it is damaged: whether it has any other lines
    than an incomplete last one, as a kill leaves it, or cannot be read to its end.

    Args:
        path: of the file.
        last_step: records of later steps are ignored, wherever they stand.
    """
    records, is_damaged = [], False
    try:
        with open(path, "rb") as file:
            for line in file:
                record = _parsed(line)
                if record is None:
                    is_damaged |= line.endswith(b"\n")
                elif record["step"] > last_step:
                    continue
                elif not records or record["step"] > records[-1]["step"]:
                    records.append(record)
                else:
                    is_damaged = True
    except FileNotFoundError:
        return [], False
    except OSError:  # also of the disk, anywhere in the file
        return records, True
    return records, is_damaged


def _parsed(line):
    """The object of a line; None if it is no object with a step, which is an int64."""
    try:
        record = parse_json(line.decode("utf-8"))
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < 2**63 else None


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
