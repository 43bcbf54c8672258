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
from towers.parallel.finite import TOO_MANY_IN_A_ROW, not_finite_error
from towers.parallel.loop import ACTIVITIES, COMPUTING, IDLE, TRACING, WAITING
from towers.parallel.reduce import tower_weights
from towers.parallel.trainer import Trainer


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
        [self._copy] = self.strategy.copies
        num_towers = len(self.devices)
        self._weights = tower_weights(self.strategy.sizes)
        self._scales = self._weights if async_scale_gradients else [1.0] * num_towers
        self._new_coordinator = functools.partial(
            Coordinator, num_towers, max_staleness=max_staleness, record=record
        )
        self.coordinator = self._new_coordinator(0)
        self._iterators, self._num_drawn = None, 0
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
        """Every tower's part of the next batch, on its device."""
        number = tf.constant(self._num_drawn, tf.int64)
        batches = self._feed.batches(self._feed.wait(self._iterators, number), number)
        self._num_drawn += 1
        for tower, device in enumerate(self.devices):
            with tf.device(device):
                batches[tower] = tf.nest.map_structure(tf.identity, batches[tower])
        return batches

    def _run_tower(self, tower):
        while (share := self.coordinator.take_share(tower)) is not None:
            values = self._fetch(tower)
            gradients, state, metrics = self._compute(tower, values, share)
            self._apply(tower, gradients, state, metrics)

    def _fetch(self, tower):
        # The outputs of a call go to the device in scope, whatever is inside.
        with self.coordinator.fetch(tower), tf.device(self.devices[tower]):
            return self._calls.fetch[tower]()

    def _compute(self, tower, values, share):
        # Else the results, which are on this device already, would go back to the
        # tower, to be copied once more while the lock is held.
        with tf.device(self._copy.device):
            call = self._calls.compute[self._phase][tower]
            gradients, state, metrics = call(values, share)
        # To read them is to wait for the device.
        metrics = {name: value.numpy() for name, value in metrics.items()}
        if not metrics["finite"] and not self.guard.skips:
            raise self._not_finite_error(tower, metrics)
        return gradients, state, metrics

    def _apply(self, tower, gradients, state, metrics):
        norm = tf.constant(metrics["gradient_norm"])
        with self.coordinator.apply(tower) as number:
            ends_step = (number + 1) % len(self.devices) == 0
            in_a_row = self.guard.num_in_a_row()
            if not metrics["finite"] and in_a_row + 1 >= TOO_MANY_IN_A_ROW:
                raise self._not_finite_error(tower, metrics)
            self._is_updating = True
            if metrics["finite"]:
                with tf.device(self._copy.device):
                    call = self._calls.apply[ends_step]
                    call(tf.constant(tower), norm, gradients, state)
                self._gradients = gradients
            else:
                self._calls.skip[ends_step]()
            self._is_updating = False
            self._tower_metrics[tower] = metrics

    def _not_finite_error(self, tower, metrics):
        return not_finite_error(
            self.coordinator.num_begun(tower),
            np.arange(len(self.devices)) != tower,
            np.full(len(self.devices), metrics["loss"]),
            learning_rate=self.learning_rate(self.step),
            gradient_norm=metrics["gradient_norm"],
            skips=self.guard.skips,
            consequence="the update was not applied",
        )

    def _compile(self):
        """Traces all calls before there are threads, where an error is a plain one."""
        step = AsynchronousStep(
            copy=self._copy,
            network=self.network,
            update_fn=self._update_fn,
            trainable_variables=self.task.model.trainable_variables,
            phases=self.phases,
            devices=self.devices,
            scales=self._scales,
            guard=self.guard,
        )
        specs = [
            tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), batch)
            for batch in self._feed.batches_of(0)
        ]
        self._calls = step.trace(specs, self.guard.skips)

    # The contract.

    def train(self, num_steps):
        before = self.step
        if self._calls is None:
            self._compile()
        if self._iterators is None:
            self._num_drawn = before
            self._iterators = self._feed.start(before) or ()
        self._is_training = True
        self._phase, num_steps = steps_within(self.phases, before, num_steps)
        try:
            self.coordinator.run(num_steps, self._draw_shares, self._run_tower)
        except BaseException:
            self._is_torn |= self._is_updating or not self.coordinator.is_even()
            self._restart()
            raise
        finally:
            self._is_training = False
        return self._metrics() if self.step > before else {}

    def _metrics(self):
        """The metrics of the last step."""
        step, per_tower = self.step, self._tower_metrics
        values = {
            name: np.array([metrics[name] for metrics in per_tower])
            for name in per_tower[0]
        }
        return {
            "step": step,
            "loss": np.dot(self._weights, values["loss"]),
            "total_loss": np.dot(self._weights, values["total_loss"]),
            "tower_losses": values["loss"],
            "accuracy": np.sum(values["correct"]) / sum(self.strategy.sizes),
            "learning_rate": self.learning_rate(step - 1),
            "gradient_norm": np.mean(values["gradient_norm"]),
            "staleness": np.array(self.coordinator.staleness),
            "input_wait_secs": np.mean(self.coordinator.input_wait_secs),
            **self.guard.num_skipped(),
        }

    def gradients(self):
        """Those of the last update, before clipping and scaling."""
        vectors = [vector.numpy() for vector in self._gradients]
        return self._copy.layout.params.read(vectors) if vectors else {}

    def trace(self):
        if self._calls is None:
            self._compile()
        calls = [*self._calls.fetch, *self._calls.apply, *self._calls.skip]
        return [x.graph for x in sum(self._calls.compute, calls)]

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

    def _restart(self):
        self.guard.restart()
        if self._feed:
            self._feed.restart()
        self._iterators = None
        self.coordinator = self._new_coordinator(self.step)
