"""A trainer from a strategy and a network."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.cluster.workers import ALONE, Workers
from towers.data.augment.tta import Transform
from towers.optim.phases import Phase, phases_of
from towers.optim.update import Update
from towers.parallel import compilation
from towers.parallel.evaluator import Evaluator
from towers.parallel.feed import Feed
from towers.parallel.finite import FiniteGuard
from towers.parallel.reduce import shares
from towers.parallel.sharding.network import ShardedNetwork
from towers.parallel.strategies import Strategy
from towers.parallel.teacher import Teacher
from towers.parallel.tower import LossFn, WholeNetwork
from towers.parallel.trainer import SynchronousTrainer, Trainer


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
    trainer_class: type[Trainer] = SynchronousTrainer,
    **options: Any,
) -> Trainer:
    """A trainer with its parts: the network of the towers, what guards its steps, its
    teacher, its evaluator.

    Args:
        strategy: made for the model.
        model: a single-device Functional model; its variables are the initial values.
        loss_fn: (logits, labels) -> the loss of each image; with a teacher its logits
            are the third argument.
        update_fn: from the mean gradient to the next parameters.
        micro_batch_size: images over all towers that are computed at once; a step has
            several such batches with `accumulate_steps`.
        feed: the batches; None where no step is taken.
        workers: processes that train together, each with as many devices.
        accumulate_steps: micro-batches of a step; their mean gradient is applied once.
        phases: of the run, in order; `model` is the network of the last one. Empty
            where all steps are alike and nothing is frozen.
        tta: test-time augmentation of evaluations, see `towers.data.augment.tta`.
        eval_loss_fn: the loss of evaluations; None for `loss_fn`.
        keeps_logits: of evaluations, see `Evaluator`.
        compile_towers: whether XLA compiles the forward and backward part of each
            tower, and nothing that crosses devices.
        not_compiled: why XLA does not, for the start banner; may be empty.
        sync_batch_norm: whether the towers share the moments of batch normalization,
            as if one device saw the whole batch.
        scale_loss: whether the loss is scaled dynamically, see `finite`.
        skip_not_finite: whether a step that is not finite is skipped, see `finite`.
        scale_rate: whether `Trainer.scale_rate` may be called.
        teacher: a trained network for the images of `model`, see `Teacher`.
        trainer_class, options: what trains, and its further arguments.
    """
    size, devices = strategy.num_shards, list(strategy.devices)
    phases = phases_of(phases, model)
    grid = [devices[i : i + size] for i in range(0, len(devices), size)]
    lead_devices = [group[0] for group in grid]
    inspects = size > 1 or sync_batch_norm
    compiled = compilation.choose(
        devices,
        [phase.model for phase in phases],
        inspects=inspects,
        xla=compile_towers,
    )
    remarks = ["XLA compiles each tower"] if compile_towers else []
    if not_compiled and not compile_towers:
        remarks = [f"XLA does not compile the towers: {not_compiled}"]
    layouts = [shard.layout for shard in strategy.shards]
    on_devices = teacher and Teacher(teacher, lead_devices)
    teach = on_devices or (lambda batch, tower: batch)
    network = whole_network = WholeNetwork(
        phases, loss_fn, layouts[0], lead_devices, compiled, teach
    )
    if inspects:
        network = ShardedNetwork(
            phases,
            loss_fn,
            layouts,
            grid,
            sync_batch_norm,
            workers,
            micro_batch_size,
            teach,
        )
    evaluator = Evaluator(
        strategy.fetch,
        # In inference synchronized batch normalization is like any other.
        network if size > 1 else whole_network,
        eval_loss_fn or loss_fn,
        lead_devices,
        tta,
        workers,
        num_shards=size,
        keeps_logits=keeps_logits,
    )
    rate_factor = None
    if scale_rate:
        with tf.device(strategy.home):
            rate_factor = tf.Variable(1.0, trainable=False, dtype=tf.float64)
    return trainer_class(
        strategy,
        model,
        network,
        update_fn,
        evaluator,
        FiniteGuard(strategy.home, scale_loss=scale_loss, skips=skip_not_finite),
        phases=phases,
        sizes=shares(micro_batch_size, len(grid) * workers.size),
        compilation=compiled,
        accumulate_steps=accumulate_steps,
        teacher=on_devices,
        rate_factor=rate_factor,
        feed=feed,
        workers=workers,
        remarks=remarks,
        **options,
    )
