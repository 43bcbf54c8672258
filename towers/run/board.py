"""TensorBoard event files; TensorFlow's own writer hides errors of the disk."""

import contextlib
import os
import pathlib
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.histogram import metadata as histogram
from tensorboard.plugins.hparams import api_pb2, summary, summary_v2
from tensorboard.plugins.image import metadata as image
from tensorboard.plugins.scalar import metadata as scalar
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.util.tensor_util import make_tensor_proto

from towers import store

NUM_BUCKETS = 30  # of a histogram

# Group -> metrics. TensorBoard opens the first groups of the alphabet.
_GROUPS = {
    "curves": ("accuracy", "loss"),
    "optimizer": (
        *("learning_rate", "gradient_norm"),
        *("total_loss", "loss_scale", "skipped_steps"),
    ),
    "speed": ("images_per_sec", "input_wait_percent"),
    "towers": ("staleness_mean", "staleness_max"),
}
TAGS = {name: f"{group}/{name}" for group, names in _GROUPS.items() for name in names}
TAGS["tower_losses"] = "towers/loss"


def tag_of(name: str, is_evaluation: bool = False) -> str | None:
    """Return the tag of a metric; None if the board does not show it."""
    if name in TAGS:
        return TAGS[name]
    if name.endswith("_tta"):
        return f"{TAGS[name.removesuffix('_tta')]}_tta"
    return None if name.startswith("epoch") or not is_evaluation else f"curves/{name}"


class Board:
    """A TensorBoard event file of one writer, such as "train", "test" or "test_ema".

    Curves of a tag share a chart. A method raises OSError if its event cannot be
    written; then no part of it is. A file begins with the start of a session at
    `first_step`, the one of a new run, too: TensorBoard's slow loader drops earlier
    events from there on, except at the first start that it reads. Its data server drops
    those of a tag from the next event on.
    """

    def __init__(self, folder: pathlib.Path, kind: str, first_step: int | None = None):
        self._folder, self._first_step = folder / kind, first_step
        self._path: pathlib.Path | None = None
        self._is_evaluation = kind != "train"

    def scalars(self, step: int, values: Mapping[str, float | np.ndarray]) -> None:
        """Write a curve per metric that has a tag, and per element of a vector."""
        curves: dict[str, float] = {}
        for name, value in values.items():
            if (tag := tag_of(name, self._is_evaluation)) is None:
                continue
            if np.ndim(value):
                curves |= {f"{tag}_{i}": x for i, x in enumerate(np.ravel(value))}
            else:
                curves[tag] = float(value)
        if curves:
            about = scalar.create_summary_metadata(None, None)
            self._append(step, ((k, np.float32(x)) for k, x in curves.items()), about)

    def histograms(
        self, step: int, values: Mapping[str, np.ndarray | tf.Tensor], group: str
    ) -> None:
        """Write a histogram per tensor."""
        about = histogram.create_summary_metadata(None, None)
        tagged = ((f"tensors/{group}/{k}", _buckets(x)) for k, x in values.items())
        self._append(step, tagged, about)

    def picture(self, step: int, name: str, pixels: np.ndarray, about: str) -> None:
        """Write a picture, uint8 [height, width, 3], with a description."""
        height, width, _ = pixels.shape
        png = tf.io.encode_png(pixels).numpy()
        value = np.array([str(width).encode(), str(height).encode(), png], object)
        metadata = image.create_summary_metadata(None, about)
        self._append(step, [(f"pictures/{name}", value)], metadata)

    def begin(self, options: Mapping[str, Any], hparams: Sequence[str]) -> None:
        """Write the options of a run as text, and some as hyperparameters."""
        rows = [f"| {name} | {value} |" for name, value in options.items()]
        table = "\n".join(["| option | value |", "| --- | --- |", *rows])
        self._append_summary(0, text_pb("config", table, "Options of the run"))
        self._append_summary(0, summary_v2.hparams_pb({n: options[n] for n in hparams}))

    def end(self) -> None:
        """Write that the run of these hyperparameters is complete."""
        self._append_summary(0, summary.session_end_pb(api_pb2.STATUS_SUCCESS))

    def _append(
        self, step: int, values: Iterable[tuple[str, Any]], about: SummaryMetadata
    ) -> None:
        content = Summary()
        for tag, value in values:
            content.value.add(tag=tag, metadata=about, tensor=make_tensor_proto(value))
        self._append_summary(step, content)

    def _append_summary(self, step, content):
        event = Event(wall_time=time.time(), step=step)
        event.summary.MergeFromString(content.SerializeToString())
        if self._path is not None:
            store.append(self._path, _as_records([event]))
            return
        events = [Event(wall_time=time.time(), file_version="brain.Event:2")]
        if self._first_step is not None:
            start = SessionLog(status=SessionLog.START)
            events.append(Event(step=self._first_step, session_log=start))
        # Parents are not created: the folder of a run that was removed stays so.
        for folder in (self._folder.parent, self._folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder)
        host = platform.node().replace(".", "-")  # see `folder` for the pattern
        name = f"events.out.tfevents.{time.time_ns()}.{host}.{os.getpid()}"
        store.append(self._folder / name, _as_records([*events, event]))
        self._path = self._folder / name


def _as_records(events):
    """Return the content of a TFRecord file, with lengths and checksums."""
    path = "ram://board"  # a file in memory
    with tf.io.TFRecordWriter(path) as writer:
        for event in events:
            writer.write(event.SerializeToString())
    with tf.io.gfile.GFile(path, "rb") as file:
        records = file.read()
    tf.io.gfile.remove(path)
    return records


def _buckets(values):
    """Return float64 [NUM_BUCKETS, 3]: edges and counts of the finite values."""
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        return np.zeros((NUM_BUCKETS, 3))
    counts, edges = np.histogram(values, NUM_BUCKETS)
    return np.stack([edges[:-1], edges[1:], counts], 1)
