"""Histograms and pictures of a run for TensorBoard."""

import time
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from towers.build.builder import Parts
from towers.metrics.predictions import LabelSets, Predictions, worst_mistakes
from towers.parallel.trainer import Trainer
from towers.run.records import Reports
from towers.training.pictures import MAX_IMAGES, batch_picture, captioned_images
from towers.training.watchdog import Watchdog


class Summaries:
    """The summaries of a run; `written_at` is the time of the last one."""

    def __init__(
        self, parts: Parts, trainer: Trainer, reports: Reports, watchdog: Watchdog
    ):
        self._parts, self._trainer = parts, trainer
        self._reports, self._watchdog = reports, watchdog
        self.written_at = 0.0

    def write(self, step: int) -> None:
        """Write histograms of parameters and gradients, and the next step's images."""
        params = {
            name.removeprefix("params/"): array
            for name, array in self._trainer.state().items()
            if name.startswith("params/")
        }
        with self._watchdog.activity("waiting for data"):
            batch = self._parts.train_batches(tf.constant(step, tf.int64))
        with self._watchdog.activity("computing gradients for the summary"):
            gradients = self._trainer.gradients(batch)
        images, labels = batch["images"].numpy(), batch["labels"].numpy()
        about = "Augmented images of the next step, each stretched to the whole range"

        def write(board):
            board.histograms(step, params, "params")
            board.histograms(step, gradients, "gradients")
            pixels = batch_picture(images, labels, self._parts.data.class_names)
            board.picture(step, "training_batch", pixels, about)

        self._reports.on_board(write)
        self.written_at = time.monotonic()

    def write_evaluation(
        self, step: int, record: Mapping[str, Any], predictions: Predictions | LabelSets
    ) -> None:
        """Draw a record of `metrics.jsonl` as curves, and the worst mistakes."""
        split, source = self._parts.eval_split
        names = self._parts.data.class_names
        values = {k.removeprefix(f"{split}_"): v for k, v in record.items()}
        self._reports.scalars(step, values, split)

        worst = worst_mistakes(predictions, MAX_IMAGES)

        def write(board):
            images, _ = source.read(tf.constant(worst, tf.int64))
            texts = (predictions.texts(index, names) for index in worst)
            captions = [[label, f"as {other}"] for label, other in texts]
            pixels = captioned_images(images.numpy(), captions)
            about = "The mistakes with the largest loss"
            board.picture(step, "mistakes", pixels, about)

        if len(worst):
            self._reports.on_board(write, split)
