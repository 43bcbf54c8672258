"""Strategy `async_towers`: one set of variables, updated by every tower on its own.

The variables are pinned to the parameter device, as those of `towers`. Every tower has
a thread and compiled calls of its own: it takes its share of the next batch, fetches
the variables, computes the gradients and applies them the moment they are ready;
meanwhile others may have moved the variables. Fetch and apply hold one lock, so that a
fetch is one consistent state and no update is lost. One step is num_towers updates, one
by each tower. They differ from one synchronous update in this:

    gradients    are scaled by the tower's share of the batch (1/num_towers where it
                 divides), so that a pass over the data moves the parameters as far
    clipping     acts on each tower's own gradient, before the scaling
    rate         is that of the whole steps applied so far, num_towers updates each
    averages     move with every num_towers-th update, and so reach as far back
    model state  is replaced by what the tower computed, so the last one stays; entries
                 that are not floats are taken from the first tower alone

Towers that are equally fast see a staleness of num_towers - 1: a lower max_staleness
makes them wait for each other, a higher one cuts off what slow towers would add.

Elsewhere: tensorpack's AsyncMultiGPUTrainer; Downpour SGD (Dean et al. 2012) with one
parameter server.
"""

import functools

import numpy as np
import tensorflow as tf

from towers.optim.phases import steps_within
from towers.parallel.coordinator import Coordinator
from towers.parallel.devices import HOST
from towers.parallel.gradients import split_batch, squared_norm
from towers.parallel.strategy import (
    COMPUTING,
    IDLE,
    PHASES,
    TRACING,
    WAITING,
    not_finite,
)
from towers.parallel.trainer import TowerStrategy
from towers.parallel.variables import Variables


