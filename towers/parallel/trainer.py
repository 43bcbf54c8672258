"""The contract of a trainer, and what synchronous and asynchronous ones share.

A trainer takes steps with a strategy and evaluates. It owns the canonical state, the
memory accounts and the metrics; a strategy owns the variables.
"""

import abc
import collections
from collections.abc import Callable, Iterable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.data.tta import TestTimeAugmentation
from towers.models.variables import variable_names
from towers.optim.phases import Phase, phases_of
from towers.optim.update import Update
from towers.parallel.devices import HOST
from towers.parallel.eval_step import Evaluator
from towers.parallel.gradients import shares
from towers.parallel.memory import Account, create_accounts, largest
from towers.parallel.network import WholeNetwork
from towers.parallel.not_finite import SkippedSteps
from towers.parallel.placement import Call, without_kernel
from towers.parallel.sharding.network import ShardedNetwork
from towers.parallel.strategy import Strategy
from towers.parallel.tower import LossFn
from towers.parallel.variables import Initial, check_copies
from towers.parallel.workers import ALONE, Workers

NO_TTA = TestTimeAugmentation()

# The activity of a trainer: a number in a tf.Variable, and its name in `progress`.
IDLE, TRACING, WAITING, COMPUTING = range(4)
ACTIVITIES = ("idle", "tracing the step", "waiting for data", "computing")

# During these no update is under way, so `Trainer.state` is consistent.
CONSISTENT_ACTIVITIES = (ACTIVITIES[TRACING], ACTIVITIES[WAITING])


