"""The parts of a run, validated against its checkpoint and its workers."""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from towers.build import assembly, builder
from towers.build.restored import RestoredRun, read_run
from towers.cluster.agreement import join, validate_data
from towers.cluster.spec import Cluster, find_cluster, validate_addresses
from towers.config import Config, checks, factories
from towers.data.identical import record_identical
from towers.errors import ConfigError, TowersError
from towers.metrics.metrics import create_metric
from towers.models.keras import given
from towers.optim.schedules import Schedule
from towers.parallel import devices as parallel_devices
from towers.parallel.devices import Devices
from towers.parallel.trainer import Trainer
from towers.parallel.workers import SINGLE_WORKER, Workers
from towers.run.checkpoint import Checkpoint
from towers.run.dataset_info import DatasetInfo
from towers.training.restore import validate_dataset


def cluster_of(
    config: Config, cluster: Cluster | None, allow_public_address: bool
) -> Cluster | None:
    """Return the cluster of a run, or None for one worker; ConfigError if invalid."""
    has_workers = config.choice_of("strategy").processes
    cluster = cluster or find_cluster(reads_slurm=has_workers)
    if cluster is None or cluster.size == 1:
        return None
    if not has_workers:
        way = f"strategy={config.strategy} is one process; set --strategy=multi_worker"
        raise ConfigError(f"{cluster.origin} names {cluster.size} workers, and {way}")
    if config.device_order:
        why = "each takes its GPUs in their order; set CUDA_VISIBLE_DEVICES"
        given_order = f"device_order={config.device_order}"
        raise ConfigError(f"{given_order} with several workers: {why}")
    validate_addresses(cluster, allow_public_address)
    return cluster


def join_workers(cluster: Cluster | None, config: Config, devices: Devices) -> Workers:
    """Join the workers of a run, which must be alike."""
    # Each worker computes norms, and Muon's products, by itself.
    has_sums = config.clip_norm > 0 or config.choice_of("optimizer").sums
    return join(cluster, devices, dataclasses.asdict(config), has_sums)


def build_run(
    config: Config,
    devices: Devices,
    checkpoint: Checkpoint | None = None,
    allow_change: tuple[str, ...] = (),
    workers: Workers = SINGLE_WORKER,
    schedule_fn: Callable[[int], Schedule] | None = None,
) -> tuple[builder.Parts, Trainer]:
    """Return the parts of a run and its trainer, or raise a ConfigError."""
    is_given = config.choice_of("model").is_given
    if is_given and checkpoint is None and not given.has_weights(config.model):
        raise factories.asks_for("model", config.model)
    create_metric(config.best_by)  # raises
    continued = None
    if checkpoint is not None and not {"init_from", "standardize"} & set(allow_change):
        continued = DatasetInfo.from_values(checkpoint.run_state["dataset_info"])
    taught_by = teacher = None
    if config.teacher:
        taught_by, teacher = read_teacher(config.teacher)
    parts, trainer = assembly.assemble(
        config, devices, workers, teacher, continued=continued, schedule_fn=schedule_fn
    )
    if parts.eval_split[0] != "validation":
        checks.validate_without_validation(config)
    checks.validate_metric(config, parts.data.multi_label)
    validate_dataset(parts.data, checkpoint, allow_change)
    validate_data(workers, parts.data, parts.num_examples, config.init_from)
    if taught_by is not None:
        validate_teacher(taught_by, parts)
    if workers.is_chief:
        held_out = {"test": parts.data.test, parts.eval_split[0]: parts.eval_split[1]}
        record_identical(parts.data, parts.train_batches.source, held_out)
    if config.device_memory_mb:
        parallel_devices.check_memory(trainer.variable_bytes(), config.device_memory_mb)
    return parts, trainer


def read_teacher(path: str) -> tuple[RestoredRun, keras.Model]:
    """Return a trained run, and its network with the weights that it reports."""
    with tf.device(parallel_devices.HOST):  # the towers copy it
        try:
            run = read_run(path)
        except TowersError as error:
            error.args = (f"teacher={path}: {error}",)
            raise
        return run, run.model if run.model_ema is None else run.model_ema


def validate_teacher(run: RestoredRun, parts: builder.Parts) -> None:
    """Raise ConfigError if a teacher was trained on other classes or inputs."""
    shape = tuple(parts.data.test.image_shape)
    ours = tuple(parts.data.class_names), shape, parts.augment.image_shape
    is_alike = (run.class_names, run.image_shape, run.input_shape) == ours
    is_alike &= run.pixels == parts.data.pixels
    if is_alike:
        images = np.random.default_rng(0).integers(0, 256, (2, *shape), np.uint8)
        images = images.astype(run.pixels.dtype)
        inputs = parts.augment.evaluate(tf.constant(images))
        is_alike = np.allclose(run.preprocess(images), inputs, atol=1e-5)
    if not is_alike:
        why = "it was trained on other classes, sizes or inputs"
        way = "choose a run with the same data set, sizes and kind of --augment"
        raise ConfigError(f"teacher={run.path}: {why}; {way}")
