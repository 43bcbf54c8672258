"""The trainer of towers that update shared variables independently.

The variables are on the parameter device, as in strategy `towers`. Every tower has a
thread: it takes its share of the next batch, fetches the variables, computes gradients
and applies them at once; meanwhile others may have updated the variables. Fetch and
apply hold one lock, so that a fetch is consistent and no update is lost. One step is
num_towers updates, one by each tower; docs/async_towers.md has the differences from a
synchronous update.

Elsewhere: tensorpack's AsyncMultiGPUTrainer; Downpour SGD (Dean et al. 2012) with one
parameter server.
"""

import functools
import itertools
from typing import Any

import numpy as np
import tensorflow as tf

from towers.optim.losses import WeightDecay
from towers.optim.phases import steps_within
from towers.parallel.compilation import specs
from towers.parallel.coordinator import Coordinator
from towers.parallel.copies import Values
from towers.parallel.finite import TOO_MANY_IN_A_ROW, not_finite_error
from towers.parallel.loop import ACTIVITIES, COMPUTING, IDLE, TRACING, WAITING
from towers.parallel.reduce import squared_norm, tower_weights
from towers.parallel.step import zero_frozen
from towers.parallel.trainer import Trainer


class AsynchronousTrainer(Trainer):
    """Towers that do not synchronize within a call of `train`.

    After an error, applied updates stay; the next call continues at the step that all
    towers have made. If only some have made a step, or an update failed, the state is
    inconsistent, and the activity remains "computing" until another state is loaded.

    `async_scale_gradients` multiplies gradients by the tower's fraction of the batch;
    otherwise each update is as large as one of a whole batch. For `max_staleness` see
    `Coordinator`.
    """

    def __init__(
        self, *parts: Any, async_scale_gradients: bool = True, max_staleness: int = 0
    ):
        super().__init__(*parts)
        [self._copy] = self.strategy.copies
        num_towers = len(self.devices)
        self._weights = tower_weights(self.strategy.sizes)
        self._scales = self._weights if async_scale_gradients else [1.0] * num_towers
        # Threads start here: during a run memory for a thread may be lacking.
        self.coordinator = Coordinator(
            num_towers, self.step, max_staleness=max_staleness
        )
        self._phase, self._is_compiled, self._is_training = 0, False, False
        self._is_torn = False  # The state is inconsistent.
        # Metrics of each tower's last update, and the most recent gradients.
        self._tower_metrics: list[dict[str, Any]] = [{} for _ in self.devices]
        self._gradients: list[tf.Tensor] = []
        self._sums = np.zeros(3)  # "sums" of a call of `train`.
        self._restart()

    # The compiled calls.

    def _compile(self):
        """Trace all calls in the main thread, where errors are raised as usual."""
        if self._is_compiled:
            return
        copy = self._copy
        parts = copy.params, copy.state, copy.integers, [copy.step]
        values = Values(*map(specs, parts))
        steps = [tf.constant(self.step, tf.int64)] * len(self.devices)
        awaited = self.feed.wait(self.feed.start(self.step, 1), steps)
        self.feed.restart()
        number = tf.TensorSpec([], tf.int64)
        self._batch_calls = [
            _traced(functools.partial(self.feed.batch, tower), specs(x), number)
            for tower, x in enumerate(awaited)
        ]
        batches = [specs(call.structured_outputs) for call in self._batch_calls]
        self._fetch_calls = [
            _traced(lambda device=device: copy.fetch().copied_to(device))
            for device in self.devices
        ]
        self._compute_calls = [
            [
                _traced(functools.partial(self._step, phase, tower), values, batch)
                for tower, batch in enumerate(batches)
            ]
            for phase in range(len(self.phases))
        ]
        tower = tf.TensorSpec([], tf.int32)
        norm = tf.TensorSpec([], values.params[0].dtype)
        state = values.state, values.integers
        self._apply_call = _traced(self._update, tower, norm, values.params, state)
        self._averages_call = _traced(self._move_averages)
        self._is_compiled = True

    def _step(self, phase, tower, values, batch):
        """Return a tower's gradients with weight decay, its new state and metrics."""
        [result] = self.towers.gradients(phase, [values], [batch], first_tower=tower)
        layout = self._copy.layout.params
        with tf.device(self.devices[tower]):
            add_decay = WeightDecay(self.model.trainable_variables, layout)
            decay, gradients = add_decay(values.params, result.gradients)
            gradients = zero_frozen(gradients, layout, self.phases[phase].frozen)
            total_loss = result.loss + tf.cast(decay, result.loss.dtype)
            norm = tf.sqrt(squared_norm(gradients))
            finite = tf.math.is_finite(total_loss + norm)
        with tf.device(self._copy.device):
            # Copied now, not while the lock is held.
            gradients = [tf.identity(gradient) for gradient in gradients]
            state = tf.nest.map_structure(tf.identity, (result.state, result.integers))
        metrics = {
            "loss": result.loss,
            "total_loss": total_loss,
            "correct": result.correct,
            "gradient_norm": norm,
            "finite": finite,
        }
        return gradients, state, metrics

    def _update(self, tower, norm, gradients, state):
        """Update the shared variables."""
        copy, (state, integers) = self._copy, state
        update_fn = self.update_fn
        with tf.device(copy.device):
            # Clipping uses the norm before scaling.
            scale = tf.gather(tf.constant(self._scales, tf.float64), tower)
            scaled = [g * tf.cast(scale, g.dtype) for g in gradients]
            arguments = *copy.update_arguments(), scaled, norm
            squares = update_fn.squares(*arguments)
            params, slots = update_fn(*arguments, squares, self.read_rate_factor())
            integers = [
                tf.where(tower == 0, new, old)
                for new, old in zip(integers, copy.read(copy.integers), strict=True)
            ]
            values = [*params, *state, *integers, *itertools.chain(*slots.values())]
            # Averages and the number of steps are the last variables.
            for variable, value in zip(copy.variables(), values, strict=False):
                variable.assign(value, read_value=False)
        if self.guard.skips:
            self._count(True)

    def _move_averages(self):
        copy = self._copy
        with tf.device(copy.device):
            values = copy.read([*copy.params, *copy.state])
            moved = copy.moved_averages(values, self.update_fn.ema_decay)
            for variable, value in zip(copy.averages, moved, strict=True):
                variable.assign(value, read_value=False)

    def _count(self, is_finite):
        with tf.device(self.guard.device):
            self.guard.decide(tf.constant(is_finite), self.guard.is_running())

    # The threads of the towers.

    def _next_batches(self):
        """Return each tower's share of the next batch, on its device."""
        number, batches = tf.constant(self._num_drawn, tf.int64), []
        awaited = self.feed.wait(self._iterators, [number] * len(self.devices))
        for tower, device in enumerate(self.devices):
            with tf.device(device):
                batches.append(self._batch_calls[tower](awaited[tower], number))
        self._num_drawn += 1
        return batches

    def _run_tower(self, tower):
        while (share := self.coordinator.take_share(tower)) is not None:
            self._apply(tower, *self._compute(tower, self._fetch(tower), share))

    def _fetch(self, tower):
        # Outputs of a call are copied to the device in scope.
        with self.coordinator.fetch(tower), tf.device(self.devices[tower]):
            return self._fetch_calls[tower]()

    def _compute(self, tower, values, share):
        # Results are on the device of the variables already: do not copy them back.
        with tf.device(self._copy.device):
            call = self._compute_calls[self._phase][tower]
            gradients, state, metrics = call(values, share)
        # Reading them waits for the device.
        metrics = {name: value.numpy() for name, value in metrics.items()}
        if not (metrics["finite"] or self.guard.skips):
            raise self._not_finite_error(tower, metrics)
        return gradients, state, metrics

    def _apply(self, tower, gradients, state, metrics):
        with self.coordinator.apply(tower) as number:
            in_a_row = self.guard.num_in_a_row()
            if not metrics["finite"] and in_a_row + 1 >= TOO_MANY_IN_A_ROW:
                raise self._not_finite_error(tower, metrics)
            ends_step = (number + 1) % len(self.devices) == 0
            try:
                if metrics["finite"]:
                    with tf.device(self._copy.device):
                        norm = metrics["gradient_norm"]
                        self._apply_call(tf.constant(tower), norm, gradients, state)
                        if ends_step:
                            self._averages_call()
                    self._gradients = gradients
                else:
                    self._count(False)
                if ends_step:
                    self._copy.step.assign_add(1)
            except BaseException:
                self._is_torn = True
                raise
            self._tower_metrics[tower] = metrics
            if np.isfinite(metrics["loss"]):
                weight = self._weights[tower]
                self._sums += [weight * metrics["loss"], metrics["correct"], weight]

    def _not_finite_error(self, tower, metrics):
        return not_finite_error(
            self.coordinator.begun[tower],
            np.arange(len(self.devices)) != tower,
            np.full(len(self.devices), metrics["loss"]),
            learning_rate=self.learning_rate(self.step),
            gradient_norm=metrics["gradient_norm"],
            skips=self.guard.skips,
            consequence="the update was not applied",
        )

    # The contract.

    def train(self, num_steps):
        before = self.step
        self._compile()
        self._iterators = self.feed.start(before, num_steps)
        self._is_training = True
        self._sums[:] = 0
        self._phase, num_steps = steps_within(self.phases, before, num_steps)
        try:
            self.coordinator.run(num_steps, self._next_batches, self._run_tower)
        except BaseException:
            self._is_torn |= len(set(self.coordinator.applied)) > 1
            self._restart()
            raise
        finally:
            self._is_training = False
        return self._metrics() if self.step > before else {}

    def _metrics(self):
        """Return the metrics of the last step."""
        step, per_tower = self.step, self._tower_metrics
        values = {k: np.array([x[k] for x in per_tower]) for k in per_tower[0]}
        return {
            "step": step,
            "loss": np.dot(self._weights, values["loss"]),
            "total_loss": np.dot(self._weights, values["total_loss"]),
            "tower_losses": values["loss"],
            "accuracy": np.sum(values["correct"]) / sum(self.strategy.sizes),
            "learning_rate": self.learning_rate(step - 1),
            "gradient_norm": np.mean(values["gradient_norm"]),
            "staleness": np.array(self.coordinator.staleness),
            "sums": tuple(self._sums.tolist()),
            "input_wait_secs": np.mean(self.coordinator.input_wait_secs),
            **self.guard.num_skipped(),
        }

    def gradients(self, batch):
        """Return the gradients of the last update, not those of the batch."""
        vectors = [vector.numpy() for vector in self._gradients]
        return self._copy.layout.params.read(vectors) if vectors else {}

    def trace(self):
        self._compile()
        calls = [*self._fetch_calls, self._apply_call, self._averages_call]
        return [call.graph for call in sum(self._compute_calls, calls)]

    def request_stop(self):
        self.coordinator.request_stop()

    def progress(self):
        """Return steps taken and activity; "computing" names the slowest tower."""
        steps, is_between_steps, tower = self.coordinator.progress()
        if not self._is_compiled:
            return steps, ACTIVITIES[TRACING]
        if is_between_steps and not self._is_torn:
            return steps, ACTIVITIES[WAITING if self._is_training else IDLE]
        name = "" if tower is None else f" (tower {tower})"
        return steps, ACTIVITIES[COMPUTING] + name

    def state(self):
        with self.coordinator.lock:
            return super().state()

    def load(self, state):
        super().load(state)
        self._is_torn = False

    def describe(self):
        where, *others = super().describe()
        return [f"{where}, which each tower updates alone", *others]

    def _restart(self):
        if self.feed:
            self.feed.restart()
        self._num_drawn = self.step
        self.coordinator.restart(self.step)


def _traced(call, *signature):
    return tf.function(call, autograph=False).get_concrete_function(*signature)
