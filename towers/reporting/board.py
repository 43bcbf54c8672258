"""TensorBoard event files, and their pictures, which Pillow draws."""

import contextlib
import itertools
import math
import os
import pathlib
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw, ImageFont
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
from tensorboard.plugins.histogram import metadata as histogram
from tensorboard.plugins.hparams import api_pb2, summary, summary_v2
from tensorboard.plugins.image import metadata as image
from tensorboard.plugins.scalar import metadata as scalar
from tensorboard.plugins.text import metadata as text
from tensorboard.util.tensor_util import make_tensor_proto

from towers import store

NUM_BUCKETS = 30  # of a histogram

MAX_IMAGES = 16  # of a picture

# A tag, how TensorBoard shows it, and its value.
Value = tuple[str, SummaryMetadata, np.ndarray]

# Name of a metric -> its tag and description. TensorBoard opens the first groups of the
# alphabet. A suffix of a name stays: accuracy_tta.
TAGS = {
    "accuracy": ("curves/accuracy", "Share of correct predictions"),
    "loss": ("curves/loss", "Mean loss, without weight decay"),
    "map": ("curves/map", "Mean average precision over the classes"),
    "macro_f1": ("curves/macro_f1", "Mean F1 over the classes"),
    "learning_rate": ("optimizer/learning_rate", "Learning rate of the last step"),
    "gradient_norm": (
        "optimizer/gradient_norm",
        "Global norm of the mean gradient, before clipping",
    ),
    "total_loss": ("optimizer/total_loss", "Loss of the batch with weight decay"),
    "loss_scale": ("optimizer/loss_scale", "Factor on the loss in float16"),
    "skipped_steps": ("optimizer/skipped_steps", "Steps so far that were not finite"),
    "images_per_sec": ("speed/images_per_sec", "Images trained on a second"),
    "input_wait_percent": (
        "speed/input_wait_percent",
        "Share of the time in which the towers waited for their batches",
    ),
    "tower_losses": ("towers/loss", "Loss of the images of one tower"),
    "staleness_mean": (
        "towers/staleness_mean",
        "Updates by others between the fetch and the update of a tower, mean",
    ),
    "staleness_max": ("towers/staleness_max", "The same, the most"),
}


def tag_of(name: str, is_evaluation: bool = False) -> tuple[str, str] | None:
    """Return tag and description of a metric; None if the board lacks it."""
    if name in TAGS:
        return TAGS[name]
    if name.endswith("_tta"):
        tag, description = TAGS[name.removesuffix("_tta")]
        return f"{tag}_tta", f"{description}, with test-time augmentation"
    if is_evaluation and not name.startswith("epoch"):
        return f"curves/{name}", "Metric of --best_by"
    return None


class Board:
    """A TensorBoard event file of one writer, such as "train", "test" or "test_ema", so
    that curves of a tag share a chart. OSError if an event cannot be written; then
    nothing of it is. Readers drop its earlier events from `first_step` on, which are
    written again.
    """

    def __init__(self, folder: pathlib.Path, kind: str, first_step: int | None = None):
        self._folder, self._path = folder / kind, None
        self._first_step, self._is_new = first_step, True
        self._is_evaluation = kind != "train"

    def scalars(self, step: int, values: Mapping[str, float | np.ndarray]) -> None:
        """Write a curve per value that has a tag, and per element of a vector."""
        curves = []
        for name, value in values.items():
            if tag := tag_of(name, self._is_evaluation):
                tag, description = tag
                about = scalar.create_summary_metadata(None, description)
                each = {tag: value}
                if np.ndim(value):
                    each = {f"{tag}_{i}": x for i, x in enumerate(value)}
                for name, x in each.items():
                    curves.append((name, about, np.asarray(x, np.float32)))
        if curves:
            self._append(step, curves)

    def histograms(
        self, step: int, values: Mapping[str, np.ndarray | tf.Tensor], group: str
    ) -> None:
        about = histogram.create_summary_metadata(None, None)
        tagged = ((f"tensors/{group}/{name}", x) for name, x in values.items())
        self._append(step, ((tag, about, _buckets(x)) for tag, x in tagged))

    def picture(self, step: int, name: str, pixels: np.ndarray, about: str) -> None:
        """A picture, uint8 [height, width, 3], with a description."""
        height, width, _ = pixels.shape
        png = tf.io.encode_png(pixels).numpy()
        value = np.array([str(width).encode(), str(height).encode(), png], object)
        metadata = image.create_summary_metadata(None, about)
        self._append(step, [(f"pictures/{name}", metadata, value)])

    def begin(self, options: Mapping[str, Any], hparams: Sequence[str]) -> None:
        """The options of a run, as text and some as hyperparameters."""
        rows = [f"| {name} | {value} |" for name, value in options.items()]
        table = "\n".join(["| option | value |", "| --- | --- |", *rows])
        about = text.create_summary_metadata(None, "Options of the run")
        self._append(0, [("config", about, np.array([table.encode()], object))])
        self._append_summary(summary_v2.hparams_pb({n: options[n] for n in hparams}))

    def end(self) -> None:
        """Says that the run of these hyperparameters is complete."""
        self._append_summary(summary.session_end_pb(api_pb2.STATUS_SUCCESS))

    def _append_summary(self, content):
        event = Event(wall_time=time.time(), step=0)
        event.summary.MergeFromString(content.SerializeToString())
        self._append_event(event)

    def _append(self, step: int, values: Iterable[Value]) -> None:
        """Appends an event with some values."""
        event = Event(wall_time=time.time(), step=step)
        for name, about, value in values:
            tensor = make_tensor_proto(value)
            event.summary.value.add(tag=name, metadata=about, tensor=tensor)
        self._append_event(event)

    def _append_event(self, event):
        events = [event]
        if self._is_new:
            first = Event(wall_time=time.time(), file_version="brain.Event:2")
            events.insert(0, first)
            if self._first_step is not None:
                start = SessionLog(status=SessionLog.START)
                events.insert(1, Event(step=self._first_step, session_log=start))
            # Not with all folders above: a run's folder that was removed stays so.
            for folder in (self._folder.parent, self._folder):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(folder)
            self._path = self._path or _new_path(self._folder)
        store.append(self._path, _as_records(events))
        self._is_new = False