class AsyncTowers(TowerStrategy):
    """Towers that do not meet within a call of `train`.

    After an error every update that was applied stays; the next call continues at the
    whole steps that they make.

    Args:
        parameter_device: where the variables live and are updated.
        scale_gradients: by the tower's share of the batch; otherwise each update goes
            as far as one of a whole batch.
        max_staleness, record: as in `Coordinator`.
        The other arguments are those of `TowerStrategy`.
    """

    def __init__(
        self,
        *args,
        parameter_device: str = HOST,
        scale_gradients: bool = True,
        max_staleness: int = 0,
        record: list[tuple[str, int, int]] | None = None,
        **kwargs,
    ):
        self._parameter_device = parameter_device
        super().__init__(*args, **kwargs)
        num_towers = len(self._devices)
        self._scales = self._weights if scale_gradients else [1.0] * num_towers
        self._new_coordinator = functools.partial(
            Coordinator, num_towers, max_staleness=max_staleness, record=record
        )
        self._coordinator = self._new_coordinator(0)
        self._batches = None
        self._traced = self._is_training = False
        self._stage = 0
        # Of each tower's last update; the gradients of the last one of all.
        self._tower_metrics = [{} for _ in self._devices]
        self._gradients = []

    def _create_variables(self):
        with tf.device(self._parameter_device):
            self._variables = Variables(*self._initial_values(), self._update)

    def describe(self):
        where = f"variables on {self._parameter_device}, which each tower updates alone"
        return [where, *super().describe()]

    def _named_variables(self):
        return self._variables.named()

    def _variable_sets(self):
        return [self._variables]

    def _graphs(self):
        if not self._traced:
            self._trace(self._stream(0).element_spec)
        # Of the updates, one at a time.
        return [
            [call.graph for call in (*calls, self._apply_calls[True])]
            for calls in self._compute_calls
        ]

    def _logits(self, batches, use_averages):
        return self._logits_of_whole(
            batches, lambda tower: self._variables.fetch(use_averages)
        )

    # What the threads do.

    def _draw_shares(self):
        """Every tower's share of the next batch, on its device."""
        with tf.device(HOST):
            shares = split_batch(self._batches.get_next(), self._sizes)
        for tower, device in enumerate(self._devices):
            with tf.device(device):
                shares[tower] = {k: tf.identity(v) for k, v in shares[tower].items()}
        return shares

    def _run_tower(self, tower):
        while (share := self._coordinator.take_share(tower)) is not None:
            params, state = self._fetch(tower)
            gradients, state, metrics = self._compute(tower, params, state, share)
            self._apply(tower, gradients, state, metrics)

    def _fetch(self, tower):
        # The outputs of a call go to the device in scope, whatever is inside.
        with self._coordinator.fetch(tower), tf.device(self._devices[tower]):
            return self._fetch_calls[tower]()

    def _compute(self, tower, params, state, share):
        with tf.device(self._devices[tower]):
            call = self._compute_calls[self._stage][tower]
            gradients, state, metrics = call(params, state, share)
        # To read them is to wait for the device.
        metrics = {name: value.numpy() for name, value in metrics.items()}
        if not metrics["finite"]:
            raise not_finite(
                self._coordinator.num_begun(tower),
                np.arange(len(self._devices)) != tower,
                np.full(len(self._devices), metrics["loss"]),
                "the update was not applied",
            )
        return gradients, state, metrics

    def _apply(self, tower, gradients, state, metrics):
        norm = tf.constant(metrics["gradient_norm"])
        with self._coordinator.apply(tower) as number:
            ends_step = (number + 1) % len(self._devices) == 0
            self._apply_calls[ends_step](tf.constant(tower), norm, gradients, state)
            self._tower_metrics[tower], self._gradients = metrics, gradients

    # The compiled calls behind that.

    def _fetch_step(self, tower):
        with tf.device(self._devices[tower]):
            return self._variables.fetch()

    def _compute_step(self, stage, tower, params, state, share):
        with tf.device(self._devices[tower]), tf.name_scope(f"tower_{tower}"):
            share = self._fitted(stage, share)
            result = self._tower_gradients(stage, params, state, share)
            decay, gradients = self._add_weight_decay(stage, params, result.gradients)
            total_loss = result.loss + tf.cast(decay, result.loss.dtype)
            norm = tf.sqrt(squared_norm(gradients))
            finite = tf.math.is_finite(total_loss + norm)
        with tf.device(self._parameter_device):
            # They travel now, and not under the lock.
            gradients = [tf.identity(gradient) for gradient in gradients]
            state = [tf.identity(entry) for entry in result.state]
        metrics = {
            "loss": result.loss,
            "total_loss": total_loss,
            "correct": result.correct,
            "gradient_norm": norm,
            "finite": finite,
        }
        return gradients, state, metrics

    def _apply_step(self, ends_step, tower, norm, gradients, state):
        step = self._step.read_value()
        with tf.device(self._parameter_device):
            # The norm is the one before the scaling, and so the clipping is.
            scale = tf.gather(tf.constant(self._scales, tf.float64), tower)
            scaled = [g * tf.cast(scale, g.dtype) for g in gradients]
            params, slots, averages = self._variables.read()
            moving = averages if ends_step else []
            params, slots, moved = self._update(
                step, norm, params, slots, moving, scaled
            )
            state = [
                new if new.dtype.is_floating else tf.where(tower == 0, new, old)
                for new, old in zip(state, self._variables.state, strict=True)
            ]
            self._variables.assign(params, slots, moved or averages, state)
        if ends_step:
            self._step.assign_add(1)

    def _trace(self, batch_spec):
        """Compiles all of it before there are threads, where an error is a plain one.

        Args:
            batch_spec: `element_spec` of the stream.
        """

        def traced(call, *specs):
            return tf.function(call, autograph=False).get_concrete_function(*specs)

        def specs_of(variables):
            return [tf.TensorSpec(v.shape, v.dtype) for v in variables]

        params = specs_of(self._variables.params)
        state = specs_of(self._variables.state)
        self._fetch_calls = []
        self._compute_calls = [[] for _ in self._stages]
        for tower, size in enumerate(self._sizes):
            share = {
                name: tf.TensorSpec([size, *spec.shape[1:]], spec.dtype)
                for name, spec in batch_spec.items()
            }
            fetch = functools.partial(self._fetch_step, tower)
            self._fetch_calls.append(traced(fetch))
            for stage, calls in enumerate(self._compute_calls):
                compute = functools.partial(self._compute_step, stage, tower)
                calls.append(traced(compute, params, state, share))
        whose, norm = tf.TensorSpec([], tf.int32), tf.TensorSpec([], params[0].dtype)
        self._apply_calls = [
            traced(
                functools.partial(self._apply_step, ends), whose, norm, params, state
            )
            for ends in (False, True)
        ]
        self._traced = True

    # The contract.

    def train(self, num_steps: int) -> dict:
        before = int(self._step)
        if self._batches is None:
            batches = self._stream(before)
            if not self._traced:
                self._trace(batches.element_spec)
            self._batches = iter(batches)
        self._is_training = True
        self._stage, num_steps = steps_within(self._stages, before, num_steps)
        try:
            self._coordinator.run(num_steps, self._draw_shares, self._run_tower)
        except BaseException:
            self._begin_anew()
            raise
        finally:
            self._is_training = False
        return self._metrics() if int(self._step) > before else {}

    def _metrics(self):
        """Of the last step."""
        step, of_towers = int(self._step), self._tower_metrics
        values = {
            name: np.array([metrics[name] for metrics in of_towers])
            for name in of_towers[0]
        }
        rate = self._update.learning_rate_fn(tf.constant(step - 1, tf.int64))
        return {
            "step": step,
            "loss": np.dot(self._weights, values["loss"]),
            "total_loss": np.dot(self._weights, values["total_loss"]),
            "tower_losses": values["loss"],
            "accuracy": np.sum(values["correct"]) / sum(self._sizes),
            "learning_rate": rate.numpy(),
            "gradient_norm": np.mean(values["gradient_norm"]),
            "staleness": np.array(self._coordinator.staleness),
            "input_wait_secs": np.mean(self._coordinator.input_wait_secs),
        }

    def gradients(self) -> dict[str, tf.Tensor]:
        """Those of the last update, before clipping and scaling."""
        return dict(zip(self._names, self._gradients, strict=False))

    def request_stop(self) -> None:
        self._coordinator.request_stop()

    def progress(self) -> tuple[int, str]:
        steps, is_between_steps, tower = self._coordinator.progress()
        if not self._traced:
            return steps, PHASES[TRACING]
        if is_between_steps:
            return steps, PHASES[WAITING if self._is_training else IDLE]
        return steps, PHASES[COMPUTING] + ("" if tower is None else f" (tower {tower})")

    def state(self) -> dict[str, np.ndarray]:
        with self._coordinator.lock:
            return super().state()

    def _begin_anew(self):
        self._batches = None
        self._coordinator = self._new_coordinator(int(self._step))
