"""What the synchronous strategies share: the step.

A strategy adds to what `TowerStrategy` asks for where the towers meet (`_meet`) and
what is updated there (`_apply`).
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from towers.optim.phases import phase_at, steps_within
from towers.parallel.devices import HOST
from towers.parallel.gradients import split_batch, weighted_mean
from towers.parallel.loop import Loop
from towers.parallel.loss_scale import LossScale
from towers.parallel.sharding.walker import walkers_of
from towers.parallel.strategy import not_finite
from towers.parallel.tower import TowerResult, accumulated
from towers.parallel.tower_strategy import TowerStrategy


class Met(NamedTuple):
    """What a step is updated with.

    Attributes:
        results: [tower][shard] what was computed.
        decay: the weight decay, a scalar.
        norm: global norm of the mean gradient, that of the weight decay included.
        gradients, states: the means, in whatever form the strategy's `_apply` takes.
        slices: the mean gradients, in one piece per parameter or, where several devices
            own it, in slices of the last axis: [slice][parameter].
    """

    results: list[list[TowerResult]]
    decay: tf.Tensor
    norm: tf.Tensor
    gradients: list
    states: list
    slices: list[list[tf.Tensor]]


class Synchronous(TowerStrategy):
    """Towers that meet in every step.

    Args:
        accumulate_steps: micro-batches of a step; their mean gradient is applied once.
            `batch_size` is that of a micro-batch.
        sync_batch_norm: whether the towers share the moments of batch normalisation,
            as if one device saw the whole batch.
        resident: as in `Loop`.
        scale_loss: whether the loss is scaled dynamically, see `loss_scale`. A step
            whose gradients are not finite is then passed over, and counts.
        The other arguments are those of `TowerStrategy`.
    """

    def __init__(
        self,
        *args,
        accumulate_steps: int = 1,
        sync_batch_norm: bool = False,
        resident: Callable | None = None,
        scale_loss: bool = False,
        **kwargs,
    ):
        with tf.device(HOST):
            self._loss_scale = LossScale() if scale_loss else None
        super().__init__(*args, **kwargs)
        self._accumulate_steps = accumulate_steps
        self._walkers = []
        if sync_batch_norm:
            grid = [[device] for device in self._devices]
            self._walkers = walkers_of(
                self._stages, self._loss_fn, grid, sync_batch_norm=True
            )
        self._loop = Loop(
            self._train_step,
            self._zero_metrics,
            step=self._step,
            num_stages=len(self._stages),
            stream=self._stream,
            resident=resident,
            inline=not all("CPU" in device for device in self._devices),
        )
        self._look_call = tf.function(self._look, autograph=False)

    # What a strategy decides.

    @abc.abstractmethod
    def _meet(self, stage: int, batch: Mapping[str, tf.Tensor]) -> Met:
        """What all towers compute from a batch in a stage, and its means, in the
        graph."""

    @abc.abstractmethod
    def _apply(self, step: tf.Tensor, met: Met) -> list[tf.Operation]:
        """The update of all variables but the step, in the graph."""

    # One step.

    def _train_step(self, stage, batch):
        """One step of a stage in the graph: (whether it was taken, metrics)."""
        met = self._meet(stage, batch)
        with tf.device(HOST):
            results = [of_tower[0] for of_tower in met.results]
            metrics = self._metrics(results, met)
            # What is not finite in one tower is not finite in the mean either.
            finite = tf.math.is_finite(met.norm + metrics["total_loss"])
            return tf.cond(
                finite, lambda: self._update_all(met), self._pass_over
            ), metrics

    def _update_all(self, met):
        assignments = self._apply(self._step.read_value(), met)
        with tf.device(HOST):
            if self._loss_scale is not None:
                assignments += self._loss_scale.after_good_step()
            return self._step_taken(assignments)

    def _pass_over(self):
        """A step without an update, where a smaller scale may help; whether it may."""
        if self._loss_scale is None:
            return False
        return tf.cond(
            self._loss_scale.can_fall(),
            lambda: self._step_taken(self._loss_scale.after_bad_step()),
            lambda: False,
        )

    def _step_taken(self, assignments):
        with tf.control_dependencies(assignments):
            counted = self._step.assign_add(1, read_value=False)
        with tf.control_dependencies([counted]):
            return tf.constant(True)

    def _look(self, stage, batch):
        """A step that is not taken: (which towers are finite, mean gradients)."""
        met = self._meet(stage, batch)
        finite = [
            tf.reduce_all([result.is_finite() for result in of_tower])
            for of_tower in met.results
        ]
        return tf.stack(finite), met.slices

    def _look_at_next_step(self):
        step = int(self._step)
        batch = next(iter(self._stream(step)))
        return self._look_call(phase_at(self._stages, step), batch)

    def gradients(self) -> dict[str, tf.Tensor]:
        _, slices = self._look_at_next_step()
        whole = [tf.concat(x, -1) for x in zip(*slices, strict=True)]
        return dict(zip(self._names, whole, strict=True))

    def _progress_variables(self):
        of_scale = {} if self._loss_scale is None else self._loss_scale.named()
        return of_scale | super()._progress_variables()

    def _results(
        self,
        stage: int,
        fetched: Sequence[tuple[list[tf.Tensor], list[tf.Tensor]]],
        batch: Mapping[str, tf.Tensor],
    ) -> list[TowerResult]:
        """What every tower computes from its share of a batch.

        Args:
            stage: number of the stage.
            fetched: per tower parameters and model state, on its device.
            batch: of the whole step.
        """

        def compute(states, batches):
            variables = [
                (params, state)
                for (params, _), state in zip(fetched, states, strict=True)
            ]
            fitting = []
            for device, share in zip(self._devices, batches, strict=True):
                with tf.device(device):
                    fitting.append(self._fitted(stage, share))
            return self._compute(stage, variables, fitting)

        states = [state for _, state in fetched]
        batches = split_batch(batch, self._sizes, self._accumulate_steps)
        return accumulated(compute, states, batches, self._accumulate_steps)

    def _compute(self, stage, variables, batches):
        """Every tower's gradients of its share of one micro-batch."""
        scale = self._read_loss_scale()
        if self._walkers:
            grid = [[of_tower] for of_tower in variables]
            walker = self._walkers[stage]
            found = walker.gradients(grid, batches, self._weights, scale)
            return [self._checked(stage, result) for [result] in found]
        results = []
        for tower, ((params, state), share) in enumerate(
            zip(variables, batches, strict=True)
        ):
            with tf.device(self._devices[tower]), tf.name_scope(f"tower_{tower}"):
                results.append(
                    self._tower_gradients(stage, params, state, share, scale)
                )
        return results

    def _read_loss_scale(self):
        return None if self._loss_scale is None else self._loss_scale.read()

    def _metrics(
        self, results: Sequence[TowerResult], met: Met
    ) -> dict[str, tf.Tensor]:
        """The metrics of a step from those of its towers; on the host."""
        num_images = sum(self._sizes) * self._accumulate_steps
        loss = weighted_mean([r.loss for r in results], self._weights)
        scale = self._read_loss_scale()
        return {
            "loss": loss,
            "total_loss": loss + tf.cast(met.decay, loss.dtype),
            "tower_losses": tf.stack([r.loss for r in results]),
            "accuracy": tf.add_n([r.correct for r in results]) / num_images,
            "learning_rate": self._update.learning_rate_fn(self._step.read_value()),
            "gradient_norm": met.norm,
            **({} if scale is None else {"loss_scale": scale}),
        }

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
            **({} if self._loss_scale is None else {"loss_scale": tf.zeros([])}),
        }

    def train(self, num_steps: int) -> dict:
        stage, num_steps = steps_within(self._stages, int(self._step), num_steps)
        done, taken, wait_secs, metrics = self._loop(stage, num_steps)
        if not done:
            return {}
        step = int(self._step)
        if not taken:
            # The batch and the parameters are still there to be asked which tower.
            finite, _ = self._look_at_next_step()
            raise not_finite(step + 1, finite.numpy(), metrics["tower_losses"])
        return {"step": step, **metrics, "input_wait_secs": wait_secs}

    def trace(self) -> None:
        """Traces the steps without taking one; the first `train` then need not."""
        self._loop.trace()

    def _graphs(self):
        return [[graph] for graph in self._loop.trace()]

    def _begin_anew(self):
        self._loop.begin_anew()

    def request_stop(self) -> None:
        self._loop.request_stop()

    def progress(self) -> tuple[int, str]:
        return self._loop.progress()
