"""The contract of a trainer, which takes steps with a strategy and evaluates, and the
synchronous one. A trainer owns the metrics; its strategy owns the variables.
"""

import abc
import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.data.augment.tta import Transform
from towers.errors import WorkerLostError
from towers.optim.losses import LossFn
from towers.optim.phases import Phase, phase_at, phases_of, steps_within
from towers.optim.update import Update
from towers.parallel import compilation
from towers.parallel.compilation import Compilation
from towers.parallel.copies import check_equal, variable, whole
from towers.parallel.devices import HOST
from towers.parallel.evaluator import Counts, Evaluation, Evaluator
from towers.parallel.finite import FiniteGuard, not_finite_error
from towers.parallel.loop import Batch, Feed, Loop, colocated_identity
from towers.parallel.reduce import shares, split_batch, without_int32
from towers.parallel.sharding.network import SplitTowers
from towers.parallel.step import Step
from towers.parallel.strategies.strategy import Strategy
from towers.parallel.towers import Teacher, Towers
from towers.parallel.workers import ALONE, Workers


@dataclasses.dataclass(eq=False, kw_only=True)
class Trainer(abc.ABC):
    """Trains a network on several devices; `assemble_trainer` makes one of its parts.

    A subclass has `train`, `gradients`, `trace`, `request_stop`, `progress` and
    `_restart`, after which the next `train` begins at the current step.
    """

    strategy: Strategy
    model: keras.Model
    towers: Towers | SplitTowers
    update_fn: Update
    evaluator: Evaluator
    guard: FiniteGuard
    phases: Sequence[Phase]
    sizes: Sequence[int]  # images of a micro-batch per tower, over all workers
    compilation: Compilation
    accumulate_steps: int
    teacher: Teacher | None
    rate_factor: tf.Variable | None  # float64, on all learning rates
    feed: Feed | None
    workers: Workers
    remarks: Sequence[str]  # lines for the start banner

    @property
    def devices(self) -> list[str]:
        """The devices of the towers."""
        return list(self.strategy.devices)

    @property
    def step(self) -> int:
        """The steps taken."""
        return int(self.strategy.copies[0].step.numpy())

    @abc.abstractmethod
    def train(self, num_steps: int) -> dict:
        """Takes up to `num_steps` steps, updates with the gradient of the mean loss
        over the whole batch (of asynchronous towers, one by each); fewer where
        `request_stop` was called or a phase of the run ends.

        Returns:
            The metrics of the last step taken; empty if none was. "step" is the number
            of steps taken since the run began; "loss" the mean loss over all images of
            the batch and "total_loss" with weight decay; "tower_losses" the loss of
            each tower; "accuracy" the share of the batch's images with a correct
            prediction; "learning_rate"; "gradient_norm" of the mean gradient before
            clipping; "loss_scale" where the loss is scaled; "skipped_steps" so far,
            where any may be (of asynchronous towers, updates); "staleness" of
            asynchronous updates. Of all steps of this call are "input_wait_secs", the
            seconds that they waited for batches (of asynchronous towers the mean over
            the towers), and "sums": of the losses, of the correct predictions, and the
            number of these steps; steps whose loss is not finite do not count.

        Raises:
            NumericError: a tower's loss or gradients are not finite, and the step is
                not skipped. The parameters are the ones before that step (of an
                asynchronous tower, that update).
        """

    def state(self) -> dict[str, np.ndarray]:
        """The canonical state: name -> host array, in a fixed order.

        `params/`, `state/`, `slots/` and `averages/`, each followed by the variable's
        path (and the slot's name), then `loss_scale/` where the loss is scaled,
        `skipped/` where steps may be skipped, and `step`. It does not depend on the
        strategy or on the number of towers. Copies that differ are a NumericError.
        """
        check_equal(self.strategy.copies, self.strategy.num_shards)
        state = whole([shard.numpy() for shard in self.strategy.shards])
        state |= {k: v.numpy() for k, v in self.guard.named().items()}
        return state | {"step": np.array(self.step, np.int64)}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from a canonical state, whichever strategy wrote it."""
        self.strategy.load(state)
        for name, own in self.guard.named().items():
            own.assign(state[name])
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
        """The rate of a step, 0 for the first, times the factor of `scale_rate`."""
        with tf.device(HOST):
            rate = self.update_fn.learning_rate_fn(tf.constant(step, tf.int64)).numpy()
        return rate if self.rate_factor is None else rate * self.rate_factor.numpy()

    def scale_rate(self, factor: float) -> None:
        """Multiplies all learning rates of the schedule by a factor from now on, in
        place of an earlier one.
        """
        self.rate_factor.assign(factor)

    def read_rate_factor(self) -> tf.Tensor | None:
        """In the graph: that factor, a float64 scalar; None where there is none."""
        return None if self.rate_factor is None else self.rate_factor.read_value()

    def describe(self) -> list[str]:
        """Lines for the start banner: what lives where, and the share of each tower."""
        lines = [*self.strategy.description, *self.remarks]
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
        parameters save.
        """
        return self.towers.transferred_bytes * self.accumulate_steps


