"""Reports of a run while it trains: TensorBoard, `metrics.jsonl`, small files.

A report that cannot be written, as on a full disk, does not end a training. One warning
says so; the next report is tried again.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers import console, store
from towers.errors import RunFolderError, StuckError, one_line
from towers.reporting.board import Board
from towers.run.folder import RunFolder
from towers.run.metrics import MetricsFile

_BOARD, _METRICS = "TensorBoard", "metrics.jsonl"


class Reports:
    """The reports of a run; a context manager.

    Args:
        folder: of the run.
        writer: of its curves on the board, "train" or "eval".
        check: called before each report; where it raises a RunFolderError, another
            folder stands in the place of the run's, and nothing is written there.

    Attributes:
        metrics: `metrics.jsonl`; None until it is opened.
    """

    def __init__(
        self, folder: RunFolder, writer: str, check: Callable[[], None] = lambda: None
    ):
        self._folder, self._check = folder, check
        self._first_step = lambda writer: None
        self._board = functools.cache(
            lambda writer: Board(folder.tensorboard, writer, self._first_step(writer))
        )
        self._writer = writer
        self._num_failed = {}  # name -> number of reports since the last success
        self.metrics: MetricsFile | None = None

    def open_metrics(self, resume_step: int, step: int | None = None) -> None:
        """Continues `metrics.jsonl`, see `MetricsFile`, and the curves.

        Args:
            step: that the run continues from, by default `resume_step`; a step that is
                evaluated once more has its training curves already.
        """
        step = resume_step if step is None else step
        self._first_step = lambda writer: (
            1 + (step if writer == self._writer else resume_step)
        )
        self.metrics = MetricsFile(self._folder.metrics, resume_step)
        self.attempt(_METRICS, self.metrics.flush)

    def record(self, record: Mapping[str, object]) -> None:
        """A line of `metrics.jsonl`."""
        self.metrics.append(record)
        self.attempt(_METRICS, self.metrics.flush)

    def scalars(
        self, step: int, values: Mapping[str, float | np.ndarray], writer: str = ""
    ) -> None:
        """Curves, see `Board`."""
        board = self._board(writer or self._writer)
        self.attempt(_BOARD, lambda: board.scalars(step, values))

    def histograms(
        self, step: int, values: Mapping[str, np.ndarray | tf.Tensor], group: str
    ) -> None:
        """Histograms, see `Board`."""
        board = self._board(self._writer)
        self.attempt(_BOARD, lambda: board.histograms(step, values, group))

    def picture(
        self,
        step: int,
        name: str,
        draw: Callable[[], np.ndarray],
        about: str,
        writer: str = "",
    ) -> None:
        """A picture, see `Board`; `draw` gives it."""
        board = self._board(writer or self._writer)
        self.attempt(_BOARD, lambda: board.picture(step, name, draw(), about))

    def begin(
        self, writer: str, options: Mapping[str, Any], hparams: Sequence[str]
    ) -> None:
        """The options of the run, see `Board`."""
        self.attempt(_BOARD, lambda: self._board(writer).begin(options, hparams))

    def end(self, writer: str) -> None:
        """The run is complete, see `Board`."""
        self.attempt(_BOARD, lambda: self._board(writer).end())

    def file(self, path: pathlib.Path, text: str) -> bool:
        """Writes a small file; returns whether it was written."""
        return self.attempt(path.name, lambda: store.write_aside(path, text))

    def sync(self) -> None:
        """Flushes `metrics.jsonl` to the disk, before a checkpoint is committed."""
        self.attempt(_METRICS, self.metrics.sync)

    def records(self) -> list[Mapping[str, Any]]:
        """All records of `metrics.jsonl`, as far as it can be read."""
        return self.metrics.records()

    def __enter__(self) -> "Reports":
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        """Tries once more to write the queue, and says what is missing."""
        if isinstance(error, StuckError):  # perhaps it is the disk that hangs
            return
        if self.metrics is not None:
            self.sync()
        for name, count in sorted(self._num_failed.items()):
            console.warn(f"{count} report(s) in {name} were not written and are lost")

    def attempt(
        self, name: str, write: Callable[[], None], errors: type[Exception] = OSError
    ) -> bool:
        """Writes; says where that begins to fail, and to succeed again. Returns whether
        it succeeded.

        Args:
            name: of what is written.
            write: raises one of `errors` where that fails.
        """
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
                where = f"{space} in {self._folder.path}"
                console.warn(f"{name} cannot be written: {reason} ({where})")
            num_failed = self._num_failed.get(name, 0) + 1
            self._num_failed[name] = (
                len(self.metrics.queue) if is_queued else num_failed
            )
            return False
        if num_failed := self._num_failed.pop(name, 0):
            now = "written now" if is_queued else "lost"
            console.line(
                f"{name} can be written again; {num_failed} report(s) are {now}"
            )
        return True


class NoReports(Reports):
    """The reports of a worker that is not the chief, which writes nothing."""

    def __init__(self):
        self._writer, self._board = "", lambda writer: None
        self._num_failed, self.metrics = {}, None

    def record(self, record):
        pass

    def records(self):
        return []

    def attempt(self, name, write, errors=OSError):
        return False
