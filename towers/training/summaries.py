"""Histograms and pictures of a run for TensorBoard."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from towers.build import Parts
from towers.evaluation.predictions import LabelSets, Predictions, worst_mistakes
from towers.parallel.trainer import Trainer
from towers.reporting.board import MOST_IMAGES, batch_picture, mistakes_picture
from towers.run.reports import Reports
from towers.run.watchdog import Watchdog


class Summaries:
    """The summaries of a run.

    Args:
        parts, trainer, reports, watchdog: of the run.
        clock: seconds.

    Attributes:
        written_at: the time of the last summary, by the clock.
        is_pending: whether the length of the step after it is still to be written.
    """

    def __init__(
        self,
        parts: Parts,
        trainer: Trainer,
        reports: Reports,
        watchdog: Watchdog,
        clock: Callable[[], float],
    ):
        self._parts, self._trainer = parts, trainer
        self._reports, self._watchdog, self._clock = reports, watchdog, clock
        self._params: dict[str, np.ndarray] | None = None  # until the next step
        self.written_at = 0.0

    @property
    def is_pending(self) -> bool:
        return self._params is not None

    def write(self, step: int) -> None:
        """Histograms of the parameters and gradients, and the images of the next
        step."""
        state, reports = self._trainer.state().items(), self._reports
        params = {
            k.removeprefix("params/"): v for k, v in state if k.startswith("params/")
        }
        reports.histograms(step, params, "params")
        with self._watchdog.activity("waiting for data"):
            batch = self._parts.train_batches(tf.constant(step, tf.int64))
        with self._watchdog.activity("computing gradients for the summary"):
            gradients = self._trainer.gradients()
        reports.histograms(step, gradients, "gradients")
        names = self._parts.data.class_names
        reports.picture(
            step,
            "training_batch",
            lambda: batch_picture(
                batch["images"].numpy(), batch["labels"].numpy(), names
            ),
            "Augmented images of the next step; each is stretched to the whole range",
        )
        self.written_at, self._params = self._clock(), params

    def write_update(self, step: int) -> None:
        """The length of the step after a summary, relative to the parameters."""
        before, self._params = self._params, None
        state = self._trainer.state()
        update, norm = 0.0, 0.0
        for name, values in before.items():
            values = values.astype(np.float64)
            update += np.sum((state[f"params/{name}"] - values) ** 2)
            norm += np.sum(values**2)
        if norm:
            self._reports.scalars(step, {"update_ratio": np.sqrt(update / norm)})

    def write_evaluation(
        self, step: int, record: Mapping[str, Any], predictions: Predictions | LabelSets
    ) -> None:
        """Curves and the worst mistakes.

        Args:
            step: that was evaluated.
            record: of the evaluation, as in `metrics.jsonl`.
            predictions: of its images.
        """
        split, source = self._parts.eval_split
        names = self._parts.data.class_names
        values = {k.removeprefix(f"{split}_"): v for k, v in record.items()}
        self._reports.scalars(step, values, split)

        def draw_mistakes():
            images, _ = source.read(tf.constant(worst, tf.int64))
            texts = [predictions.texts(index, names) for index in worst]
            return mistakes_picture(images.numpy(), texts)

        worst = worst_mistakes(predictions, MOST_IMAGES)
        if len(worst):
            about = "The mistakes with the largest loss"
            self._reports.picture(step, "mistakes", draw_mistakes, about, split)
