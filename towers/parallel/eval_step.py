"""Evaluation on all devices, with test-time augmentation."""

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from towers.data.tta import TestTimeAugmentation
from towers.parallel.devices import HOST
from towers.parallel.gradients import shares, split_batch
from towers.parallel.network import Network
from towers.parallel.strategy import Strategy
from towers.parallel.tower import LossFn, tower_counts
from towers.parallel.workers import ALONE, Workers


class Evaluator:
    """Computes the logits of batches, and counts correct predictions.

    Args:
        strategy: holds the variables.
        network: computes the logits.
        loss_fn: the loss of each image.
        devices: one per tower.
        tta: see `TestTimeAugmentation`.
        workers: each of them has its part of every batch.
    """

    def __init__(
        self,
        strategy: Strategy,
        network: Network,
        loss_fn: LossFn,
        devices: Sequence[str],
        tta: TestTimeAugmentation,
        workers: Workers = ALONE,
    ):
        self._strategy, self._network, self._loss_fn = strategy, network, loss_fn
        self._devices, self._tta, self._workers = devices, tta, workers
        self._count_batch = tf.function(self._count, autograph=False)
        self._predict_batch = tf.function(self._predict, autograph=False)

    def __call__(
        self, batches: Iterable[Mapping[str, tf.Tensor]], use_averages: bool = False
    ) -> dict[str, float]:
        """Sums of `tower_counts` over the batches, as `Trainer.evaluate`."""
        totals = collections.Counter(correct=0.0, images=0.0, loss=0.0)
        for batch in batches:
            counts = self._count_batch(dict(batch), use_averages)
            totals.update({name: float(value) for name, value in counts.items()})
        if self._workers.size == 1:
            return dict(totals)
        names = sorted(totals)
        added = self._workers.add(np.array([totals[name] for name in names]))
        return dict(zip(names, added.tolist(), strict=True))

    def predictions(
        self, batches: Iterable[Mapping[str, tf.Tensor]], use_averages: bool = False
    ) -> Iterator[dict[str, np.ndarray]]:
        """Computes batches with "weights" in one process.

        Yields:
            Per batch, for its n images of weight 1: "logits" [n, num_classes]; where it
            has labels, "labels" and "loss" [n]; with test-time augmentation
            "logits_tta", float64 [n, num_classes].
        """
        for batch in batches:
            counts = np.asarray(batch["weights"]) > 0
            outputs = self._predict_batch(dict(batch), use_averages)
            yield {name: value.numpy()[counts] for name, value in outputs.items()}

    def _predict(self, batch, use_averages):
        """The outputs for one batch, in the graph."""
        fetched = self._strategy.fetch(use_averages)
        pieces = self._split(batch)
        logits = self._logits(fetched, pieces)
        with tf.device(HOST):
            outputs = {"logits": tf.concat(logits, 0)}
            if "labels" in batch:
                outputs["labels"] = tf.identity(batch["labels"])
                outputs["loss"] = self._loss_fn(outputs["logits"], batch["labels"])
        if not self._tta.transforms:
            return outputs
        with tf.device(HOST):
            places = tf.range(batch["weights"].shape[0])
            if self._tta.fraction < 1:
                batch = dict(batch) | {"places": places, "logits": outputs["logits"]}
                batch = least_confident(batch, batch["logits"], self._tta.fraction)
                places = batch.pop("places")
        if self._tta.fraction < 1:
            pieces = self._split(batch)
            logits = [piece.pop("logits") for piece in pieces]
        means = self._mean_logits(fetched, pieces, logits)
        with tf.device(HOST):
            # The others keep their prediction.
            outputs["logits_tta"] = tf.tensor_scatter_nd_update(
                tf.cast(outputs["logits"], tf.float64),
                places[:, tf.newaxis],
                tf.concat(means, 0),
            )
        return outputs

    def _count(self, batch, use_averages):
        """The counts of one batch, in the graph."""
        fetched = self._strategy.fetch(use_averages)
        pieces = self._split(batch)
        logits = self._logits(fetched, pieces)
        counts = self._sum_counts(logits, pieces)
        if not self._tta.transforms:
            return counts
        if self._tta.fraction < 1:
            with tf.device(HOST):
                batch = dict(batch) | {"logits": tf.concat(logits, 0)}
                batch = least_confident(
                    batch,
                    batch["logits"],
                    self._tta.fraction,
                    self._workers,
                    len(self._devices),
                )
            pieces = self._split(batch)
            logits = [piece.pop("logits") for piece in pieces]
        # Augmented images change their prediction, the others keep theirs.
        before = self._sum_counts(logits, pieces)["correct"]
        logits = self._mean_logits(fetched, pieces, logits)
        after = self._sum_counts(logits, pieces)["correct"]
        with tf.device(HOST):
            return counts | {"correct_tta": counts["correct"] - before + after}

    def _split(self, batch):
        """Per tower its part of a batch; of a small one some towers have none."""
        size = batch["weights"].shape[0]
        with tf.device(HOST):
            return split_batch(batch, shares(size, min(size, len(self._devices))))

    def _logits(self, fetched, pieces):
        size = self._strategy.num_shards
        return self._network.logits(fetched[: size * len(pieces)], pieces)

    def _sum_counts(self, logits, pieces):
        counts = []
        for device, tower_logits, piece in zip(
            self._devices, logits, pieces, strict=False
        ):
            with tf.device(device):
                counts.append(tower_counts(self._loss_fn, tower_logits, piece))
        with tf.device(HOST):
            return {name: tf.add_n([c[name] for c in counts]) for name in counts[0]}

    def _mean_logits(self, fetched, pieces, plain):
        """Per tower the mean logits over the transforms, given those of the images."""
        totals = [0.0] * len(pieces)
        for weight, transform in self._tta.transforms:
            logits = plain
            if transform is not None:
                transformed = []
                for device, piece in zip(self._devices, pieces, strict=False):
                    with tf.device(device):
                        images = transform(piece["images"])
                        transformed.append(piece | {"images": images})
                logits = self._logits(fetched, transformed)
            for tower, tower_logits in enumerate(logits):
                with tf.device(self._devices[tower]):
                    # 16-bit floats lack the precision for a mean.
                    totals[tower] += weight * tf.cast(tower_logits, tf.float64)
        return totals


