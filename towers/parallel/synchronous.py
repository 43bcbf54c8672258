"""The trainer of towers that meet in every step."""

import tensorflow as tf

from towers.optim.phases import phase_at, steps_within
from towers.parallel.devices import HOST
from towers.parallel.feed import Feed, HostStream
from towers.parallel.loop import Loop
from towers.parallel.loss_scale import LossScale
from towers.parallel.not_finite import not_finite_error
from towers.parallel.placement import Call
from towers.parallel.step import Step
from towers.parallel.trainer import Trainer


class SynchronousTrainer(Trainer):
    """Towers that meet in every step.

    Args:
        accumulate_steps: micro-batches of a step; their mean gradient is applied once.
        feed: the batches; None takes whole ones from the stream.
        scale_loss: whether the loss is scaled dynamically, see `loss_scale`.
        The other arguments are those of `Trainer`.
    """

    def __init__(
        self,
        *args,
        accumulate_steps: int = 1,
        feed: Feed | None = None,
        scale_loss: bool = False,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        with tf.device(HOST):
            self._loss_scale = LossScale() if scale_loss else None
        self._accumulate_steps = accumulate_steps
        self.step = Step(
            strategy=self.strategy,
            sizes=self.sizes,
            network=self.network,
            update_fn=self._update_fn,
            trainable_variables=self._trainable_variables,
            phases=self.phases,
            global_step=self.global_step,
            accumulate_steps=accumulate_steps,
            loss_scale=self._loss_scale,
            skipped=self._skipped,
        )
        self.loop = Loop(
            self.step,
            self.step.zero_metrics,
            global_step=self.global_step,
            num_phases=len(self.phases),
            feed=feed or HostStream(self._stream),
            inline=not all("CPU" in device for device in self.devices),
            optimize=not self.network.is_optimized,
        )
        self.inspect_step = tf.function(self._inspect_step, autograph=False)

    def train(self, num_steps):
        phase, num_steps = steps_within(self.phases, int(self.global_step), num_steps)
        with self.workers.noticing_losses(self.loop.reset):
            num_begun, is_taken, wait_secs, metrics = self.loop(phase, num_steps)
        if not num_begun:
            return {}
        step = int(self.global_step)
        if not is_taken:
            # The batch and the parameters are unchanged: compute again to name the
            # tower.
            finite, _ = self._inspect_next_step(next(iter(self._stream(step))))
            raise not_finite_error(
                step + 1,
                finite.numpy(),
                metrics["tower_losses"],
                learning_rate=metrics["learning_rate"],
                gradient_norm=metrics["gradient_norm"],
                skips=self._skipped is not None,
            )
        metrics |= self._num_skipped()
        return {"step": step, **metrics, "input_wait_secs": wait_secs}

    def gradients(self, batch):
        _, shards = self._inspect_next_step(batch)
        whole = [tf.concat(slices, -1) for slices in zip(*shards, strict=True)]
        return dict(zip(self._param_names, whole, strict=True))

    def homes(self):
        of_feed = {id(v.handle): device for device, v in self.loop.feed.variables()}
        return super().homes() | of_feed

    def trace(self):
        return [[graph] for graph in self.loop.trace()]

    def calls(self):
        return [Call(graph) for graph in self.loop.graphs()]

    def request_stop(self):
        # Several workers agree before each call; one alone must not stop within it.
        if self.workers.size == 1:
            self.loop.request_stop()

    def progress(self):
        return self.loop.progress()

    def _restart_input(self):
        self.loop.restart_input()

    @property
    def transferred_bytes(self):
        return super().transferred_bytes * self._accumulate_steps

    def _progress_variables(self):
        scale = {} if self._loss_scale is None else self._loss_scale.named()
        return scale | super()._progress_variables()

    def _inspect_step(self, phase, batch):
        """A step that is not taken: (finite per tower, mean gradients per shard)."""
        reduced, num_shards = self.step.reduce(phase, batch), self.strategy.num_shards
        finite = [result.is_finite() for result in reduced.results]
        finite = tf.reshape(tf.stack(finite), [-1, num_shards])
        finite = tf.cast(tf.reduce_all(finite, axis=1), tf.float64)
        finite = tf.cast(self.workers.gather(finite), tf.bool)
        return finite, reduced.mean.gradients[:num_shards]

    def _inspect_next_step(self, batch):
        phase = phase_at(self.phases, int(self.global_step))
        return self.inspect_step(phase, dict(batch))
