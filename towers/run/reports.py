"""What a run reports while it trains: TensorBoard, `metrics.jsonl`, small files.

A report that cannot be written, because the disk is full, say, does not end a training.
One warning says so; the next report is tried again.
"""

import pathlib
from collections.abc import Callable, Collection, Mapping

import numpy as np
import tensorflow as tf

from towers import store
from towers.errors import RunFolderError, StuckError, one_line
from towers.output import say
from towers.run.board import Board
from towers.run.folder import RunFolder
from towers.run.metrics import MetricsFile


class Reports:
    """The reports of a run; a context manager.

    Args:
        folder: of the run.
        kind: of its curves on the board, "train" or "eval".
        say: takes a line for the user.
        check: called before each report; where it raises a RunFolderError, another
            folder stands in the place of the run's, and nothing is written there.

    Attributes:
        metrics: `metrics.jsonl`; None until it is opened.
        kept_steps: of records that are in the last checkpoint, as they cannot be
            written.
    """

    def __init__(
        self,
        folder: RunFolder,
        kind: str,
        say: Callable[[str], None] = say,
        check: Callable[[], None] = lambda: None,
    ):
        self._folder, self._say, self._check = folder, say, check
        self._board = Board(folder.tensorboard, kind)
        self._num_failed = {}  # name -> number of reports since the last success
        self.metrics: MetricsFile | None = None
        self.kept_steps: Collection[int] = ()

    def open_metrics(self, resume_step: int, unwritten: list[dict]) -> None:
        """Continues `metrics.jsonl`, see `MetricsFile`."""
        path = self._folder.metrics
        self.metrics = MetricsFile(path, resume_step, unwritten, self._say)
        self.kept_steps = {record["step"] for record in self.metrics.unwritten}
        self._attempt(path.name, self.metrics.flush)

    def record(self, record: Mapping[str, object]) -> None:
        """A line of `metrics.jsonl`."""
        self.metrics.append(record)
        self._attempt(self._folder.metrics.name, self.metrics.flush)

    def scalars(self, step: int, values: Mapping[str, float | np.ndarray]) -> None:
        """Curves, see `Board`."""
        self._attempt("TensorBoard", lambda: self._board.scalars(step, values))

    def histograms(
        self, step: int, values: Mapping[str, np.ndarray | tf.Tensor], group: str
    ) -> None:
        """Histograms, see `Board`."""
        self._attempt(
            "TensorBoard", lambda: self._board.histograms(step, values, group)
        )

    def images(self, step: int, images: tf.Tensor, name: str) -> None:
        """Images, see `Board`."""
        self._attempt("TensorBoard", lambda: self._board.images(step, images, name))

    def file(self, path: pathlib.Path, text: str) -> None:
        """Writes a small file."""
        self._attempt(path.name, lambda: store.write_aside(path, text))

    def sync(self) -> None:
        """Flushes `metrics.jsonl` to the disk, before a checkpoint is committed."""
        self._attempt(self._folder.metrics.name, self.metrics.sync)

    def records(self) -> list[Mapping[str, object]]:
        """All records of `metrics.jsonl`; none, with a warning, where it cannot be
        read."""
        try:
            return self.metrics.records()
        except OSError as error:
            reason = one_line(error.strerror or error, 200)
            self._say(f"warning: {self._folder.metrics.name} cannot be read: {reason}")
            return []

    def __enter__(self) -> "Reports":
        return self

    def __exit__(self, error_type, error, traceback) -> None:
        """Tries once more to write what is kept back, and says what is missing."""
        if isinstance(error, StuckError):  # perhaps it is the disk that hangs
            return
        if self.metrics is not None:
            self.sync()
            self.metrics.close()
        for name, count in sorted(self._num_failed.items()):
            num_kept = self._num_kept() if self._is_metrics(name) else 0
            what = f"{count} report(s) in {name} were not written"
            if num_kept:
                what += f"; {num_kept} of them are kept in the last checkpoint"
            if num_kept < count:
                what += f": {count - num_kept} lost"
            self._say(f"warning: {what}")

    def _is_metrics(self, name):
        return name == self._folder.metrics.name

    def _num_kept(self):
        return sum(r["step"] in self.kept_steps for r in self.metrics.unwritten)

    def _attempt(self, name, write):
        """Writes; says where that begins to fail, and to succeed again."""
        try:
            self._check()
            write()
        except RunFolderError:
            return  # the run checks the folder as well, and ends
        except OSError as error:
            if name not in self._num_failed:
                free = store.free_space(self._folder.path)
                reason = one_line(error.strerror or error, 200)
                self._say(
                    f"warning: {name} cannot be written: {reason} ({free} in "
                    f"{self._folder.path})"
                )
            self._num_failed[name] = self._num_failed.get(name, 0) + 1
            if self._is_metrics(name):
                self._num_failed[name] = len(self.metrics.unwritten)
            return
        num_failed = self._num_failed.pop(name, 0)
        if num_failed:
            kept = "written now" if self._is_metrics(name) else "lost"
            self._say(f"{name} can be written again; {num_failed} report(s) are {kept}")


class NoReports(Reports):
    """The reports of a worker that is not the chief, which writes nothing."""

    def __init__(self):
        self.metrics = None

    def open_metrics(self, resume_step, unwritten):
        pass

    def record(self, record):
        pass

    def scalars(self, step, values):
        pass

    def histograms(self, step, values, group):
        pass

    def images(self, step, images, name):
        pass

    def file(self, path, text):
        pass

    def records(self):
        return []