class Trainer(abc.ABC):
    """Trains a model on several devices.

    Args:
        create_strategy: arguments as in `Strategy`.
        model: a single-device Functional model; its variables are the initial values.
        loss_fn: (logits, labels) -> the loss of each image.
        update_fn: from the mean gradient to the next parameters.
        stream: first step -> the batches of all steps from there on.
        micro_batch_size: images over all towers that are computed at once; a step has
            several such batches with `accumulate_steps`.
        devices: device names; one tower each, or one group of a sharded network.
        phases: of the run, in order; `model` is that of the last one. Empty where all
            steps are alike and nothing is frozen.
        tta: test-time augmentation of evaluations.
        compile_towers: whether XLA compiles the forward and backward part of each
            tower, and nothing that crosses devices.
        sync_batch_norm: whether the towers share the moments of batch normalization,
            as if one device saw the whole batch.
        skip_not_finite: whether a step that is not finite is skipped, see `not_finite`.
        workers: processes that train together, each with so many devices.
        **options: of the strategy.

    Attributes:
        evaluator: computes logits on all devices.
    """

    def __init__(
        self,
        create_strategy: Callable[..., Strategy],
        model: keras.Model,
        *,
        loss_fn: LossFn,
        update_fn: Update,
        stream: Callable[[int], tf.data.Dataset],
        micro_batch_size: int,
        devices: Sequence[str],
        phases: Sequence[Phase] = (),
        tta: TestTimeAugmentation = NO_TTA,
        compile_towers: bool = False,
        sync_batch_norm: bool = False,
        skip_not_finite: bool = False,
        workers: Workers = ALONE,
        **options,
    ):
        self.phases = phases_of(phases, model)
        self.devices, self.workers = list(devices), workers
        self.strategy = create_strategy(
            Initial.of(model), update_fn, self.devices, micro_batch_size, **options
        )
        size = self.strategy.num_shards
        grid = [self.devices[i : i + size] for i in range(0, len(devices), size)]
        lead_devices = [group[0] for group in grid]
        whole = WholeNetwork(self.phases, loss_fn, lead_devices, compile_towers)
        self.network = whole
        if size > 1 or sync_batch_norm:
            self.network = ShardedNetwork(
                self.phases, loss_fn, grid, sync_batch_norm, workers, micro_batch_size
            )
        # Per tower, those of other workers included.
        self.sizes = shares(micro_batch_size, len(grid) * workers.size)
        self._update_fn = update_fn
        self._stream = stream
        self._trainable_variables = model.trainable_variables
        self._param_names = variable_names(model.trainable_variables)
        with tf.device(HOST):
            self.global_step = tf.Variable(
                0, dtype=tf.int64, trainable=False, name="step"
            )
            self._skipped = SkippedSteps() if skip_not_finite else None
        # In inference synchronized batch normalization is like any other.
        inference_network = self.network if size > 1 else whole
        self.evaluator = Evaluator(
            self.strategy, inference_network, loss_fn, lead_devices, tta, workers
        )

    @abc.abstractmethod
    def train(self, num_steps: int) -> dict:
        """Takes up to `num_steps` steps; fewer where `request_stop` was called or a
        phase of the run ends.

        A step is one update with the gradient of the mean loss over the whole batch;
        of asynchronous towers, one update by each.

        Returns:
            The metrics of the last step taken; empty if none was. "step" is the number
            of steps taken since the run began; "loss" the mean cross-entropy over all
            images of the batch and "total_loss" with weight decay; "tower_losses" the
            loss of each tower; "accuracy" the share of the batch's images with a
            correct prediction; "learning_rate"; "gradient_norm" of the mean gradient
            before clipping; "loss_scale" where the loss is scaled; "skipped_steps" so
            far, where any may be (of asynchronous towers, updates); "staleness" of
            asynchronous updates. "input_wait_secs" alone is that of all steps of
            this call: how long they waited for their batches, in seconds; of
            asynchronous towers the mean over the towers.

        Raises:
            NumericError: a tower's loss or gradients are not finite, and the step is
                not skipped. The parameters are those before that step (of an
                asynchronous tower, that update).
        """

    @abc.abstractmethod
    def gradients(self, batch: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Name -> the mean gradient of the next step, which is not taken; for
        histograms.

        It is computed anew: to carry it out of every step would cost copies.
        Asynchronous towers have the gradient of the last update and return that.

        Args:
            batch: of the next step.
        """

    @abc.abstractmethod
    def trace(self) -> list[list[tf.Graph]]:
        """Traces the steps without taking one; the first `train` then need not.

        Returns:
            Per phase the graphs that compute at the same time.
        """

    @abc.abstractmethod
    def calls(self) -> list[Call]:
        """All compiled calls that `train` makes, with the input; traced if needed.

        `trace` has the steps alone.
        """

    @abc.abstractmethod
    def request_stop(self) -> None:
        """Asks `train`, from another thread, to return after the step in hand."""

    @abc.abstractmethod
    def progress(self) -> tuple[int, str]:
        """(steps taken, one of ACTIVITIES), readable from another thread meanwhile.

        Asynchronous towers add to "computing" which of them is the last.
        """

    @abc.abstractmethod
    def _restart_input(self) -> None:
        """Recreates the input iterator at the current global step."""

    def evaluate(
        self, batches: Iterable[Mapping[str, tf.Tensor]], use_averages: bool = False
    ) -> dict[str, float]:
        """Counts over batches with "weights", on all devices.

        Returns:
            "correct" and "images", whole numbers, and "loss", the sum over the images;
            with test-time augmentation also "correct_tta".

        Raises:
            ValueError: averages of a run that keeps none.
        """
        if use_averages and not self._update_fn.ema_decay:
            raise ValueError("this run keeps no moving averages: its ema_decay is 0")
        return self.evaluator(batches, use_averages)

    def state(self) -> dict[str, np.ndarray]:
        """The canonical state: name -> host array, in a fixed order.

        `params/`, `state/`, `slots/` and `averages/`, each followed by the variable's
        path (and the slot's name), then `loss_scale/` where the loss is scaled,
        `skipped/` where steps may be skipped, and `step`. It does not depend on the
        strategy or on the number of towers.

        Raises:
            NumericError: copies of a variable differ.
        """
        check_copies(self.strategy.variables, self.strategy.num_shards)
        state = {
            name: _joined([shard.numpy() for shard in shards])
            for name, shards in self.strategy.named_variables().items()
        }
        return state | {k: v.numpy() for k, v in self._progress_variables().items()}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Continues from a canonical state, whichever strategy wrote it."""
        self.strategy.load(state)
        for name, variable in self._progress_variables().items():
            variable.assign(state[name])
        self._restart_input()

    def _progress_variables(self) -> dict[str, tf.Variable]:
        """Canonical name -> variable, of the progress of the training."""
        skipped = {} if self._skipped is None else self._skipped.named()
        return skipped | {"step": self.global_step}

    def _num_skipped(self) -> dict[str, int]:
        """As a metric, where steps are skipped."""
        return {} if self._skipped is None else {"skipped_steps": self._skipped.total()}

    def homes(self) -> dict[int, str]:
        """id of a variable's handle -> the device that it is meant for, for `crossings`
        on a machine that has no such device."""
        return {
            id(variable.handle): variables.device
            for variables in self.strategy.variables
            for variable in variables.named().values()
        }

    def memory(self) -> list[Account]:
        """The memory that training takes on each device; traces the step if needed."""
        named = [x for v in self.strategy.variables for x in v.named().items()]
        return largest(
            create_accounts(named, graphs, self.devices) for graphs in self.trace()
        )

    def describe(self) -> list[str]:
        """Lines for the start banner: what lives where, and the share of each tower."""
        lines = list(self.strategy.description)
        if self.strategy.num_shards > 1:
            self.trace()  # only then is it known
            lines.append(
                "bytes of activations that cross devices per step: "
                f"{self.transferred_bytes:,}"
            )
        if any("GPU" in device for device in self.devices):
            lines += self._host_remark()
        return [*lines, describe_towers(self.sizes, len(self.devices))]

    def _host_remark(self):
        """A line about operations that a GPU should run and cannot, if there are any.

        It traces the step, which the first call of `train` then need not.
        """
        counts = collections.Counter()
        for call in self.calls():
            for group in without_kernel(call.graph, call.device):
                counts[f"{group.type} ({group.types})"] += group.count
        if not counts:
            return []
        listed = ", ".join(f"{count} x {name}" for name, count in counts.items())
        return [f"on the host, as they have no kernel for GPUs: {listed}"]

    @property
    def transferred_bytes(self) -> int:
        """Bytes of activations, and of their gradients, that cross devices per step: an
        upper bound, of the traced phase with most of them, without what frozen
        parameters save."""
        return self.network.transferred_bytes


def describe_towers(sizes: Sequence[int], num_devices: int) -> str:
    """A line with the number of towers, the images of each and, where a tower is a
    group of devices, the devices."""
    share = " or ".join(map(str, sorted({min(sizes), max(sizes)})))
    group_size = num_devices // len(sizes)
    of_devices = f" of {group_size} devices" if group_size > 1 else ""
    if len(sizes) == 1:
        return f"1 tower{of_devices} with {share} images"
    return f"{len(sizes)} towers{of_devices} with {share} images each"


def _joined(shards):
    return shards[0] if len(shards) == 1 else np.concatenate(shards, axis=-1)
