"""Predictions of a trained run for the images of a split."""

import os
from typing import NamedTuple

import numpy as np

from towers import console
from towers.build.restored import RunEvaluator, read_checkpoint, reported_weights
from towers.config import Config
from towers.data.sources import Source
from towers.errors import ConfigError
from towers.metrics.predictions import to_probabilities
from towers.parallel.copies import Weights
from towers.run.folder import RunFolder
from towers.run.records import Reports
from towers.run.stored_config import evaluation_config, stored_dataset_info

SPLITS = ("test", "validation", "train")


class SplitPredictions(NamedTuple):
    """The predictions of a run for all images of a split."""

    step: int
    weights: Weights
    source: Source
    class_names: tuple[str, ...]
    labels: np.ndarray  # integers [n], or of label sets bool [n, classes]
    logits: np.ndarray  # float32 [n, classes]
    unknown: np.ndarray  # float32 [m, classes], logits of the split's m of no class

    @property
    def probabilities(self) -> np.ndarray:
        """The probabilities, float64 [n, classes]."""
        return to_probabilities(self.logits, self.labels.ndim == 2)


def predict_split(
    workdir: str | os.PathLike,
    split: str = "test",
    config: Config | None = None,
    *,
    step: int | str = "best",
    use_ema: bool | None = None,
) -> SplitPredictions:
    """Predict the images of a split with the network of a run.

    `split` is "test", "validation" (images that its training held out) or "train". The
    for other arguments see `predict`. ConfigError if the run has no such images, or
    other images would be held out now than in its training.
    """
    if split not in SPLITS:
        raise ConfigError(f"split={split}: must be one of {', '.join(SPLITS)}")
    folder = RunFolder(workdir)
    config = config or evaluation_config(folder, step)
    weights = reported_weights(config, use_ema)
    info = stored_dataset_info(folder, step)
    evaluator = RunEvaluator(folder, config, info, test_only=split == "test")
    parts = evaluator.parts
    name, held_out = parts.eval_split
    sources = {name: held_out, "test": parts.data.test, "train": parts.train_source}
    if (source := sources.get(split)) is None:
        way = "train with --validation_fraction=0.1, or choose another --split"
        raise ConfigError(f"split={split}: {folder.path} has no such images; {way}")
    if evaluator.difference:
        why = f"{folder.path}: not the data set of the run: {evaluator.difference}"
        if split == "validation":
            way = "held-out images may have been trained on; give the former data"
            raise ConfigError(f"{why}; {way}, or train again")
        console.warn(why)
    checkpoint, names = read_checkpoint(folder, step), parts.data.class_names

    def predicted(images):
        outputs = evaluator.predict(checkpoint, images, [weights])
        batches = [output[weights] for output in outputs]
        labels = np.concatenate([batch["labels"] for batch in batches])
        return labels, np.concatenate([x["logits"].astype(np.float32) for x in batches])

    labels, logits = predicted(source)
    labels = labels > 0 if labels.ndim == 2 else labels.astype(np.int64)
    others, unknown = parts.unknown.get(split), logits[:0]
    if others and others.num_examples:
        _, unknown = predicted(others)
    return SplitPredictions(
        checkpoint.step, weights, source, names, labels, logits, unknown
    )


def write_to_run(workdir: str | os.PathLike, name: str, text: str) -> bool:
    """Write a file of a run's folder; return whether that is possible."""
    folder = RunFolder(workdir)
    with Reports(folder, "eval") as reports:
        return reports.file(getattr(folder, name), text)
