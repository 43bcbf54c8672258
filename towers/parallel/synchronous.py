"""What the synchronous strategies share: the loop of many steps in one compiled call.

A strategy adds where its variables live (`_create_variables`), how one step goes
(`_train_step`), and what a tower computes with (`_values`).
"""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.optimizers import Update
from towers.parallel.gradients import (
    check_gradients,
    shares,
    split_batch,
    weighted_mean,
)
from towers.parallel.strategy import (
    COMPUTING,
    IDLE,
    PHASES,
    TRACING,
    WAITING,
    Strategy,
    check_finite,
    variable_names,
)
from towers.parallel.tower import (
    LossFn,
    TowerResult,
    accumulated,
    tower_counts,
    tower_gradients,
    tower_logits,
)
from towers.parallel.walker import Walker

HOST = "/CPU:0"


class Synchronous(Strategy):
    """Towers that meet in every step.

    Args:
        model: a single-device Functional model; its variables are the initial values.
        loss_fn: (logits, labels) -> the loss of each image.
        update: from the mean gradient to the next parameters.
        stream: first step -> the batches of all steps from there on.
        batch_size: images of one micro-batch over all towers.
        accumulate_steps: micro-batches of a step; their mean gradient is applied once.
        devices: one device name per tower.
        sync_batch_norm: whether the towers share the moments of batch normalisation,
            as if one device saw the whole batch.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        loss_fn: LossFn,
        update: Update,
        stream: Callable[[int], tf.data.Dataset],
        batch_size: int,
        devices: Sequence[str],
        accumulate_steps: int = 1,
        sync_batch_norm: bool = False,
    ):
        self._model = model
        self._loss_fn = loss_fn
        self._update = update
        self._stream = stream
        self._devices = list(devices)
        self._sizes = shares(batch_size, len(devices))
        self._accumulate_steps = accumulate_steps
        self._weights = [size / batch_size for size in self._sizes]
        self._names = variable_names(model.trainable_variables)
        self._state_names = variable_names(model.non_trainable_variables)
        self._walker = None
        if sync_batch_norm:
            grid = [[device] for device in self._devices]
            self._walker = Walker(model, loss_fn, grid, sync_batch_norm=True)
        self._create_variables()
        with tf.device(HOST):
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
            self._phase = tf.Variable(IDLE, trainable=False, name="phase")
            self._stop = tf.Variable(False, trainable=False, name="stop")
        self._batches = None
        self._traced = False
        self._train_loop = tf.function(self._loop, autograph=False)
        self._evaluate_batch = tf.function(self._count, autograph=False)

    # What a strategy decides.

    @abc.abstractmethod
    def _create_variables(self) -> None:
        """Makes the variables, with the model's as initial values."""

    @abc.abstractmethod
    def _train_step(
        self, batch: Mapping[str, tf.Tensor]
    ) -> tuple[tf.Tensor, dict[str, tf.Tensor], list[tf.Tensor]]:
        """One step in the graph: (whether it was taken, metrics, mean gradients)."""

    @abc.abstractmethod
    def _values(
        self, tower: int, use_averages: bool
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Parameters, or their averages, and model state for a tower's device."""

    @abc.abstractmethod
    def _named_variables(self) -> dict[str, tf.Variable]:
        """Canonical name -> variable, without the step."""

    def _initial_values(self):
        """Parameters and model state of the model, name -> value."""
        params, state = (
            self._model.trainable_variables,
            self._model.non_trainable_variables,
        )
        return (
            {n: v.value for n, v in zip(self._names, params, strict=True)},
            {n: v.value for n, v in zip(self._state_names, state, strict=True)},
        )

    # Many steps in one compiled call.

    def _loop(self, batches, num_steps):
        def wanted(done, taken, metrics, gradients):
            return (done < num_steps) & taken & ~self._stop.read_value()

        def body(done, taken, metrics, gradients):
            with tf.device(HOST):
                # The phase changes only once the step before is finished.
                with tf.control_dependencies([done, taken]):
                    waiting = self._phase.assign(WAITING, read_value=False)
                with tf.control_dependencies([waiting]):
                    batch = next(batches)
                with tf.control_dependencies(list(batch.values())):
                    computing = self._phase.assign(COMPUTING, read_value=False)
                with tf.control_dependencies([computing]):
                    batch = {name: tf.identity(x) for name, x in batch.items()}
            taken, metrics, gradients = self._train_step(batch)
            return done + 1, taken, metrics, gradients

        metrics = self._zero_metrics()
        gradients = [tf.zeros_like(v.value) for v in self._model.trainable_variables]
        return tf.while_loop(
            wanted,
            body,
            (tf.constant(0), tf.constant(True), metrics, gradients),
            parallel_iterations=1,
        )

    def _results(
        self,
        fetched: Sequence[tuple[list[tf.Tensor], list[tf.Tensor]]],
        batch: Mapping[str, tf.Tensor],
    ) -> list[TowerResult]:
        """What every tower computes from its share of a batch.

        Args:
            fetched: per tower parameters and model state, on its device.
            batch: of the whole step.
        """

        def compute(states, batches):
            variables = [
                (params, state)
                for (params, _), state in zip(fetched, states, strict=True)
            ]
            results = self._compute(variables, batches)
            check_gradients(
                [zip(r.gradients, self._names, strict=True) for r in results]
            )
            return results

        states = [state for _, state in fetched]
        batches = split_batch(batch, self._sizes, self._accumulate_steps)
        return accumulated(compute, states, batches, self._accumulate_steps)

    def _compute(self, variables, batches):
        """Every tower's gradients of its share of one micro-batch."""
        if self._walker is not None:
            grid = [[of_tower] for of_tower in variables]
            found = self._walker.gradients(grid, batches, self._weights)
            return [result for [result] in found]
        results = []
        for tower, ((params, state), share) in enumerate(
            zip(variables, batches, strict=True)
        ):
            with tf.device(self._devices[tower]), tf.name_scope(f"tower_{tower}"):
                results.append(
                    tower_gradients(self._model, self._loss_fn, params, state, share)
                )
        return results

    def _metrics(
        self, results: Sequence[TowerResult], norm: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """The metrics of a step from those of its towers; on the host."""
        num_images = sum(self._sizes) * self._accumulate_steps
        return {
            "loss": weighted_mean([r.loss for r in results], self._weights),
            "total_loss": weighted_mean([r.total_loss for r in results], self._weights),
            "tower_losses": tf.stack([r.loss for r in results]),
            "accuracy": tf.add_n([r.correct for r in results]) / num_images,
            "learning_rate": self._update.learning_rate_fn(self._step.read_value()),
            "gradient_norm": norm,
        }

    def _finite(
        self, norm: tf.Tensor, results: Sequence[Sequence[TowerResult]]
    ) -> tf.Tensor:
        """Whether the loss and gradients of each tower are finite, bool [num_towers].

        What is not finite in one tower is not finite in the mean either, so the towers
        are looked at one by one only where the norm of the mean is not.

        Args:
            norm: of the mean gradient.
            results: per tower those of its shards.
        """
        totals = [of_tower[0].total_loss for of_tower in results]
        all_finite = tf.math.is_finite(norm) & tf.math.is_finite(tf.add_n(totals))

        def one_by_one():
            return tf.stack(
                [
                    tf.reduce_all([r.is_finite() for r in of_tower])
                    for of_tower in results
                ]
            )

        return tf.cond(all_finite, lambda: tf.ones([len(results)], tf.bool), one_by_one)

    def _zero_metrics(self):
        """Metrics of the same form, for the loop to begin with."""
        towers, dtype = len(self._devices), self._model.trainable_variables[0].dtype
        return {
            "loss": tf.zeros([], dtype),
            "total_loss": tf.zeros([], dtype),
            "tower_losses": tf.zeros([towers], dtype),
            "accuracy": tf.zeros([]),
            "learning_rate": tf.zeros([], tf.float64),
            "gradient_norm": tf.zeros([], dtype),
            "finite": tf.ones([towers], tf.bool),
        }

    def train(self, num_steps: int) -> dict:
        if self._batches is None:
            self._batches = iter(self._stream(int(self._step)))
        done, _, metrics, gradients = self._train_loop(
            self._batches, tf.constant(num_steps)
        )
        self._traced = True
        self._phase.assign(IDLE)
        if int(done) == 0:
            return {}
        metrics = {name: value.numpy() for name, value in metrics.items()}
        step = int(self._step)
        check_finite(step + 1, metrics.pop("finite"), metrics["tower_losses"])
        named_gradients = dict(zip(self._names, gradients, strict=True))
        return {"step": step, **metrics, "gradients": named_gradients}

    def describe(self) -> list[str]:
        least, most = min(self._sizes), max(self._sizes)
        share = f"{most}" if least == most else f"{least} or {most}"
        return [f"{len(self._sizes)} tower(s) with {share} images each"]

    def trace(self) -> None:
        """Traces the step without taking one; the first `train` then need not."""
        batches = tf.data.IteratorSpec(self._stream(0).element_spec)
        self._train_loop.get_concrete_function(batches, tf.TensorSpec([], tf.int32))

    def request_stop(self) -> None:
        self._stop.assign(True)

    def progress(self) -> tuple[int, str]:
        phase = int(self._phase)
        if phase == IDLE and not self._traced:
            phase = TRACING
        return int(self._step), PHASES[phase]

    # Evaluation.

    def _count(self, batch, use_averages):
        size = batch["labels"].shape[0]
        sizes = shares(size, min(size, len(self._devices)))
        counts = []
        shares_of_towers = split_batch(batch, sizes)
        logits = self._logits(shares_of_towers, use_averages)
        for tower, share in enumerate(shares_of_towers):
            with tf.device(self._devices[tower]):
                counts.append(tower_counts(self._loss_fn, logits[tower], share))
        with tf.device(HOST):
            return {name: tf.add_n([c[name] for c in counts]) for name in counts[0]}

    def _logits(self, batches, use_averages):
        """Every tower's logits of its share, in inference."""
        found = []
        for tower, share in enumerate(batches):
            with tf.device(self._devices[tower]), tf.name_scope(f"tower_{tower}"):
                params, state = self._values(tower, use_averages)
                found.append(tower_logits(self._model, params, state, share))
        return found

    def evaluate(
        self, batches: Iterable[Mapping[str, tf.Tensor]], use_averages: bool = False
    ) -> dict[str, float]:
        if use_averages and not self._update.ema_decay:
            raise ValueError("this run keeps no moving averages: its ema_decay is 0")
        totals = {"correct": 0.0, "images": 0.0, "loss": 0.0}
        for batch in batches:
            counts = self._evaluate_batch(dict(batch), use_averages)
            for name, value in counts.items():
                totals[name] += float(value)
        return totals

    # The canonical state.

    def state(self) -> dict[str, np.ndarray]:
        named = self._named_variables() | {"step": self._step}
        return {name: variable.numpy() for name, variable in named.items()}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        named = self._named_variables() | {"step": self._step}
        for name, variable in named.items():
            variable.assign(state[name])
        self._batches = None
