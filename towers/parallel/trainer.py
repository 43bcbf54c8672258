"""Trainers take steps with a strategy, and evaluate; here the synchronous one.

A trainer owns the metrics; its strategy owns the variables.
"""

import abc
import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.data.augment.tta import Transform
from towers.errors import WorkerLostError
from towers.messages import counted
from towers.optim.losses import LossFn
from towers.optim.phases import Phase, phase_at, phases_of, steps_within
from towers.optim.update import Update
from towers.parallel import compilation
from towers.parallel.copies import check_equal, join_shards, variable
from towers.parallel.devices import HOST, device_of
from towers.parallel.evaluator import Counts, Evaluation, Evaluator
from towers.parallel.finite import FiniteGuard, not_finite_error
from towers.parallel.loop import Batch, Feed, Loop, colocated_identity
from towers.parallel.micro_batches import MicroBatches
from towers.parallel.reduce import shares, split_batch, without_int32
from towers.parallel.sharding.network import SplitTowers
from towers.parallel.step import Step
from towers.parallel.strategies.strategy import Strategy
from towers.parallel.towers import Teacher, Towers
from towers.parallel.workers import SINGLE_WORKER, Workers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """A single-device Functional model, and how towers compute it.

    Its variables are the initial values. It is the network of the last phase.
    """

    model: keras.Model
    phases: Sequence[Phase] = ()
    sync_batch_norm: bool = False  # normalize with the moments of all towers
    recompute: bool = False  # compute activations again in the backward pass
    compile_towers: bool = False  # by XLA
    compile_input: bool = False  # with tower and update, where one GPU has all three
    not_compiled: str = ""  # why not, for the start banner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """The losses of training and evaluation, and the teacher of a distillation."""

    loss_fn: LossFn
    eval_loss_fn: LossFn | None = None  # by default `loss_fn`
    teacher: keras.Model | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Sizes, batches and safeguards of steps."""

    micro_batch_size: int  # images over all towers that are computed at once
    accumulate_steps: int = 1  # batches of this size in a step
    feed: Feed | None = None  # None if no step is taken
    scale_loss: bool = False  # for gradients in float16
    skip_not_finite: bool = False
    has_rate_factor: bool = False  # `Trainer.set_rate_factor` may be called


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Test-time augmentation, and whether the logits of all images are kept."""

    tta: Sequence[Transform] = ()
    keeps_logits: bool = False


