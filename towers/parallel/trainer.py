"""The contract of a trainer, and what synchronous and asynchronous ones share.

A trainer takes steps with a strategy and evaluates. It owns the canonical state and the
metrics; a strategy owns the variables.
"""

import abc
import collections
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.cluster.workers import ALONE, Workers
from towers.errors import WorkerLostError
from towers.optim.phases import Phase, phase_at, steps_within
from towers.optim.update import Update
from towers.parallel.compilation import Compilation
from towers.parallel.copies import check_equal, whole
from towers.parallel.devices import HOST
from towers.parallel.evaluator import Counts, Evaluation, Evaluator
from towers.parallel.feed import Feed
from towers.parallel.finite import FiniteGuard, not_finite_error
from towers.parallel.loop import Loop, colocated_identity
from towers.parallel.sharding.network import ShardedNetwork
from towers.parallel.step import Step
from towers.parallel.strategies import Strategy
from towers.parallel.teacher import Teacher
from towers.parallel.tower import WholeNetwork


class Trainer(abc.ABC):
    """Trains a network on several devices; `assemble_trainer` makes one.

    A subclass has `train`, `gradients`, `trace`, `request_stop`, `progress` and
    `_restart`, after which the next `train` begins at the current step.

    Args:
        strategy, model, update_fn, accumulate_steps, feed, workers: as of
            `assemble_trainer`.
        network: computes the gradients of the towers.
        evaluator: computes logits on all devices.
        guard: decides what happens to a step that is not finite.
        phases: of the run, in order; `model` is the network of the last one.
        sizes: images of a micro-batch per tower, over all workers.
        compilation: of the towers.
        teacher: on the devices, or None.
        rate_factor: a float64 scalar on all learning rates, or None.
        remarks: lines for the start banner.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: keras.Model,
        network: WholeNetwork | ShardedNetwork,
        update_fn: Update,
        evaluator: Evaluator,
        guard: FiniteGuard,
        *,
        phases: Sequence[Phase],
        sizes: Sequence[int],
        compilation: Compilation,
        accumulate_steps: int = 1,
        teacher: Teacher | None = None,
        rate_factor: tf.Variable | None = None,
        feed: Feed | None = None,
        workers: Workers = ALONE,
        remarks: Sequence[str] = (),
    ):
        self.strategy, self.model, self.network = strategy, model, network
        self.evaluator, self.guard, self.phases = evaluator, guard, phases
        self.devices, self.sizes = list(strategy.devices), sizes
        self.compilation, self.accumulate_steps = compilation, accumulate_steps
        self.teacher, self.rate_factor, self.workers = teacher, rate_factor, workers
        self._feed, self._update_fn, self._remarks = feed, update_fn, remarks

    @property
    def step(self) -> int:
        """The steps taken."""
        return int(self.strategy.copies[0].step.numpy())

    @abc.abstractmethod
    def train(self, num_steps: int) -> dict:
        """Takes up to `num_steps` steps; fewer where `request_stop` was called or a
        phase of the run ends.

        A step is one update with the gradient of the mean loss over the whole batch;
        of asynchronous towers, one update by each.

        Returns:
            The metrics of the last step taken; empty if none was. "step" is the number
            of steps taken since the run began; "loss" the mean loss over all
            images of the batch and "total_loss" with weight decay; "tower_losses" the
            loss of each tower; "accuracy" the share of the batch's images with a
            correct prediction; "learning_rate"; "gradient_norm" of the mean gradient
            before clipping; "loss_scale" where the loss is scaled; "skipped_steps" so
            far, where any may be (of asynchronous towers, updates); "staleness" of
            asynchronous updates. Of all steps of this call are "input_wait_secs", how
            long they waited for their batches, in seconds (of asynchronous towers the
            mean over the towers), and "sums": of the losses, of the correct
            predictions, and the number of these steps; steps whose loss is not finite
            do not count.

        Raises:
            NumericError: a tower's loss or gradients are not finite, and the step is
                not skipped. The parameters are those before that step (of an
                asynchronous tower, that update).
        """

    def state(self) -> dict[str, np.ndarray]:
        """The canonical state: name -> host array, in a fixed order.

        `params/`, `state/`, `slots/` and `averages/`, each followed by the variable's
        path (and the slot's name), then `loss_scale/` where the loss is scaled,
        `skipped/` where steps may be skipped, and `step`. It does not depend on the
        strategy or on the number of towers.

        Raises:
            NumericError: copies of a variable differ.
        """
        check_equal(self.strategy.copies, self.strategy.num_shards)
        state = whole([shard.numpy() for shard in self.strategy.shards])
        state |= {k: v.numpy() for k, v in self.guard.named().items()}
        return state | {"step": np.array(self.step, np.int64)}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from a canonical state, whichever strategy wrote it."""
        self.strategy.load(state)
        for name, variable in self.guard.named().items():
            variable.assign(state[name])
        self._restart()

    def evaluate(self, *args, **kwargs) -> Evaluation[Counts]:
        """See `Evaluator.counts`."""
        return self.evaluator.counts(*args, **kwargs)

    def variable_bytes(self) -> dict[str, int]:
        """Device -> bytes of the variables there."""
        sizes = collections.Counter()
        for copy in self.strategy.copies:
            sizes[copy.device] += sum(copy.num_bytes().values())
        if self.teacher:
            sizes += self.teacher.variable_bytes()
        return dict(sizes)

    def learning_rate(self, step: int) -> float:
        """The rate of the step after `step` others, by the factor of now."""
        with tf.device(HOST):
            rate = self._update_fn.learning_rate_fn(tf.constant(step, tf.int64)).numpy()
        return rate if self.rate_factor is None else rate * self.rate_factor.numpy()

    def scale_rate(self, factor: float) -> None:
        """Multiplies all learning rates of the schedule by a factor from now on, in
        place of an earlier one."""
        self.rate_factor.assign(factor)

    def read_rate_factor(self) -> tf.Tensor | None:
        """In the graph: that factor, a float64 scalar; None where there is none."""
        return None if self.rate_factor is None else self.rate_factor.read_value()

    def describe(self) -> list[str]:
        """Lines for the start banner: what lives where, and the share of each tower."""
        lines = [*self.strategy.description, *self._remarks]
        if self.strategy.num_shards > 1:
            self.trace()  # only then is it known
            lines.append(
                "bytes of activations that cross devices per step: "
                f"{self.transferred_bytes:,}"
            )
        count, group_size = len(self.sizes), len(self.devices) // len(self.sizes)
        num_images = " or ".join(map(str, sorted({min(self.sizes), max(self.sizes)})))
        lines.append(
            f"{count} tower{'s' * (count > 1)}"
            + (f" of {group_size} devices" if group_size > 1 else "")
            + f" with {num_images} images"
            + (" each" if count > 1 else "")
        )
        return lines

    @property
    def transferred_bytes(self) -> int:
        """Bytes of activations, and of their gradients, that cross devices per step: an
        upper bound, of the traced phase with most of them, without what frozen
        parameters save."""
        return self.network.transferred_bytes * self.accumulate_steps


class SynchronousTrainer(Trainer):
    """Towers that meet in every step. For the arguments see `Trainer`.

    Attributes:
        train_step: the step.
        loop: takes many of them.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.train_step = Step(
            strategy=self.strategy,
            sizes=self.sizes,
            network=self.network,
            update_fn=self._update_fn,
            trainable_variables=self.model.trainable_variables,
            phases=self.phases,
            guard=self.guard,
            compilation=self.compilation,
            accumulate_steps=self.accumulate_steps,
            read_rate_factor=self.read_rate_factor,
        )
        self.loop = self.create_loop(self._feed)
        self._inspect = tf.function(self._inspect_step, autograph=False)

    def create_loop(
        self,
        feed: Feed,
        train_step: Callable | None = None,
        zero_metrics: Callable[[], tf.Tensor] | None = None,
    ) -> Loop:
        """A loop on these batches, of this trainer's step or of a function in its
        place, see `Loop`."""
        return Loop(
            train_step or self.train_step,
            zero_metrics or self.train_step.zero_metrics,
            num_phases=len(self.phases),
            feed=feed,
            compilation=self.compilation,
        )

    def train(self, num_steps):
        before = self.step
        phase, num_steps = steps_within(self.phases, before, num_steps)
        try:
            with self.workers.noticing_losses():
                num_begun, wait_secs, values = self.loop(phase, before, num_steps)
        except WorkerLostError:
            self.loop.reset(self.step)
            raise
        if not num_begun:
            return {}
        step, metrics = self.step, self.train_step.read_metrics(values)
        if self.guard.stopped:
            self._restart()
            # The batch and the parameters are unchanged: compute again to name the
            # tower.
            finite, _ = self._inspect_next_step()
            raise not_finite_error(
                step + 1,
                finite.numpy(),
                metrics["tower_losses"],
                learning_rate=self.learning_rate(step),
                gradient_norm=metrics["gradient_norm"],
                skips=self.guard.skips,
            )
        metrics |= {"learning_rate": self.learning_rate(step - 1)}
        metrics |= self.guard.num_skipped()
        return {"step": step, **metrics, "input_wait_secs": wait_secs}

    def gradients(self) -> dict[str, tf.Tensor]:
        """Name -> the mean gradient of the next step, which is not taken; for
        histograms. It is computed anew: to carry it out of every step would cost
        copies."""
        _, shards = self._inspect_next_step()
        return whole(
            [
                copy.layout.params.read([vector.numpy() for vector in vectors])
                for copy, vectors in zip(self.strategy.shards, shards, strict=True)
            ]
        )

    def trace(self) -> list[tf.Graph]:
        """Traces all compiled calls that `train` makes, without taking a step; their
        graphs. The first `train` then need not."""
        return [self.loop.trace(phase) for phase in range(len(self.phases))]

    def request_stop(self) -> None:
        """Asks `train`, from another thread, to return after the step in hand."""
        # Several workers agree before each call; one alone must not stop within it.
        if self.workers.size == 1:
            self.loop.request_stop()

    def progress(self) -> tuple[int, str]:
        """(steps taken, one of ACTIVITIES), readable from another thread meanwhile."""
        return self.loop.progress()

    def _restart(self):
        self.guard.restart()
        if self._feed:
            self._feed.restart()
        self.loop.reset(self.step)

    def _inspect_step(self, phase, batches):
        """(Whether finite per tower, mean gradients per shard); no step is taken."""
        results, _, gradients, *_ = self.train_step.gradients(phase, batches)
        num_shards = self.strategy.num_shards
        with tf.control_dependencies(tf.nest.flatten(gradients)):  # see `reduce.nccl`
            shards = tf.nest.map_structure(colocated_identity, gradients[:num_shards])
        finite = tf.stack([result.is_finite() for result in results])
        finite = tf.reduce_all(tf.reshape(finite, [-1, num_shards]), axis=1)
        finite = self.workers.gather(tf.cast(finite, tf.float64))
        return tf.cast(finite, tf.bool), shards

    def _inspect_next_step(self):
        step = self.step
        return self._inspect(phase_at(self.phases, step), self._feed.batches_of(step))
