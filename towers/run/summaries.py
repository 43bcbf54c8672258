"""Reports of a run: log lines, `metrics.jsonl`, TensorBoard."""

import json
import math
import os
import pathlib
import sys
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from towers.run.folder import fsync


def say(line: str) -> None:
    """Prints one plain line, at once.

    Where nobody reads any more (`run_train.py | head`) the training goes on in silence;
    the metrics are in `metrics.jsonl` as well.
    """
    try:
        print(f"{line}\n", end="", flush=True)  # in one piece, from any thread
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")


def duration(secs: float) -> str:
    """Such as "42 s", "3 min 20 s" or "2 h 05 min"."""
    secs = round(secs)
    if secs < 60:
        return f"{secs} s"
    if secs < 3600:
        return f"{secs // 60} min {secs % 60:02d} s"
    return f"{secs // 3600} h {secs % 3600 // 60:02d} min"


def log_line(
    record: Mapping[str, float],
    last_step: int,
    steps_per_sec: float | None,
    start_secs: float,
) -> str:
    """The log line of a step.

    Args:
        record: "step", "epoch", "loss", "learning_rate", and once they are known
            "images_per_sec" and "input_wait_percent".
        last_step: of the run.
        steps_per_sec: for the time left; None until it is known.
        start_secs: duration of the first call.
    """
    step = record["step"]
    speed = f"first step, with tracing and compiling: {start_secs:.1f} s"
    if steps_per_sec:
        left = duration((last_step - step) / steps_per_sec)
        speed = (
            f"{record['images_per_sec']:,.0f} images/s  "
            f"input wait {record['input_wait_percent']:.1f}%  {left} left"
        )
    return (
        f"step {step}/{last_step} ({step / last_step:.1%})  "
        f"epoch {record['epoch']:.2f}  loss {record['loss']:.4f}  "
        f"learning rate {record['learning_rate']:.4g}  {speed}"
    )


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, with strictly increasing "step".

    Args:
        path: of the file.
        resume_step: lines of later steps, and an incomplete last line, are dropped:
            the run takes those steps again.
    """

    def __init__(self, path: pathlib.Path, resume_step: int):
        self._path = path
        if path.exists():
            kept = "".join(
                json.dumps(record) + "\n"
                for record in read_metrics(path)
                if record["step"] <= resume_step
            )
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            temporary.write_text(kept)
            fsync(temporary)
            os.replace(temporary, path)

    def append(self, record: Mapping[str, object]) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(_plain(record)) + "\n")


def read_metrics(path: pathlib.Path) -> list[dict]:
    """The whole lines of a `metrics.jsonl`; an incomplete last one is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def last_accuracy(path: pathlib.Path, step: int) -> float | None:
    """The accuracy of the last evaluation until a step, with the moving averages where
    there are any; None if there was none, or the file cannot be read."""
    try:
        records = read_metrics(path)
    except (OSError, ValueError):
        return None
    for record in reversed(records):
        for suffix in ("_averaged", ""):
            for split in ("validation", "test"):
                accuracy = record.get(f"{split}_accuracy{suffix}")
                if accuracy is not None and record["step"] <= step:
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


class Board:
    """TensorBoard event files of one kind, "train" or "eval".

    Args:
        folder: TensorBoard's `--logdir`.
        kind: the name of the curves there.
    """

    def __init__(self, folder: pathlib.Path, kind: str):
        self._writer = tf.summary.create_file_writer(str(folder / kind))

    def scalars(self, step: int, values: Mapping[str, float | np.ndarray]) -> None:
        """A curve per value; a vector gives one per element, "loss/tower_2"."""
        with self._writer.as_default():
            for name, value in values.items():
                if np.ndim(value) == 0:
                    tf.summary.scalar(name, value, step)
                    continue
                for tower, element in enumerate(value):
                    tf.summary.scalar(f"{name}/tower_{tower}", element, step)
        self._writer.flush()

    def histograms(
        self, step: int, values: Mapping[str, np.ndarray | tf.Tensor], group: str
    ) -> None:
        with self._writer.as_default():
            for name, value in values.items():
                tf.summary.histogram(f"{group}/{name}", value, step)

    def images(self, step: int, images: tf.Tensor, name: str) -> None:
        """The first 64 images of a batch, float [n, h, w, 1 or 3], side by side."""
        with self._writer.as_default():
            tf.summary.image(name, image_grid(images.numpy())[None], step)


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
