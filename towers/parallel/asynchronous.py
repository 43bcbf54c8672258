"""The trainer of towers that update shared variables independently.

The variables are those of strategy `towers`, pinned to the parameter device. Every
tower has its thread and its compiled calls: it takes its share of the next batch,
fetches the variables, computes the gradients and applies them the moment they are
ready; meanwhile others may have updated the variables. Fetch and apply hold one lock,
so that a fetch is one consistent state and no update is lost. One step is num_towers
updates, one by each tower. They differ from one synchronous update in this:

    gradients    are scaled by the tower's share of the batch (1/num_towers where it
                 divides), so that a pass over the data moves the parameters as far
    clipping     acts on each tower's own gradient, before the scaling
    rate         is that of the whole steps applied so far, num_towers updates each
    averages     move with every num_towers-th update, and so reach as far back
    model state  is replaced by that of the tower, so the last one stays; entries that
                 are not floats are taken from the first tower alone
    not finite   is each update for itself; one that is skipped counts as an update

Towers that are equally fast see a staleness of num_towers - 1: a lower max_staleness
makes them wait for each other, a higher one bounds the staleness of slow towers.

Elsewhere: tensorpack's AsyncMultiGPUTrainer; Downpour SGD (Dean et al. 2012) with one
parameter server.
"""

import functools

import numpy as np
import tensorflow as tf

from towers.optim.phases import steps_within
from towers.parallel.asynchronous_step import AsynchronousStep
from towers.parallel.coordinator import Coordinator
from towers.parallel.devices import HOST
from towers.parallel.gradients import split_batch, tower_weights
from towers.parallel.not_finite import not_finite_error
from towers.parallel.placement import Call
from towers.parallel.trainer import (
    ACTIVITIES,
    COMPUTING,
    IDLE,
    TRACING,
    WAITING,
    Trainer,
)


