"""Reports of a run: TensorBoard, small files, and `metrics.jsonl`.

`metrics.jsonl` has one JSON object per line, with strictly increasing "step". A report
that cannot be written, as on a full disk, does not end a training: one warning says so,
and the next report is tried again.
"""

import functools
import json
import math
import os
import pathlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from towers import console, store
from towers.config import parse_json
from towers.errors import RunFolderError, StuckError
from towers.messages import one_line
from towers.run.board import Board
from towers.run.folder import RunFolder

_BOARD, _METRICS = "TensorBoard", "metrics.jsonl"


class Reports:
    """The reports of a run; a context manager.

    `check` raises RunFolderError if another folder has taken the place of the run's.
    """

    metrics: "MetricsFile"

    def __init__(
        self, folder: RunFolder, writer: str, check: Callable[[], None] = lambda: None
    ):
        self._folder, self._check, self._writer = folder, check, writer
        self._first_step: Callable[[str], int | None] = lambda writer: None
        self._board = functools.cache(
            lambda writer: Board(folder.tensorboard, writer, self._first_step(writer))
        )
        # Name of a report -> number of failures since the last success.
        self._num_failed: dict[str, int] = {}

    def open_metrics(self, resume_step: int, step: int) -> None:
        """Continue `metrics.jsonl`, see `MetricsFile`, and the curves at a step."""
        self._first_step = lambda writer: (
            1 + (step if writer == self._writer else resume_step)
        )
        self.metrics = MetricsFile(self._folder.metrics, resume_step)
        self.attempt(_METRICS, self.metrics.flush)

    def record(self, record: Mapping[str, object]) -> None:
        """Write a line of `metrics.jsonl`."""
        self.metrics.append(record)
        self.attempt(_METRICS, self.metrics.flush)

    def scalars(
        self, step: int, values: Mapping[str, float | np.ndarray], writer: str = ""
    ) -> None:
        """Draw curves, see `Board`; metrics that end in _ema have their own writer."""
        writer = writer or self._writer
        for suffix in ("", "_ema"):
            curves = {
                name.removesuffix("_ema"): value
                for name, value in values.items()
                if name.endswith("_ema") == bool(suffix)
            }
            if curves:
                draw = functools.partial(Board.scalars, step=step, values=curves)
                self.on_board(draw, writer + suffix)

    def on_board(self, write: Callable[[Board], None], writer: str = "") -> None:
        """Write on the board of a writer, by default the run's."""
        board = self._board(writer or self._writer)
        self.attempt(_BOARD, lambda: write(board))

    def file(self, path: pathlib.Path, text: str) -> bool:
        """Write a small file; return whether it was written."""
        return self.attempt(path.name, lambda: store.write_aside(path, text))

    def sync(self) -> None:
        """Flush `metrics.jsonl` to the disk, before a checkpoint is committed."""
        self.attempt(_METRICS, self.metrics.sync)

    def records(self) -> list[Mapping[str, Any]]:
        """Return all readable records of `metrics.jsonl`."""
        return self.metrics.records()

    def __enter__(self) -> "Reports":
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        """Write the queue if possible, and log what is missing."""
        if isinstance(error, StuckError):  # the disk may hang
            return
        if hasattr(self, "metrics"):
            self.sync()
        for name, count in sorted(self._num_failed.items()):
            console.warn(f"{count} report(s) in {name} were not written and are lost")

    def attempt(
        self, name: str, write: Callable[[], None], errors: type[Exception] = OSError
    ) -> bool:
        """Call `write`, log its first failure and success; return if it succeeded."""
        is_queued = name == _METRICS
        try:
            self._check()
            write()
        except RunFolderError:
            return False  # the run checks the folder as well, and ends
        except errors as error:
            if name not in self._num_failed:
                space = store.free_space(self._folder.path)
                reason = one_line(getattr(error, "strerror", None) or error, 200)
                place = f"{space} in {self._folder.path}"
                console.warn(f"{name} cannot be written: {reason} ({place})")
            count = self._num_failed.get(name, 0) + 1
            self._num_failed[name] = len(self.metrics.queue) if is_queued else count
            return False
        if count := self._num_failed.pop(name, 0):
            now = "written now" if is_queued else "lost"
            console.line(f"{name} can be written again; {count} report(s) are {now}")
        return True


class NoReports(Reports):
    """The reports of a worker that is not the chief, which writes nothing."""

    def __init__(self):
        self._writer = ""

    def _do_nothing(self, *args, **kwargs):
        return False

    record = on_board = attempt = __exit__ = _do_nothing

    def records(self) -> list[Mapping[str, Any]]:
        """Return no records."""
        return []


class MetricsFile:
    """`metrics.jsonl`, with a queue of records that could not be written."""

    def __init__(self, path: pathlib.Path, resume_step: int):
        self._path, self._lock = path, threading.RLock()
        self.queue, self._is_damaged = read_metrics(path, resume_step)
        self._is_new = True  # the first flush writes the whole file

    def append(self, record: Mapping[str, object]) -> None:
        """Add a record to the queue."""
        with self._lock:
            self.queue.append(_plain(record))

    def flush(self) -> None:
        """Append the queue to the file; after an OSError it stays in the queue."""
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
        """Flush the queue and the file to the disk."""
        self.flush()
        store.sync(self._path)

    def _move_aside(self):
        aside = store.free_name(f"{self._path}.damaged")
        os.rename(self._path, aside)
        self._is_damaged = False
        console.warn(
            f"{self._path} has lines that are not records of increasing steps; it is "
            f"kept as {aside.name}, and its other lines are taken over"
        )

    def records(self) -> list[Mapping[str, Any]]:
        """Return all readable records."""
        with self._lock:
            read = [] if self._is_new else read_metrics(self._path)[0]
            return [*read, *self.queue]


def read_metrics(
    path: pathlib.Path, last_step: float = math.inf
) -> tuple[list[dict[str, Any]], bool]:
    """Return the records of a file up to a step, and whether it is damaged."""
    records: list[dict[str, Any]] = []
    is_damaged = False
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
    except OSError:
        return records, True
    return records, is_damaged


def _parsed(line):
    """Return the object of a line, or None if it lacks a "step" of at most 64 bits."""
    try:
        record = parse_json(line.decode("utf-8"))
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < 2**63 else None


def _plain(value):
    """Return a value for JSON, with None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