class SynchronousTrainer(Trainer):
    """Towers that meet in every step: `loop` takes many of `train_step`."""

    def __init__(self, **parts):
        super().__init__(**parts)
        self.train_step = Step(
            strategy=self.strategy,
            sizes=self.sizes,
            towers=self.towers,
            update_fn=self.update_fn,
            trainable_variables=self.model.trainable_variables,
            phases=self.phases,
            guard=self.guard,
            compilation=self.compilation,
            accumulate_steps=self.accumulate_steps,
            read_rate_factor=self.read_rate_factor,
        )
        self.loop = self.create_loop(self.feed)
        self._inspect = tf.function(self._inspect_step, autograph=False)

    def create_loop(
        self,
        feed: Feed,
        train_step: Callable | None = None,
        zero_metrics: Callable[[], tf.Tensor] | None = None,
    ) -> Loop:
        """A loop on these batches, of this trainer's step or of a function in its
        place, see `Loop`.
        """
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

    def gradients(self, batch: Batch) -> dict[str, tf.Tensor]:
        """Name -> the mean gradient of the next step, which is not taken, on its batch,
        or the images of this process; for histograms. It is computed anew: to carry it
        out of every step would cost copies.
        """
        # Not from the feed: of each data set that it makes for a step TensorFlow keeps
        # some functions.
        if "GPU" in self.devices[0]:
            batch = without_int32(batch)
        batches = split_batch(batch, self.strategy.sizes)
        _, shards = self._inspect(phase_at(self.phases, self.step), batches)
        return whole(
            [
                copy.layout.params.read([vector.numpy() for vector in vectors])
                for copy, vectors in zip(self.strategy.shards, shards, strict=True)
            ]
        )

    def trace(self) -> list[tf.Graph]:
        """Traces all compiled calls that `train` makes, without taking a step; their
        graphs. The first `train` then need not.
        """
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
        if self.feed:
            self.feed.restart()
        self.loop.reset(self.step)

    def _inspect_step(self, phase, batches):
        """(Whether finite per tower, mean gradients per shard); no step is taken."""
        gradients = self.train_step.gradients(phase, batches)
        num_shards, vectors = self.strategy.num_shards, gradients.per_copy
        with tf.control_dependencies(tf.nest.flatten(vectors)):  # see `reduce.nccl`
            shards = tf.nest.map_structure(colocated_identity, vectors[:num_shards])
        finite = tf.stack([result.is_finite() for result in gradients.results])
        finite = tf.reduce_all(tf.reshape(finite, [-1, num_shards]), axis=1)
        finite = self.workers.gather(tf.cast(finite, tf.float64))
        return tf.cast(finite, tf.bool), shards

    def _inspect_next_step(self):
        step = self.step
        return self._inspect(phase_at(self.phases, step), self.feed.batches_of(step))


