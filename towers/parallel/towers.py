"""Strategy `towers`: one set of variables, fetched by every tower in every step.

The variables are pinned to the parameter device, by default the CPU. In each step every
tower fetches them to its own device and computes the gradients of its share of the
batch; the parameter device averages the gradients and updates the variables once.

Elsewhere: TensorFlow's CIFAR-10 multi-GPU tutorial, CentralStorageStrategy,
tf_cnn_benchmarks' `parameter_server`, tensorpack's SyncMultiGPUTrainerParameterServer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.optimizers import Update
from towers.parallel.gradients import (
    average_gradients,
    average_states,
    shares,
    split_batch,
    squared_norm,
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
from towers.parallel.tower import LossFn, tower_counts, tower_gradients


class Towers(Strategy):
    """Synchronous towers around one set of variables.

    Args:
        model: a single-device Functional model; its variables are the initial values.
        loss_fn: (logits, labels) -> the loss of each image.
        update: from the mean gradient to the next parameters.
        stream: first step -> the batches of all steps from there on.
        batch_size: images of one step over all towers.
        devices: one device name per tower.
        parameter_device: where the variables live and the gradients are averaged.
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
        parameter_device: str = "/CPU:0",
    ):
        self._model = model
        self._loss_fn = loss_fn
        self._update = update
        self._stream = stream
        self._devices = list(devices)
        self._parameter_device = parameter_device
        self._sizes = shares(batch_size, len(devices))
        self._weights = [size / batch_size for size in self._sizes]
        self._names = variable_names(model.trainable_variables)
        self._state_names = variable_names(model.non_trainable_variables)
        self._create_variables()
        self._batches = None
        self._tracing = True
        self._train_loop = tf.function(self._loop, autograph=False)
        self._evaluate_batch = tf.function(self._count, autograph=False)

    def _create_variables(self):
        """All variables of the run, under the parameter scope."""
        model = self._model
        with tf.device(self._parameter_device):
            self._params = [
                tf.Variable(v.value, name=f"params/{name}")
                for name, v in zip(self._names, model.trainable_variables, strict=True)
            ]
            self._state = [
                tf.Variable(v.value, name=f"state/{name}", trainable=False)
                for name, v in zip(
                    self._state_names, model.non_trainable_variables, strict=True
                )
            ]
            self._slots = [
                {
                    slot: tf.Variable(tf.zeros_like(param), trainable=False)
                    for slot in self._update.optimizer.slots
                }
                for param in self._params
            ]
            self._averages = [
                tf.Variable(param, trainable=False)
                for param in self._params
                if self._update.ema_decay
            ]
        with tf.device("/CPU:0"):
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="step")
            self._phase = tf.Variable(IDLE, trainable=False, name="phase")
            self._stop = tf.Variable(False, trainable=False, name="stop")

    # A step.

    def _fetch(self, params):
        """The parameters and the model state on the device in scope."""
        return [tf.identity(p) for p in params], [tf.identity(s) for s in self._state]

    def _train_step(self, batch):
        """One step in the graph: (whether it was taken, metrics, mean gradients)."""
        results = []
        for tower, share in enumerate(split_batch(batch, self._sizes)):
            with tf.device(self._devices[tower]), tf.name_scope(f"tower_{tower}"):
                params, state = self._fetch(self._params)
                results.append(
                    tower_gradients(self._model, self._loss_fn, params, state, share)
                )
        with tf.device(self._parameter_device):
            tower_grads = [zip(r.gradients, self._names, strict=True) for r in results]
            gradients = [g for g, _ in average_gradients(tower_grads, self._weights)]
            norm = tf.sqrt(squared_norm(gradients))
            state = average_states([r.state for r in results], self._weights)
        with tf.device("/CPU:0"):
            finite = tf.stack([r.finite for r in results])
            metrics = {
                "loss": weighted_mean([r.loss for r in results], self._weights),
                "total_loss": weighted_mean(
                    [r.total_loss for r in results], self._weights
                ),
                "tower_losses": tf.stack([r.loss for r in results]),
                "accuracy": tf.add_n([r.correct for r in results]) / sum(self._sizes),
                "learning_rate": self._update.learning_rate_fn(self._step),
                "gradient_norm": norm,
                "finite": finite,
            }
            taken = tf.cond(
                tf.reduce_all(finite),
                lambda: self._apply(norm, gradients, state),
                lambda: False,
            )
        return taken, metrics, gradients

    def _apply(self, norm, gradients, state):
        """The one update of the step."""
        with tf.device(self._parameter_device):
            params, slots, averages = self._update(
                self._step.read_value(),
                norm,
                [p.read_value() for p in self._params],
                [{k: v.read_value() for k, v in s.items()} for s in self._slots],
                [a.read_value() for a in self._averages],
                gradients,
            )
            assignments = [
                variable.assign(value, read_value=False)
                for variable, value in zip(
                    self._params + self._averages + self._state,
                    params + averages + state,
                    strict=True,
                )
            ]
            for slot_variables, slot_values in zip(self._slots, slots, strict=True):
                for name, variable in slot_variables.items():
                    assignments.append(
                        variable.assign(slot_values[name], read_value=False)
                    )
        with tf.control_dependencies(assignments), tf.device("/CPU:0"):
            with tf.control_dependencies([self._step.assign_add(1)]):
                return tf.constant(True)

    # Many steps in one compiled call.

    def _loop(self, batches, num_steps):
        def wanted(done, taken, metrics, gradients):
            return (done < num_steps) & taken & ~self._stop.read_value()

        def body(done, taken, metrics, gradients):
            with tf.device("/CPU:0"):
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

        towers = len(self._devices)
        loss_type = self._params[0].dtype
        metrics = {
            "loss": tf.zeros([], loss_type),
            "total_loss": tf.zeros([], loss_type),
            "tower_losses": tf.zeros([towers], loss_type),
            "accuracy": tf.zeros([]),
            "learning_rate": tf.zeros([], tf.float64),
            "gradient_norm": tf.zeros([], loss_type),
            "finite": tf.ones([towers], tf.bool),
        }
        with tf.device(self._parameter_device):
            gradients = [tf.zeros_like(param) for param in self._params]
        return tf.while_loop(
            wanted,
            body,
            (tf.constant(0), tf.constant(True), metrics, gradients),
            parallel_iterations=1,
        )

    def train(self, num_steps: int) -> dict:
        if self._batches is None:
            self._batches = iter(self._stream(int(self._step)))
        done, _, metrics, gradients = self._train_loop(
            self._batches, tf.constant(num_steps)
        )
        self._tracing = False
        self._phase.assign(IDLE)
        if int(done) == 0:
            return {}
        metrics = {name: value.numpy() for name, value in metrics.items()}
        step = int(self._step)
        check_finite(step + 1, metrics.pop("finite"), metrics["tower_losses"])
        named_gradients = dict(zip(self._names, gradients, strict=True))
        return {"step": step, **metrics, "gradients": named_gradients}

    # Evaluation.

    def _count(self, batch, use_averages):
        size = batch["labels"].shape[0]
        sizes = shares(size, min(size, len(self._devices)))
        counts = []
        for tower, share in enumerate(split_batch(batch, sizes)):
            with tf.device(self._devices[tower]), tf.name_scope(f"tower_{tower}"):
                params, state = self._fetch(
                    self._averages if use_averages else self._params
                )
                counts.append(
                    tower_counts(self._model, self._loss_fn, params, state, share)
                )
        with tf.device("/CPU:0"):
            return {k: tf.add_n([c[k] for c in counts]) for k in counts[0]}

    def evaluate(
        self, batches: Iterable[Mapping[str, tf.Tensor]], use_averages: bool = False
    ) -> dict[str, float]:
        if use_averages and not self._averages:
            raise ValueError("this run keeps no moving averages: its ema_decay is 0")
        totals = {"correct": 0.0, "images": 0.0, "loss": 0.0}
        for batch in batches:
            counts = self._evaluate_batch(dict(batch), use_averages)
            for name, value in counts.items():
                totals[name] += float(value)
        return totals

    # The canonical state.

    def _named_variables(self):
        named = {}
        for name, variable in zip(self._names, self._params, strict=True):
            named[f"params/{name}"] = variable
        for name, variable in zip(self._state_names, self._state, strict=True):
            named[f"state/{name}"] = variable
        for name, slots in zip(self._names, self._slots, strict=True):
            for slot, variable in slots.items():
                named[f"slots/{name}/{slot}"] = variable
        for name, variable in zip(self._names, self._averages, strict=False):
            named[f"averages/{name}"] = variable
        return named | {"step": self._step}

    def state(self) -> dict[str, np.ndarray]:
        return {name: v.numpy() for name, v in self._named_variables().items()}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        for name, variable in self._named_variables().items():
            variable.assign(state[name])
        self._batches = None

    def request_stop(self) -> None:
        self._stop.assign(True)

    def progress(self) -> tuple[int, str]:
        phase = int(self._phase)
        if self._tracing and phase == IDLE:
            phase = TRACING
        return int(self._step), PHASES[phase]
