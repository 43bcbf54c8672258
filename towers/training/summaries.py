"""Histograms and pictures of a run for TensorBoard."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw, ImageFont

from towers.build.builder import Parts
from towers.metrics.predictions import LabelSets, Predictions, worst_mistakes
from towers.parallel.trainer import Trainer
from towers.run.records import Reports
from towers.training.watchdog import Watchdog

MAX_IMAGES = 16  # of a picture

# In pixels: the width to which TensorBoard scales every picture, the gap between two
# images, and the height of a line of a caption.
_WIDTH, _GAP, _LINE = 350, 4, 14


@dataclasses.dataclass
class Summaries:
    """The summaries of a run; `written_at` is the time of the last one."""

    parts: Parts
    trainer: Trainer
    reports: Reports
    watchdog: Watchdog
    written_at: float = 0.0

    def write(self, step: int) -> None:
        """Write histograms of parameters and gradients, and the next step's images."""
        params = {
            name.removeprefix("params/"): array
            for name, array in self.trainer.state().items()
            if name.startswith("params/")
        }
        with self.watchdog.activity("waiting for data"):
            batch = self.parts.train_batches(tf.constant(step, tf.int64))
        with self.watchdog.activity("computing gradients for the summary"):
            gradients = self.trainer.gradients(batch)
        images, labels = batch["images"].numpy(), batch["labels"].numpy()
        about = "Augmented images of the next step, each stretched to the whole range"

        def write(board):
            board.histograms(step, params, "params")
            board.histograms(step, gradients, "gradients")
            pixels = batch_picture(images, labels, self.parts.data.class_names)
            board.picture(step, "training_batch", pixels, about)

        self.reports.on_board(write)
        self.written_at = time.monotonic()

    def write_evaluation(
        self, step: int, record: Mapping[str, Any], predictions: Predictions | LabelSets
    ) -> None:
        """Draw a record of `metrics.jsonl` as curves, and the worst mistakes."""
        split, source = self.parts.eval_split
        names = self.parts.data.class_names
        values = {k.removeprefix(f"{split}_"): v for k, v in record.items()}
        self.reports.scalars(step, values, split)

        worst = worst_mistakes(predictions, MAX_IMAGES)

        def write(board):
            images, _ = source.read(tf.constant(worst, tf.int64))
            texts = (predictions.texts(index, names) for index in worst)
            captions = [[label, f"as {other}"] for label, other in texts]
            pixels = captioned_images(images.numpy(), captions)
            about = "The mistakes with the largest loss"
            board.picture(step, "mistakes", pixels, about)

        if len(worst):
            self.reports.on_board(write, split)


def batch_picture(
    images: np.ndarray, labels: np.ndarray, class_names: Sequence[str]
) -> np.ndarray:
    """Return the first images of a batch with their classes or shares of them."""
    images, labels = images[:MAX_IMAGES], labels[:MAX_IMAGES]
    captions = []
    for label in labels:
        if np.ndim(label):
            best = [c for c in np.argsort(-label, kind="stable")[:2] if label[c] > 0.01]
            captions.append([f"{label[c]:.0%} {class_names[c]}" for c in best])
        else:
            captions.append([class_names[label]])
    return captioned_images(images, captions)


def captioned_images(images: np.ndarray, captions: Sequence[list[str]]) -> np.ndarray:
    """Return images over their captions, uint8 [height, width, 3]."""
    images = images[..., :3] if images.shape[3] >= 3 else images[..., [0, 0, 0]]
    if images.dtype != np.uint8:
        images = _stretched(images)
    count, height, width = images.shape[:3]
    columns = math.ceil(math.sqrt(count))
    room = _WIDTH // columns - _GAP
    scale = max(1, room // max(height, width))  # whole pixels
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
            draw.text(place, _shortened(line, font, room), "black", font)
    return np.asarray(canvas)


def _shortened(text, font, width):
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