def assemble_trainer(
    strategy: Strategy,
    model: keras.Model,
    loss_fn: LossFn,
    update_fn: Update,
    micro_batch_size: int,
    *,
    feed: Feed | None = None,
    workers: Workers = ALONE,
    accumulate_steps: int = 1,
    phases: Sequence[Phase] = (),
    tta: Sequence[Transform] = (),
    eval_loss_fn: LossFn | None = None,
    keeps_logits: bool = False,
    compile_towers: bool = False,
    not_compiled: str = "",
    sync_batch_norm: bool = False,
    scale_loss: bool = False,
    skip_not_finite: bool = False,
    scale_rate: bool = False,
    teacher: keras.Model | None = None,
    recompute: bool = False,
    trainer_class: type[Trainer] = SynchronousTrainer,
    **options: Any,
) -> Trainer:
    """A trainer with its parts: the network of the towers, what guards its steps, its
    teacher, its evaluator.

    Args:
        strategy: made for the model.
        model: a single-device Functional model; its variables are the initial values.
        micro_batch_size: images over all towers that are computed at once; a step has
            several such batches with `accumulate_steps`.
        feed: the batches; None where no step is taken.
        phases: of the run, in order; `model` is the network of the last one. Empty
            where all steps are alike and nothing is frozen.
        compile_towers: whether XLA compiles each tower; `not_compiled` says why it does
            not, for the start banner.
        scale_rate: whether `Trainer.scale_rate` may be called.
        recompute: compute activations again in the backward pass, see `recompute`.
        trainer_class, options: what trains, and its further arguments.
    """
    num_shards, devices = strategy.num_shards, list(strategy.devices)
    phases = phases_of(phases, model)
    grid = [devices[i : i + num_shards] for i in range(0, len(devices), num_shards)]
    lead_devices = [group[0] for group in grid]
    inspects = num_shards > 1 or sync_batch_norm
    models = [phase.model for phase in phases]
    compiled = compilation.choose(
        devices, models, inspects=inspects, xla=compile_towers
    )
    remarks = ["XLA compiles each tower"] if compile_towers else []
    if not_compiled and not compile_towers:
        remarks = [f"XLA does not compile the towers: {not_compiled}"]
    layouts = [shard.layout for shard in strategy.shards]
    teacher_fn = teacher and Teacher(teacher, lead_devices)
    towers = whole_towers = Towers(
        phases,
        loss_fn,
        layouts[0],
        lead_devices,
        compiled,
        teacher_fn,
        recompute and not inspects,
    )
    if inspects:
        towers = SplitTowers(
            phases,
            loss_fn,
            layouts,
            grid,
            sync_batch_norm,
            workers,
            micro_batch_size,
            teacher_fn,
            recompute,
        )
    evaluator = Evaluator(
        strategy.fetch,
        # In inference synchronized batch normalization is like any other.
        towers if num_shards > 1 else whole_towers,
        eval_loss_fn or loss_fn,
        lead_devices,
        tta,
        workers,
        num_shards=num_shards,
        keeps_logits=keeps_logits,
        compiled=compiled,
    )
    rate_factor = None
    if scale_rate:
        with tf.device(strategy.home):
            rate_factor = variable(np.float64(1), "rate_factor")
    return trainer_class(
        strategy=strategy,
        model=model,
        towers=towers,
        update_fn=update_fn,
        evaluator=evaluator,
        guard=FiniteGuard(strategy.home, scale_loss=scale_loss, skips=skip_not_finite),
        phases=phases,
        sizes=shares(micro_batch_size, len(grid) * workers.size),
        compilation=compiled,
        accumulate_steps=accumulate_steps,
        teacher=teacher_fn,
        rate_factor=rate_factor,
        feed=feed,
        workers=workers,
        remarks=remarks,
        **options,
    )