class AsynchronousTrainer(Trainer):
    """Towers that do not meet within a call of `train`.

    After an error every update that was applied stays; the next call continues at the
    whole steps that they make. Where some are of a step that is not whole, or an update
    failed midway, the state is that of no step, and until another one is loaded the
    activity remains "computing".

    Args:
        async_scale_gradients: by the tower's share of the batch; otherwise each update
            goes as far as one of a whole batch.
        max_staleness, record: as in `Coordinator`.
        The other arguments are those of `Trainer`.
    """

    def __init__(
        self,
        *args,
        async_scale_gradients: bool = True,
        max_staleness: int = 0,
        record: list[tuple[str, int, int]] | None = None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        [self._variables] = self.strategy.variables
        num_towers = len(self.devices)
        self._weights = tower_weights(self.strategy.sizes)
        self._scales = self._weights if async_scale_gradients else [1.0] * num_towers
        self._new_coordinator = functools.partial(
            Coordinator, num_towers, max_staleness=max_staleness, record=record
        )
        self.coordinator = self._new_coordinator(0)
        self._batches = None
        self._calls = None
        self._is_training = False
        self._is_updating = False  # stays so after an update that failed
        self._is_torn = False  # the state is that of no step
        self._phase = 0
        # Of each tower's last update; the gradients of the last one of all.
        self._tower_metrics = [{} for _ in self.devices]
        self._gradients = []

    # The threads of the towers.

    def _draw_shares(self):
        """Every tower's share of the next batch, on its device."""
        with tf.device(HOST):
            shares = split_batch(self._batches.get_next(), self.strategy.sizes)
        for tower, device in enumerate(self.devices):
            with tf.device(device):
                shares[tower] = {k: tf.identity(v) for k, v in shares[tower].items()}
        return shares

    def _run_tower(self, tower):
        while (share := self.coordinator.take_share(tower)) is not None:
            params, state = self._fetch(tower)
            gradients, state, metrics = self._compute(tower, params, state, share)
            self._apply(tower, gradients, state, metrics)

    def _fetch(self, tower):
        # The outputs of a call go to the device in scope, whatever is inside.
        with self.coordinator.fetch(tower), tf.device(self.devices[tower]):
            return self._calls.fetch[tower]()

    def _compute(self, tower, params, state, share):
        # Else the results, which are on this device already, would go back to the
        # tower, to be copied once more while the lock is held.
        with tf.device(self._variables.device):
            call = self._calls.compute[self._phase][tower]
            gradients, state, metrics = call(params, state, share)
        # To read them is to wait for the device.
        metrics = {name: value.numpy() for name, value in metrics.items()}
        if not metrics["finite"] and self._skipped is None:
            raise self._not_finite_error(tower, metrics)
        return gradients, state, metrics

    def _apply(self, tower, gradients, state, metrics):
        norm = tf.constant(metrics["gradient_norm"])
        with self.coordinator.apply(tower) as number:
            ends_step = (number + 1) % len(self.devices) == 0
            if not metrics["finite"] and not self._skipped.can_skip():
                raise self._not_finite_error(tower, metrics)
            self._is_updating = True
            if metrics["finite"]:
                with tf.device(self._variables.device):
                    call = self._calls.apply[ends_step]
                    call(tf.constant(tower), norm, gradients, state)
                self._gradients = gradients
            else:
                self._calls.skip[ends_step]()
            self._is_updating = False
            self._tower_metrics[tower] = metrics

    def _not_finite_error(self, tower, metrics):
        rate = self._update_fn.learning_rate_fn(self.global_step.read_value())
        return not_finite_error(
            self.coordinator.num_begun(tower),
            np.arange(len(self.devices)) != tower,
            np.full(len(self.devices), metrics["loss"]),
            learning_rate=rate.numpy(),
            gradient_norm=metrics["gradient_norm"],
            skips=self._skipped is not None,
            consequence="the update was not applied",
        )

    def _compile(self, batch_spec):
        """Traces all calls before there are threads, where an error is a plain one.

        Args:
            batch_spec: `element_spec` of the stream.
        """
        step = AsynchronousStep(
            variables=self._variables,
            network=self.network,
            update_fn=self._update_fn,
            trainable_variables=self._trainable_variables,
            phases=self.phases,
            devices=self.devices,
            scales=self._scales,
            global_step=self.global_step,
            skipped=self._skipped,
        )
        self._calls = step.trace(batch_spec, self.strategy.sizes)

    # The contract.

    def train(self, num_steps):
        before = int(self.global_step)
        if self._batches is None:
            batches = self._stream(before)
            if self._calls is None:
                self._compile(batches.element_spec)
            self._batches = iter(batches)
        self._is_training = True
        self._phase, num_steps = steps_within(self.phases, before, num_steps)
        try:
            self.coordinator.run(num_steps, self._draw_shares, self._run_tower)
        except BaseException:
            self._is_torn |= self._is_updating or not self.coordinator.is_even()
            self._restart_input()
            raise
        finally:
            self._is_training = False
        return self._metrics() if int(self.global_step) > before else {}

    def _metrics(self):
        """The metrics of the last step."""
        step, per_tower = int(self.global_step), self._tower_metrics
        values = {
            name: np.array([metrics[name] for metrics in per_tower])
            for name in per_tower[0]
        }
        rate = self._update_fn.learning_rate_fn(tf.constant(step - 1, tf.int64))
        return {
            "step": step,
            "loss": np.dot(self._weights, values["loss"]),
            "total_loss": np.dot(self._weights, values["total_loss"]),
            "tower_losses": values["loss"],
            "accuracy": np.sum(values["correct"]) / sum(self.strategy.sizes),
            "learning_rate": rate.numpy(),
            "gradient_norm": np.mean(values["gradient_norm"]),
            "staleness": np.array(self.coordinator.staleness),
            "input_wait_secs": np.mean(self.coordinator.input_wait_secs),
            **self._num_skipped(),
        }

    def gradients(self, batch):
        """Those of the last update, before clipping and scaling."""
        return dict(zip(self._param_names, self._gradients, strict=False))

    def trace(self):
        if self._calls is None:
            self._compile(self._stream(0).element_spec)
        # Of the updates, one at a time.
        return [
            [call.graph for call in (*calls, self._calls.apply[True])]
            for calls in self._calls.compute
        ]

    def calls(self):
        self.trace()
        calls = list(zip(self._calls.fetch, self.devices, strict=True))
        for others in (*self._calls.compute, self._calls.apply, self._calls.skip):
            calls += [(call, self._variables.device) for call in others]
        return [Call(call.graph, device) for call, device in calls]

    def request_stop(self):
        self.coordinator.request_stop()

    def progress(self):
        steps, is_between_steps, tower = self.coordinator.progress()
        if self._calls is None:
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
        self._is_updating = self._is_torn = False

    def describe(self):
        where, *others = super().describe()
        return [f"{where}, which each tower updates alone", *others]

    def _restart_input(self):
        self._batches = None
        self.coordinator = self._new_coordinator(int(self.global_step))
