"""Evaluation on all devices, with test-time augmentation."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import keras
import numpy as np
import tensorflow as tf

from towers.data.augment.tta import Transform
from towers.optim import losses
from towers.optim.phases import phases_of
from towers.parallel import compilation, loop
from towers.parallel.copies import Values, Weights, copies_on
from towers.parallel.devices import CPU, HOST
from towers.parallel.reduce import on_each, shares, split_batch
from towers.parallel.sharding.network import SplitTowers
from towers.parallel.towers import LossFn, Towers, top_class, tower_counts
from towers.parallel.workers import SINGLE_WORKER, Workers

# Target duration of one compiled call; between calls a stop request is served.
CALL_SECS = 1.0

Counts = dict[str, Any]
T = TypeVar("T")
U = TypeVar("U")


@dataclasses.dataclass(frozen=True)
class Evaluation(Generic[T]):
    """Results of an evaluation, such as counts, for one or two kinds of weights."""

    by_weights: Mapping[Weights, T]

    @property
    def reported_weights(self) -> Weights:
        """Return the weights that a run reports: the EMA weights if evaluated."""
        return Weights.EMA if Weights.EMA in self.by_weights else Weights.RAW

    @property
    def reported(self) -> T:
        """Return the result that a run reports."""
        return self.by_weights[self.reported_weights]

    def map(self, function: Callable[[T], U]) -> "Evaluation[U]":
        """Apply a function to the result of each kind of weights."""
        return Evaluation({k: function(x) for k, x in self.by_weights.items()})


@dataclasses.dataclass(eq=False)
class Evaluator:
    """Computes the logits of batches, and counts correct predictions.

    `fetch` returns, per device, values of the network for a kind of weights; `devices`
    has the first device of each tower. Each worker has its part of every batch. With
    `keeps_logits`, or a multi-label loss, `counts` returns all logits.
    """

    fetch: Callable[[Weights], list[Values]]
    network: Towers | SplitTowers
    loss_fn: LossFn
    devices: Sequence[str]
    transforms: Sequence[Transform]
    workers: Workers = SINGLE_WORKER
    num_shards: int = 1
    keeps_logits: bool = False
    compiled: compilation.Compilation = compilation.CPU_STEP

    def __post_init__(self):
        self._multi_label = getattr(self.loss_fn, "multi_label", False)
        self.keeps_logits = self.keeps_logits or self._multi_label
        self._calls: Callable[..., Any] = functools.cache(self._compile)
        self._predict_batch = tf.function(self._predict, autograph=False)

    def counts(
        self,
        feed: loop.Feed,
        num_batches: int,
        weights: Sequence[Weights] = (Weights.RAW,),
        heartbeat: Callable[[], None] = lambda: None,
    ) -> Evaluation[Counts]:
        """Sum `tower_counts` over batches, for all weights in one pass.

        The feed gives each tower its part of every batch, with "mask" and "positions".
        Calls are compiled per feed object: use the same one for every evaluation of the
        same images. `heartbeat` is called after each compiled call.

        Returns:
            "correct" and "images", whole numbers, and "loss", the sum over the images;
            with test-time augmentation also "correct_tta"; "predictions", float64
            [images, 3]: label, `top_class`, and loss of each image in the order of
            positions; "probabilities", float64 [images], of these classes. If logits
            are kept, "logits", float32 [images, num_classes]. With label sets "labels",
            bool [images, num_classes]; then the first column of "predictions" is 0.
        """
        feed.restart()
        iterators = feed.start(0, 0)
        with self.compiled.step_options():
            count_batches = self._calls(feed, tuple(weights))
        totals: list[Counts] = []
        pieces, done, num = [], 0, 1
        while done < num_batches:
            # Sums over workers are matched by their order in a call.
            own = {"num": np.array(min(num, num_batches - done))}
            num = int(self.workers.broadcast(own)["num"])
            started = time.monotonic()
            with tf.device(HOST):
                arguments = tf.constant(done, tf.int64), tf.constant(num, tf.int64)
            with self.compiled.step_options():
                counts, predictions = count_batches(iterators, *arguments)
            sums = [{k: v.numpy() for k, v in x.items()} for x in counts]
            pieces.append(predictions.numpy())
            totals = _added(totals, sums) if totals else sums
            done += num
            secs = max(time.monotonic() - started, 1e-3)
            num = max(1, min(2 * num, int(num * CALL_SECS / secs)))
            heartbeat()
        results: dict[Weights, Counts] = {}
        for kind, total in zip(weights, totals, strict=True):
            values = self.workers.add(np.array(list(total.values())))
            results[kind] = dict(zip(total, values.tolist(), strict=True))
        rows = np.concatenate(pieces)  # Images of this worker.
        rows = rows.reshape(-1, rows.shape[-1])
        rows = rows[rows[:, 1] > 0]
        ordered = np.zeros([int(results[weights[0]]["images"]), rows.shape[1]])
        ordered[rows[:, 0].astype(np.int64)] = rows
        ordered = self.workers.add(ordered)
        num_kept = 0
        if self.keeps_logits:  # Columns: position, weight, label; then per kind.
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
            if self.keeps_logits:
                result["logits"] = values[:, 3:].astype(np.float32)
            if self._multi_label:
                result["labels"] = labels > 0
        return Evaluation(results)

    def _compile(self, feed, weights):
        """Compile (iterators, first batch, number of batches) -> counts per weights."""

        def count_batch(pieces):
            counts, predicted = [], []
            for kind in weights:
                logits, means = self._compute(self.fetch(kind), pieces)
                counts.append(self._sum_counts(logits, pieces))
                if means:
                    correct = self._sum_counts(means, pieces)["correct"]
                    counts[-1]["correct_tta"] = correct
                predicted += self._predictions(logits, pieces)
            with tf.device(HOST):
                names = ["positions", "mask", "labels"]
                columns = [tf.concat([p[k] for p in pieces], 0) for k in names]
                if self._multi_label:
                    columns.insert(2, tf.zeros_like(columns[1]))
                columns = [tf.cast(x, tf.float64) for x in columns + predicted]
                size = columns[0].shape[0]
                rows = tf.concat([tf.reshape(x, [size, -1]) for x in columns], 1)
            return counts, rows

        count = tf.function(
            count_batch, autograph=False, experimental_attributes={"_noinline": True}
        )
        waits_for_host = CPU.has(self.devices)

        def count_batches(iterators, first, num_batches):
            with tf.device(HOST):  # The arguments are there.
                first = tf.identity(first)

            def should_continue(done, *_):
                return done < num_batches

            def add(done, totals, predictions, numbers):
                with loop.inside_of_loop():
                    with tf.device(HOST):
                        on_host = [first + done] * len(feed.devices)
                    awaited = feed.wait(iterators, numbers or on_host)
                    pieces = loop.make_batches(feed, awaited, numbers or on_host)
                    call = count if waits_for_host else count.python_function
                    counts, rows = call(pieces)
                    with tf.device(HOST):
                        predictions = predictions.write(tf.cast(done, tf.int32), rows)
                    numbers = loop.add_on_each(gpus, numbers, 1)
                    return done + 1, _added(totals, counts), predictions, numbers

            with tf.device(HOST):
                names = ["correct", "images", "loss"]
                names += ["correct_tta"] if self.transforms else []
                zeros = [{k: tf.zeros([], tf.float64) for k in names} for _ in weights]
                size = tf.cast(num_batches, tf.int32)
                rows = tf.TensorArray(tf.float64, size, infer_shape=False)
                # Each GPU counts the batches: a number from the host would drain it.
                gpus = [] if waits_for_host else feed.devices
                numbers = loop.add_on_each(gpus, [first] * len(gpus), 0)
                begin = tf.zeros([], tf.int64), zeros, rows, numbers
                with loop.around_loop():
                    _, totals, rows, _ = tf.while_loop(
                        should_continue, add, begin, parallel_iterations=1
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
        """Compute batches with the "mask" of the images in one process.

        Yields:
            Per batch and kind of weights, for its n images whose mask is 1: "logits"
            [n, num_classes]; "labels" and "loss" [n] if it has labels; with test-time
            augmentation "logits_tta", float64 [n, num_classes].
        """
        for batch in batches:
            counts = np.asarray(batch["mask"]) > 0
            with self.compiled.step_options():
                outputs = self._predict_batch(dict(batch), tuple(weights))
            yield {
                kind: {name: value.numpy()[counts] for name, value in output.items()}
                for kind, output in zip(weights, outputs, strict=True)
            }

    def _predict(self, batch, weights):
        size = batch["mask"].shape[0]
        with tf.device(HOST):
            pieces = split_batch(batch, shares(size, min(size, len(self.devices))))
        outputs = []
        for kind in weights:
            logits, means = self._compute(self.fetch(kind), pieces)
            with tf.device(HOST):
                outputs.append({"logits": tf.concat(logits, 0)})
                if "labels" in batch:
                    labels = tf.identity(batch["labels"])
                    loss = self.loss_fn(outputs[-1]["logits"], batch["labels"])
                    outputs[-1] |= {"labels": labels, "loss": loss}
                if means:
                    outputs[-1]["logits_tta"] = tf.concat(means, 0)
        return outputs

    def _compute(self, fetched, pieces):
        """Return logits per tower, and the means over transforms, if there are any."""
        logits = self._logits(fetched, pieces)
        if not self.transforms:
            return logits, []
        return logits, self._mean_logits(fetched, pieces, logits)

    def _logits(self, fetched, pieces):
        return self.network.logits(fetched[: self.num_shards * len(pieces)], pieces)

    def _sum_counts(self, logits, pieces):
        count = functools.partial(tower_counts, self.loss_fn)
        counts = on_each(count, self.devices[: len(pieces)], logits, pieces)
        with tf.device(HOST):
            return {name: tf.add_n([c[name] for c in counts]) for name in counts[0]}

    def _predictions(self, logits, pieces):
        def predict(output, piece):
            losses = self.loss_fn(output, piece["labels"])
            wide = tf.cast(output, losses.dtype)
            probabilities = tf.reduce_max(tf.nn.softmax(wide), 1)
            kept = [wide] if self.keeps_logits else []
            return [top_class(output), losses, probabilities, *kept]

        columns = on_each(predict, self.devices[: len(pieces)], logits, pieces)
        with tf.device(HOST):
            return [tf.concat(x, 0) for x in zip(*columns, strict=True)]

    def _mean_logits(self, fetched, pieces, plain):
        totals = [0.0] * len(pieces)
        for weight, transform in self.transforms:
            logits = plain
            if transform is not None:
                images = [piece["images"] for piece in pieces]
                images = on_each(transform, self.devices[: len(pieces)], images)
                pairs = zip(pieces, images, strict=True)
                logits = self._logits(fetched, [x | {"images": y} for x, y in pairs])
            for tower, output in enumerate(logits):
                with tf.device(self.devices[tower]):
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
    """Return an evaluator of a network, whose output without TTA need not be logits."""
    layout, copies = copies_on(model, devices)
    compiled, loss_fn = compilation.choose(devices, [model]), losses.cross_entropy
    network = Towers(phases_of((), model), loss_fn, layout, devices, compiled)

    def fetch(_):
        return [copy.read() for copy in copies]

    return Evaluator(fetch, network, loss_fn, devices, transforms, compiled=compiled)