def _new_path(folder):
    """Return the path of a new event file."""
    host = platform.node().replace(".", "-")  # of an address; see `folder`
    names = (
        f"events.out.tfevents.{seconds}.{host}.{os.getpid()}"
        for seconds in itertools.count(int(time.time()))
    )
    return next(folder / x for x in names if not os.path.lexists(folder / x))


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
    """Return float64 [NUM_BUCKETS, 3]: edges and counts of the finite values."""
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        return np.zeros((NUM_BUCKETS, 3))
    counts, edges = np.histogram(values, NUM_BUCKETS)
    return np.stack([edges[:-1], edges[1:], counts], 1)


def batch_picture(
    images: np.ndarray, labels: np.ndarray, class_names: Sequence[str]
) -> np.ndarray:
    """Return the first images of a batch with their classes or shares of them."""
    images, labels = images[:MAX_IMAGES], labels[:MAX_IMAGES]
    captions = []
    for label in labels:
        if np.ndim(label):
            best = np.argsort(-label, kind="stable")[:2]
            best = [c for c in best if label[c] > 0.01]
            captions.append([f"{label[c]:.0%} {class_names[c]}" for c in best])
        else:
            captions.append([class_names[label]])
    return captioned_images(images, captions)


# Pixels: the width to which TensorBoard scales every picture (one of this width has
# sharp texts), a gap, and a line of a caption.
_WIDTH, _GAP, _LINE = 350, 4, 14


def captioned_images(
    images: np.ndarray, captions: Sequence[Sequence[str]]
) -> np.ndarray:
    """Return images over their captions, uint8 [height, width, 3]. Floats are stretched
    to the whole range; the first three channels are colors.
    """
    images = images[..., :3] if images.shape[3] >= 3 else images[..., [0, 0, 0]]
    if images.dtype != np.uint8:
        images = _stretched(images)
    count, height, width = images.shape[:3]
    columns = math.ceil(math.sqrt(count))
    room = _WIDTH // columns - _GAP
    # Small images are enlarged in whole pixels.
    scale = max(1, room // max(height, width))
    width, height = width * scale, height * scale
    room = max(room, width)
    right = room + _GAP
    down = height + _GAP + _LINE * max(map(len, captions), default=0)
    size = max(_WIDTH, columns * right), math.ceil(count / columns) * down
    canvas = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(11)
    for number, (pixels, lines) in enumerate(zip(images, captions, strict=True)):
        left, top = (number % columns) * right, (number // columns) * down
        picture = Image.fromarray(pixels)
        picture = picture.resize((width, height), Image.Resampling.NEAREST)
        canvas.paste(picture, (left, top))
        for row, line in enumerate(lines):
            place = left, top + height + row * _LINE
            draw.text(place, _fitting(line, font, room), "black", font)
    return np.asarray(canvas)


def _fitting(text, font, width):
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"{text}..") > width:
        text = text[:-1]
    return f"{text}.."


def _stretched(images):
    images = images.astype(np.float32)
    low = images.min(axis=(1, 2, 3), keepdims=True)
    high = images.max(axis=(1, 2, 3), keepdims=True)
    shares = (images - low) / np.maximum(high - low, 1e-6)
    return np.round(255 * shares).astype(np.uint8)
