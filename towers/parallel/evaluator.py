"""Evaluation on all devices, with test-time augmentation."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import keras
import numpy as np
import tensorflow as tf

from towers.cluster.workers import ALONE, Workers
from towers.data.augment.tta import Transform
from towers.optim import losses
from towers.optim.phases import phases_of
from towers.parallel import compilation
from towers.parallel.copies import Values, Weights, copies_on
from towers.parallel.devices import HOST
from towers.parallel.feed import Feed, add_on_each, make_batches
from towers.parallel.loop import while_loop
from towers.parallel.reduce import shares, split_batch
from towers.parallel.sharding.network import ShardedNetwork
from towers.parallel.tower import LossFn, WholeNetwork, tower_counts

# Aimed at by one compiled call; between calls a stop request is served.
CALL_SECS = 1.0

Counts = dict[str, float]
T, U = TypeVar("T"), TypeVar("U")


@dataclasses.dataclass(frozen=True)
class Evaluation(Generic[T]):
    """The results of an evaluation, such as counts, with one kind of weights or two."""

    by_weights: Mapping[Weights, T]

    @property
    def reported_weights(self) -> Weights:
        """The weights that a run reports: the EMA weights, where they are evaluated."""
        return Weights.EMA if Weights.EMA in self.by_weights else Weights.RAW

    @property
    def reported(self) -> T:
        """The result that a run reports."""
        return self.by_weights[self.reported_weights]

    def map(self, function: Callable[[T], U]) -> "Evaluation[U]":
        """The function of the result with each kind of weights."""
        return Evaluation({k: function(x) for k, x in self.by_weights.items()})


class Evaluator:
    """Computes the logits of batches, and counts correct predictions.

    Args:
        fetch: weights -> per device the values of the network.
        network: computes the logits.
        loss_fn: the loss of each image.
        devices: the first device of each tower.
        transforms: test-time augmentation, see `towers.data.augment.tta`; none for the
            images alone.
        workers: each of them has its part of every batch.
        num_shards: devices of a tower.
        keeps_logits: whether `counts` returns all logits; a multi-label loss always
            does.
    """

    def __init__(
        self,
        fetch: Callable[[Weights], list[Values]],
        network: WholeNetwork | ShardedNetwork,
        loss_fn: LossFn,
        devices: Sequence[str],
        transforms: Sequence[Transform],
        workers: Workers = ALONE,
        num_shards: int = 1,
        keeps_logits: bool = False,
    ):
        self._fetch, self._network, self._loss_fn = fetch, network, loss_fn
        self._devices, self._workers = devices, workers
        self._transforms = tuple(transforms)
        self._num_shards = num_shards
        self._multi_label = getattr(loss_fn, "multi_label", False)
        self._keeps_logits = keeps_logits or self._multi_label
        self._calls = functools.cache(self._compile)
        self._predict_batch = tf.function(self._predict, autograph=False)

    def counts(
        self,
        feed: Feed,
        num_batches: int,
        weights: Sequence[Weights] = (Weights.RAW,),
        heartbeat: Callable[[], None] = lambda: None,
    ) -> Evaluation[Counts]:
        """Sums of `tower_counts` over batches, with all weights in one pass.

        Args:
            feed: per tower its part of every batch, with "weights" and "positions"; the
                same object for every evaluation of the same images, as each is compiled
                for.
            num_batches: of the whole evaluation.
            weights: the weights to evaluate.
            heartbeat: called after each compiled call.

        Returns:
            "correct" and "images", whole numbers, and "loss", the sum over the images;
            with test-time augmentation also "correct_tta". And "predictions", float64
            [images, 3]: label, class of the largest logit, and loss of each image in
            the order of their positions; "probabilities", float64 [images], of these
            classes. Where logits are kept, "logits", float32 [images, num_classes]. Of
            label sets "labels", bool [images, num_classes]; the first column of
            "predictions" is then 0.
        """
        feed.restart()
        iterators, count_batches = feed.start(0, 0), self._calls(feed, tuple(weights))
        totals, rows, done, num = None, [], 0, 1
        while done < num_batches:
            # Sums over workers are distinguished by their order in a call.
            own = {"num": np.array(min(num, num_batches - done))}
            num = int(self._workers.broadcast(own)["num"])
            started = time.monotonic()
            with tf.device(HOST):
                arguments = tf.constant(done, tf.int64), tf.constant(num, tf.int64)
            counts, predictions = count_batches(iterators, *arguments)
            sums = [{k: v.numpy() for k, v in sums.items()} for sums in counts]
            rows.append(predictions.numpy())
            totals = sums if totals is None else _added(totals, sums)
            done += num
            secs = max(time.monotonic() - started, 1e-3)
            num = max(1, min(2 * num, int(num * CALL_SECS / secs)))
            heartbeat()
        results = {}
        for kind, sums in zip(weights, totals, strict=True):
            values = self._workers.add(np.array(list(sums.values())))
            results[kind] = dict(zip(sums, values.tolist(), strict=True))
        rows = np.concatenate(rows)  # of the images of this worker
        rows = rows.reshape(-1, rows.shape[-1])
        rows = rows[rows[:, 1] > 0]
        ordered = np.zeros([int(results[weights[0]]["images"]), rows.shape[1]])
        ordered[rows[:, 0].astype(np.int64)] = rows
        ordered = self._workers.add(ordered)
        num_kept = 0
        if self._keeps_logits:  # the columns are position, weight, label and per kind
            sets = len(weights) + self._multi_label
            num_kept = (rows.shape[1] - 3 - 3 * len(weights)) // sets
        *_, label = ordered[:, :3].T
        columns = ordered[:, 3:]
        if self._multi_label:
            labels, columns = np.split(columns, [num_kept], 1)
        per_kind = np.split(columns, len(weights), 1)
        for kind, values in zip(weights, per_kind, strict=True):
            result = results[kind]
            result["predictions"] = np.column_stack([label, values[:, :2]])
            result["probabilities"] = values[:, 2]
            if self._keeps_logits:
                result["logits"] = values[:, 3:].astype(np.float32)
            if self._multi_label:
                result["labels"] = labels > 0
        return Evaluation(results)

    def _compile(self, feed, weights):
        """(iterators, first batch, number of batches) -> the counts for each kind of
        weights."""

        def count_batch(pieces):
            counted = [self._count(pieces, self._fetch(kind)) for kind in weights]
            with tf.device(HOST):
                names = ["positions", "weights", "labels"]
                columns = [tf.concat([p[k] for p in pieces], 0) for k in names]
                if self._multi_label:
                    columns.insert(2, tf.zeros_like(columns[1]))
                columns += [x for _, predicted in counted for x in predicted]
                columns = [tf.cast(x, tf.float64) for x in columns]
                size = columns[0].shape[0]
                rows = tf.concat([tf.reshape(x, [size, -1]) for x in columns], 1)
            return [counts for counts, _ in counted], rows

        count = tf.function(
            count_batch, autograph=False, experimental_attributes={"_noinline": True}
        )
        on_cpus = all("CPU" in device for device in self._devices)

        def count_batches(iterators, first, num_batches):
            with tf.device(HOST):  # where the arguments are
                first = tf.identity(first)

            def add(done, totals, predictions, numbers):
                awaited = feed.wait(iterators)
                with tf.device(HOST):
                    on_host = [first + done] * len(feed.devices)
                pieces = make_batches(feed, awaited, numbers or on_host)
                counts, rows = (count if on_cpus else count.python_function)(pieces)
                with tf.device(HOST):
                    predictions = predictions.write(tf.cast(done, tf.int32), rows)
                numbers = add_on_each(gpus, numbers, 1)
                return done + 1, _added(totals, counts), predictions, numbers

            with tf.device(HOST):
                names = ["correct", "images", "loss"]
                names += ["correct_tta"] if self._transforms else []
                zeros = [{k: tf.zeros([], tf.float64) for k in names} for _ in weights]
                size = tf.cast(num_batches, tf.int32)
                rows = tf.TensorArray(tf.float64, size, infer_shape=False)
                # Each GPU counts the batches: a number of the host would drain it.
                gpus = [] if on_cpus else feed.devices
                numbers = add_on_each(gpus, [first] * len(gpus), 0)
                begin = tf.zeros([], tf.int64), zeros, rows, numbers
                _, totals, rows, _ = while_loop(
                    lambda done, *_: done < num_batches, add, begin
                )
                return totals, rows.stack()

        return tf.function(
            count_batches, autograph=False, reduce_retracing=True
        ).get_concrete_function(
            feed.spec(), tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.int64)
        )

    def predictions(
        self,
        batches: Iterable[Mapping[str, tf.Tensor]],
        weights: Sequence[Weights] = (Weights.RAW,),
    ) -> Iterator[dict[Weights, dict[str, np.ndarray]]]:
        """Computes batches with "weights" of the images in one process.

        Yields:
            Per batch and kind of weights, for its n images of weight 1: "logits"
            [n, num_classes]; where it has labels, "labels" and "loss" [n]; with
            test-time augmentation "logits_tta", float64 [n, num_classes].
        """
        for batch in batches:
            counts = np.asarray(batch["weights"]) > 0
            outputs = self._predict_batch(dict(batch), tuple(weights))
            yield {
                kind: {name: value.numpy()[counts] for name, value in output.items()}
                for kind, output in zip(weights, outputs, strict=True)
            }

    def _predict(self, batch, weights):
        """The outputs for one batch with each kind of weights, in the graph."""
        size = batch["weights"].shape[0]
        with tf.device(HOST):
            pieces = split_batch(batch, shares(size, min(size, len(self._devices))))
        return [self._predict_kind(batch, pieces, self._fetch(x)) for x in weights]

    def _predict_kind(self, batch, pieces, fetched):
        logits, means = self._compute(fetched, pieces)
        with tf.device(HOST):
            outputs = {"logits": tf.concat(logits, 0)}
            if "labels" in batch:
                outputs["labels"] = tf.identity(batch["labels"])
                outputs["loss"] = self._loss_fn(outputs["logits"], batch["labels"])
            if means:
                outputs["logits_tta"] = tf.concat(means, 0)
        return outputs

    def _count(self, pieces, fetched):
        """The counts of one batch, in the graph; the predictions for its images."""
        logits, means = self._compute(fetched, pieces)
        counts = self._sum_counts(logits, pieces)
        if means:
            counts["correct_tta"] = self._sum_counts(means, pieces)["correct"]
        return counts, self._predictions(logits, pieces)

    def _compute(self, fetched, pieces):
        """Per tower the logits of its piece of a batch, and with test-time augmentation
        the mean logits over the transforms, else none."""
        logits = self._logits(fetched, pieces)
        if not self._transforms:
            return logits, []
        return logits, self._mean_logits(fetched, pieces, logits)

    def _logits(self, fetched, pieces):
        return self._network.logits(fetched[: self._num_shards * len(pieces)], pieces)

    def _sum_counts(self, logits, pieces):
        counts = []
        for device, output, piece in zip(self._devices, logits, pieces, strict=False):
            with tf.device(device):
                counts.append(tower_counts(self._loss_fn, output, piece))
        with tf.device(HOST):
            return {name: tf.add_n([c[name] for c in counts]) for name in counts[0]}

    def _predictions(self, logits, pieces):
        classes, losses, probabilities, kept = [], [], [], []
        for device, output, piece in zip(self._devices, logits, pieces, strict=False):
            with tf.device(device):
                classes.append(tf.argmax(output, 1))
                losses.append(self._loss_fn(output, piece["labels"]))
                softmax = tf.nn.softmax(tf.cast(output, losses[-1].dtype))
                probabilities.append(tf.reduce_max(softmax, 1))
                if self._keeps_logits:
                    kept.append(tf.cast(output, losses[-1].dtype))
        with tf.device(HOST):
            columns = filter(None, (classes, losses, probabilities, kept))
            return [tf.concat(x, 0) for x in columns]

    def _mean_logits(self, fetched, pieces, plain):
        """Mean logits per tower over the images and their transforms."""
        totals = [0.0] * len(pieces)
        for weight, transform in self._transforms:
            logits = plain
            if transform is not None:
                transformed = []
                for device, piece in zip(self._devices, pieces, strict=False):
                    with tf.device(device):
                        images = transform(piece["images"])
                        transformed.append(piece | {"images": images})
                logits = self._logits(fetched, transformed)
            for tower, output in enumerate(logits):
                with tf.device(self._devices[tower]):
                    # 16-bit floats lack the precision for a mean.
                    totals[tower] += weight * tf.cast(output, tf.float64)
        return totals


def _added(totals, sums):
    return [
        {name: total[name] + counts[name] for name in total}
        for total, counts in zip(totals, sums, strict=True)
    ]


def create_predictor(
    model: keras.Model, devices: Sequence[str], transforms: Sequence[Transform]
) -> Evaluator:
    """Computes a whole network on every device, each for its share of a batch.

    Args:
        model: with its trained values; its output need not be logits where there is no
            test-time augmentation.
        devices: device names, one tower each.
        transforms: test-time augmentation.
    """
    layout, copies = copies_on(model, devices)
    compiled, loss_fn = compilation.choose(devices, [model]), losses.cross_entropy
    network = WholeNetwork(phases_of((), model), loss_fn, layout, devices, compiled)

    def fetch(_):
        return [copy.read() for copy in copies]

    return Evaluator(fetch, network, loss_fn, devices, transforms)