class Trainer(abc.ABC):
    """Trains a network on several devices.

    Attributes:
        sizes: images of a micro-batch per tower, over all workers.
        rate_factor: factor on all learning rates, float64.
        remarks: lines for the start banner.
    """

    def __init__(
        self,
        strategy: Strategy,
        network: Network,
        objective: Objective,
        update_fn: Update,
        steps: StepOptions,
        evaluations: EvaluationOptions,
        workers: Workers = SINGLE_WORKER,
    ):
        self.strategy, self.update_fn, self.workers = strategy, update_fn, workers
        self.model: keras.Model = network.model
        self.feed: Any = steps.feed
        self.accumulate_steps = steps.accumulate_steps
        self.phases = phases_of(network.phases, network.model)
        num_shards, devices = strategy.num_shards, self.devices
        grid = [devices[i : i + num_shards] for i in range(0, len(devices), num_shards)]
        lead_devices = [group[0] for group in grid]
        self.sizes = shares(steps.micro_batch_size, len(grid) * workers.size)
        inspects = num_shards > 1 or network.sync_batch_norm
        places = {*devices, *(copy.device for copy in strategy.copies)}
        is_alone = len(places) == 1 == workers.size and objective.teacher is None
        self.compilation = compilation.choose(
            devices,
            [phase.model for phase in self.phases],
            inspects=inspects,
            xla=network.compile_towers,
            whole_step=network.compile_input and network.compile_towers and is_alone,
        )
        self.remarks = []
        if network.compile_towers:
            parts = "the whole step" if self.compilation.whole_step else "each tower"
            self.remarks = [f"XLA compiles {parts}"]
        elif network.not_compiled:
            why_not = network.not_compiled
            self.remarks = [f"XLA does not compile the towers: {why_not}"]
        layouts = [shard.layout for shard in strategy.shards]
        self.teacher = None
        if objective.teacher is not None:
            self.teacher = Teacher(objective.teacher, lead_devices)
        whole_towers = Towers(
            self.phases,
            objective.loss_fn,
            layouts[0],
            lead_devices,
            self.compilation,
            self.teacher,
            network.recompute and not inspects,
        )
        self.towers: Towers | SplitTowers = whole_towers
        if inspects:
            self.towers = SplitTowers(
                self.phases,
                objective.loss_fn,
                layouts,
                grid,
                network.sync_batch_norm,
                workers,
                steps.micro_batch_size,
                self.teacher,
                network.recompute,
            )
        self.evaluator = Evaluator(
            strategy.fetch,
            # In inference synchronized batch normalization is like any other.
            self.towers if num_shards > 1 else whole_towers,
            objective.eval_loss_fn or objective.loss_fn,
            lead_devices,
            evaluations.tta,
            workers,
            num_shards=num_shards,
            keeps_logits=evaluations.keeps_logits,
            compiled=self.compilation,
        )
        self.guard = FiniteGuard(
            strategy.primary_device,
            scale_loss=steps.scale_loss,
            skips=steps.skip_not_finite,
        )
        self.rate_factor = None
        if steps.has_rate_factor:
            with tf.device(strategy.primary_device):
                self.rate_factor = variable(np.float64(1), "rate_factor")

    @property
    def devices(self) -> list[str]:
        """Return the devices of the towers."""
        return list(self.strategy.devices)

    @property
    def step(self) -> int:
        """Return the number of steps taken."""
        return int(self.strategy.copies[0].step.numpy())

    @abc.abstractmethod
    def train(self, num_steps: int) -> dict:
        """Take up to `num_steps` steps, each with the gradient of the mean loss.

        Fewer steps are taken if `request_stop` was called or a phase of the run ends.
        A step of asynchronous towers is one update by each tower.

        Returns:
            The metrics of the last step, empty if none was taken: "step", the number of
            steps since the run began; "loss", the mean over all images of the batch;
            "total_loss", with weight decay; "tower_losses"; "accuracy" on the batch;
            "learning_rate"; "gradient_norm" of the mean gradient before clipping;
            "loss_scale" if the loss is scaled; "skipped_steps" so far if steps (or
            asynchronous updates) may be skipped; "staleness" of asynchronous updates.
            And over all steps of this call: "input_wait_secs", how long they waited for
            batches (asynchronous: mean over towers); "sums" of the losses, of correct
            predictions, and the number of these steps. Steps whose loss is not finite
            are left out of the sums.

        Raises:
            NumericError: the loss or a gradient of a tower is not finite, and the step
                is not skipped. The parameters are those before the step (asynchronous:
                before the update).
        """

    @abc.abstractmethod
    def gradients(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return name -> mean gradient of the next step on a batch, for histograms.

        No step is taken. The batch is the part of this process.
        """

    @abc.abstractmethod
    def trace(self) -> list[tf.Graph]:
        """Trace all compiled calls of `train` without taking a step."""

    @abc.abstractmethod
    def request_stop(self) -> None:
        """Ask `train`, from another thread, to return after the current step."""

    @abc.abstractmethod
    def progress(self) -> tuple[int, str]:
        """Return steps taken and one of ACTIVITIES; other threads may call it."""

    @abc.abstractmethod
    def _restart(self) -> None:
        """Let the next `train` begin at the current step."""

    def state(self) -> dict[str, np.ndarray]:
        """Return the canonical state: name -> host array, in a fixed order.

        The names are `params/`, `state/`, `slots/` and `averages/`, each followed by
        the path of the variable (and the name of the slot), then `loss_scale/` if the
        loss is scaled, `skipped/` if steps may be skipped, and `step`. They do not
        depend on the strategy or on the number of towers.

        Raises:
            NumericError: copies of a variable differ.
        """
        check_equal(self.strategy.copies, self.strategy.num_shards)
        state = join_shards([shard.numpy() for shard in self.strategy.shards])
        state |= {k: v.numpy() for k, v in self.guard.named().items()}
        return state | {"step": np.array(self.step, np.int64)}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from a canonical state, whichever strategy wrote it."""
        self.strategy.load(state)
        for name, own in self.guard.named().items():
            own.assign(state[name])
        self._restart()

    def evaluate(self, *args: Any, **kwargs: Any) -> Evaluation[Counts]:
        """Evaluate on all devices, see `Evaluator.counts`."""
        return self.evaluator.counts(*args, **kwargs)

    def variable_bytes(self) -> dict[str, int]:
        """Return device -> bytes of the variables there."""
        sizes: collections.Counter[str] = collections.Counter()
        for copy in self.strategy.copies:
            sizes[copy.device] += sum(copy.num_bytes().values())
        if self.teacher:
            sizes += self.teacher.variable_bytes()
        return dict(sizes)

    def learning_rate(self, step: int) -> float:
        """Return the rate of a step, 0 for the first, times the `rate_factor`."""
        with tf.device(HOST):
            rate = self.update_fn.learning_rate_fn(tf.constant(step, tf.int64)).numpy()
        return rate if self.rate_factor is None else rate * self.rate_factor.numpy()

    def set_rate_factor(self, factor: float) -> None:
        """Set a factor on all learning rates of the schedule."""
        if self.rate_factor is not None:
            self.rate_factor.assign(factor)

    def read_rate_factor(self) -> tf.Tensor | None:
        """Return that factor in the graph, a float64 scalar, or None."""
        return None if self.rate_factor is None else self.rate_factor.read_value()

    def describe(self) -> list[str]:
        """Return lines for the start banner: devices of variables, shares of towers."""
        lines = [*self.strategy.description, *self.remarks]
        if self.strategy.num_shards > 1:
            self.trace()  # It sets `transferred_bytes`.
            about = "bytes of activations that cross devices per step"
            lines.append(f"{about}: {self.transferred_bytes:,}")
        count, group_size = len(self.sizes), len(self.devices) // len(self.sizes)
        num_images = " or ".join(map(str, sorted({min(self.sizes), max(self.sizes)})))
        of = f" of {group_size} devices" if group_size > 1 else ""
        each = " each" if count > 1 else ""
        lines.append(f"{counted(count, 'tower')}{of} with {num_images} images{each}")
        return lines

    @property
    def transferred_bytes(self) -> int:
        """Return the bytes of activations and gradients that cross devices per step.

        It is the maximum over the traced phases; frozen parameters may need less.
        """
        return self.towers.transferred_bytes * self.accumulate_steps


class SynchronousTrainer(Trainer):
    """A trainer whose towers synchronize in every step."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        towers: Towers | SplitTowers | MicroBatches = self.towers
        if self.accumulate_steps > 1:
            towers = MicroBatches(self.towers, self.accumulate_steps)
        self.train_step = Step(
            strategy=self.strategy,
            sizes=self.sizes,
            towers=towers,
            update_fn=self.update_fn,
            trainable_variables=self.model.trainable_variables,
            phases=self.phases,
            guard=self.guard,
            compilation=self.compilation,
            accumulate_steps=self.accumulate_steps,
            read_rate_factor=self.read_rate_factor,
        )
        self.loop = Loop(
            self.train_step,
            self.train_step.zero_metrics,
            num_phases=len(self.phases),
            feed=self.feed,
            compilation=self.compilation,
        )
        self._inspect = tf.function(self._inspect_step, autograph=False)

    def train(self, num_steps):
        before, loop = self.step, self.loop
        phase, num_steps = steps_within(self.phases, before, num_steps)
        try:
            with self.workers.raising_worker_lost():
                arguments = loop.start(phase, before, num_steps)
                if not loop.is_compiled[phase]:
                    # Not left to the call: TensorFlow warns of calls that trace.
                    loop.compiled.get_concrete_function(*loop.signature(phase))
                num_begun, wait_secs, values = loop.run(*arguments)
        except WorkerLostError:
            loop.reset(self.step)
            raise
        if not num_begun:
            return {}
        step, metrics = self.step, self.train_step.read_metrics(values)
        if self.guard.stopped:
            self._restart()
            # Batch and parameters are unchanged: compute again to find the tower.
            batches = self.feed.batches_of(step)
            finite, _ = self._inspect(phase_at(self.phases, step), batches)
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

    def gradients(self, batch):
        # Computed anew: gradients that leave the loop would be copied in every step.
        # And not from the feed: TensorFlow never frees all functions of a data set.
        if not device_of(self.devices[0]).in_host_memory:
            batch = without_int32(batch)
        batches = split_batch(batch, self.strategy.sizes)
        _, shards = self._inspect(phase_at(self.phases, self.step), batches)
        return join_shards(
            [
                copy.layout.params.read([vector.numpy() for vector in vectors])
                for copy, vectors in zip(self.strategy.shards, shards, strict=True)
            ]
        )

    def trace(self):
        trace = self.loop.compiled.get_concrete_function
        phases = range(len(self.phases))
        return [trace(*self.loop.signature(phase)).graph for phase in phases]

    def request_stop(self):
        # Several workers agree before each call; none of them may stop within it.
        if self.workers.size == 1:
            self.loop.request_stop()

    def progress(self):
        return self.loop.progress()

    def _restart(self):
        self.guard.restart()
        if self.feed:
            self.feed.restart()
        self.loop.reset(self.step)

    def _inspect_step(self, phase, batches):
        """Return whether each tower is finite, and the mean gradients per shard."""
        fetched, scale = self.strategy.fetch(), self.guard.read_scale()
        results = self.train_step.towers.gradients(phase, fetched, batches, scale)
        gradients = self.train_step.add_weight_decay(
            phase, results, self.strategy.mean_fn(results)
        )
        num_shards, vectors = self.strategy.num_shards, gradients.per_copy
        with tf.control_dependencies(tf.nest.flatten(vectors)):  # See `reduce`, nccl.
            shards = tf.nest.map_structure(colocated_identity, vectors[:num_shards])
        finite = tf.stack([result.is_finite() for result in results])
        finite = tf.reduce_all(tf.reshape(finite, [-1, num_shards]), axis=1)
        finite = self.workers.gather(tf.cast(finite, tf.float64))
        return tf.cast(finite, tf.bool), shards