def least_confident(
    batch: Mapping[str, tf.Tensor],
    logits: tf.Tensor,
    fraction: float,
    workers: Workers = ALONE,
    num_towers: int = 1,
) -> dict[str, tf.Tensor]:
    """Part of a batch, those images whose two largest logits differ least.

    Args:
        batch: tensors of n images each, among them "weights", 0 where none is meant.
        logits: [n, classes].
        fraction: of the n images, rounded up.
        workers: each has its part of a batch, and the fraction is one of the whole.
            A worker then gets at least its images of that fraction; "weights" of the
            others are 0.
        num_towers: of each worker: by so many images its part may be smaller than that
            of another one.
    """
    best, second = tf.unstack(tf.math.top_k(logits, 2).values, axis=1)
    margin = tf.where(batch["weights"] > 0, best - second, math.inf)
    [count] = margin.shape
    num_least = math.ceil(fraction * count)
    if workers.size > 1:
        is_chosen = _is_least(margin, fraction, workers)
        weights = tf.where(is_chosen, batch["weights"], 0.0)
        batch = dict(batch) | {"weights": weights}
        most = math.ceil(fraction * workers.size * (count + num_towers))
        num_least = min(count, most)
    chosen = tf.math.top_k(-margin, num_least).indices
    return {name: tf.gather(value, chosen) for name, value in batch.items()}


def _is_least(margin, fraction, workers):
    """bool [n]: whether a margin is one of that fraction of all workers' margins which
    are least; of equal ones the first."""
    [count] = margin.shape
    index = tf.constant(workers.index, tf.float64)
    pairs = tf.stack([tf.cast(margin, tf.float64), tf.fill([count], index)], 1)
    margins, indices = tf.unstack(workers.gather(pairs), axis=1)
    num_all = tf.size(margins)
    num_least = tf.cast(tf.math.ceil(fraction * tf.cast(num_all, tf.float64)), tf.int32)
    least = tf.argsort(margins, stable=True)[:num_least]
    are_least = tf.scatter_nd(least[:, None], tf.ones_like(least), [num_all])
    first = tf.reduce_sum(tf.cast(indices < index, tf.int32))
    return are_least[first : first + count] > 0
