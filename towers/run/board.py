"""TensorBoard event files."""

import contextlib
import math
import os
import pathlib
import platform
import time
from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
from tensorboard.plugins.histogram import metadata as histogram
from tensorboard.plugins.image import metadata as image
from tensorboard.plugins.scalar import metadata as scalar
from tensorboard.util.tensor_util import make_tensor_proto

from towers import store

NUM_BUCKETS = 30  # of a histogram

# A name of a curve, how TensorBoard shows it, and its value.
Value = tuple[str, SummaryMetadata, np.ndarray]


class Board:
    """A TensorBoard event file of one kind, "train" or "eval".

    All methods raise an OSError where an event cannot be written; then nothing of it
    is.

    Args:
        folder: TensorBoard's `--logdir`, in a run's folder.
        kind: the name of the curves there.
    """

    def __init__(self, folder: pathlib.Path, kind: str):
        name = f"events.out.tfevents.{time.time():.0f}.{platform.node()}.{os.getpid()}"
        self._path = folder / kind / name
        self._is_new = True

    def scalars(self, step: int, values: Mapping[str, float | np.ndarray]) -> None:
        """A curve per value; a vector gives one per element, "loss/tower_2"."""
        curves = {}
        for name, value in values.items():
            if np.ndim(value) == 0:
                curves[name] = value
            else:
                curves |= {f"{name}/tower_{i}": x for i, x in enumerate(value)}
        about = scalar.create_summary_metadata(None, None)
        self._append(
            step, ((k, about, np.asarray(x, np.float32)) for k, x in curves.items())
        )

    def histograms(
        self, step: int, values: Mapping[str, np.ndarray | tf.Tensor], group: str
    ) -> None:
        about = histogram.create_summary_metadata(None, None)
        self._append(
            step, ((f"{group}/{k}", about, _buckets(x)) for k, x in values.items())
        )

    def images(self, step: int, images: tf.Tensor, name: str) -> None:
        """The first 64 images of a batch, float [n, h, w, 1 or 3], side by side."""
        pixels = np.round(255 * image_grid(images.numpy())).astype(np.uint8)
        height, width, _ = pixels.shape
        png = tf.io.encode_png(pixels).numpy()
        value = np.array([str(width).encode(), str(height).encode(), png], object)
        about = image.create_summary_metadata(None, None)
        self._append(step, [(name, about, value)])

    def _append(self, step: int, values: Iterable[Value]) -> None:
        """Appends an event with some values."""
        event = Event(wall_time=time.time(), step=step)
        for name, about, value in values:
            event.summary.value.add(
                tag=name, metadata=about, tensor=make_tensor_proto(value)
            )
        events = [event]
        if self._is_new:
            events.insert(0, Event(wall_time=time.time(), file_version="brain.Event:2"))
            # Not with all folders above: a run's folder that was removed stays so.
            for folder in (self._path.parent.parent, self._path.parent):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder)
        store.append(self._path, _as_records(events))
        self._is_new = False


def _as_records(events):
    """The bytes of a TFRecord file, with lengths and checksums."""
    path = "ram://board"  # a file in memory
    with tf.io.TFRecordWriter(path) as writer:
        for event in events:
            writer.write(event.SerializeToString())
    with tf.io.gfile.GFile(path, "rb") as file:
        records = file.read()
    tf.io.gfile.remove(path)
    return records


def _buckets(values):
    """float64 [NUM_BUCKETS, 3]: left and right edges and counts of the finite values;
    zeros where there is none."""
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        return np.zeros((NUM_BUCKETS, 3))
    counts, edges = np.histogram(values, NUM_BUCKETS)
    return np.stack([edges[:-1], edges[1:], counts], 1)


def image_grid(images: np.ndarray, most: int = 64) -> np.ndarray:
    """Images next to each other, each stretched to the range [0, 1].

    Args:
        images: floats [n, height, width, channels].
        most: images beyond this number are left out.

    Returns:
        float32 [rows * height, columns * width, channels] in [0, 1].
    """
    images = images[:most].astype(np.float32)
    n, height, width, channels = images.shape
    low = images.min(axis=(1, 2, 3), keepdims=True)
    high = images.max(axis=(1, 2, 3), keepdims=True)
    images = (images - low) / np.maximum(high - low, 1e-6)
    columns = math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    grid = np.zeros((rows * columns, height, width, channels), np.float32)
    grid[:n] = images
    grid = grid.reshape(rows, columns, height, width, channels)
    return grid.swapaxes(1, 2).reshape(rows * height, columns * width, channels)
