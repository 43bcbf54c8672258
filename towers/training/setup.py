"""The parts of a run, its trainer, and its teacher."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import build, build_trainer
from towers.config import Config, checks, factories
from towers.data.identical import record_identical
from towers.data.sets import arrays
from towers.errors import ConfigError, TowersError
from towers.evaluation.figures import create_metric
from towers.evaluation.restored import read_run
from towers.models.keras import given
from towers.optim.schedules import Schedule
from towers.parallel import devices as parallel_devices
from towers.parallel.devices import Devices
from towers.parallel.trainer import Trainer
from towers.parallel.workers import ALONE, Workers
from towers.run.checkpoint import Checkpoint
from towers.run.dataset_info import DatasetInfo
from towers.run.peers import validate_data
from towers.run.restore import validate_dataset


def with_given(
    config: Config, model: Any, data: Any, class_names: Sequence[str]
) -> tuple[Config, str]:
    """Return the Config of what a program gives, and its network in JSON."""
    architecture = ""
    if model is not None:
        name, architecture = given.give(model)
        config = dataclasses.replace(config, model=name)
    if data is not None:
        config = dataclasses.replace(config, dataset=arrays.give(data, class_names))
    return config, architecture


def build_run(
    config: Config,
    devices: Devices,
    workers: Workers = ALONE,
    *,
    checkpoint: Checkpoint | None = None,
    allow_change: tuple[str, ...] = (),
    schedule_fn: Callable[[Config, int], Schedule] | None = None,
) -> tuple[build.Parts, Trainer]:
    """Return the parts of a run and its trainer, or raise a ConfigError."""
    is_given = config.choice_of("model").is_given
    if is_given and checkpoint is None and not given.has_weights(config.model):
        raise factories.asks_for("model", config.model)
    share = build_trainer.share_of(config, devices, workers)
    continued = None
    if checkpoint is not None and not {"init_from", "standardize"} & set(allow_change):
        continued = DatasetInfo.from_values(checkpoint.trainer_state["dataset_info"])
    parts = build.build(
        config,
        device_kind=devices.kind,
        share=share,
        continued=continued,
        schedule_fn=schedule_fn,
    )
    if parts.eval_split[0] != "validation":
        checks.validate_without_validation(config)
    checks.validate_metric(config, parts.data.multi_label)
    create_metric(config.best_by)  # raises
    validate_dataset(parts.data, checkpoint, allow_change)
    validate_data(workers, parts.data, parts.num_examples, config.init_from)
    if workers.is_chief:
        held_out = {"test": parts.data.test, parts.eval_split[0]: parts.eval_split[1]}
        record_identical(parts.data, parts.train_source, held_out)
    teacher = read_teacher(config, parts) if config.teacher else None
    trainer = build_trainer.create_trainer(
        config, parts, devices, workers, teacher=teacher
    )
    if checkpoint is not None and "teacher" not in allow_change:
        trained = checkpoint.trainer_state.get("teacher")
        if trainer.teacher and trained not in (None, trainer.teacher.checksum):
            why = "its parameters are not those that the run has followed"
            way = "give the former ones, or --allow_change=teacher"
            raise ConfigError(f"teacher={config.teacher}: {why}; {way}")
    if config.device_memory_mb:
        parallel_devices.check_memory(trainer.variable_bytes(), config.device_memory_mb)
    return parts, trainer


def read_teacher(config: Config, parts: build.Parts) -> keras.Model:
    """Return the network of the run `teacher`, with the parameters that it reports.

    Raises:
        TowersError: such as a ConfigError if it was trained on other inputs.
    """
    shape, begin = parts.data.test.image_shape, f"teacher={config.teacher}: "
    with tf.device(parallel_devices.HOST):  # the towers copy it
        try:
            run = read_run(config.teacher)
        except TowersError as error:
            error.args = (f"{begin}{error}",)
            raise
        alike = run.class_names == tuple(parts.data.class_names)
        alike &= run.image_shape == tuple(shape)
        alike &= run.input_shape == parts.augment.image_shape
        if alike:
            images = np.random.default_rng(0).integers(0, 256, (2, *shape), np.uint8)
            inputs = parts.augment.evaluate(tf.constant(images))
            alike = np.allclose(run.preprocess(images), inputs, atol=1e-5)
        if not alike:
            raise ConfigError(
                f"{begin}it was trained on other classes, sizes or inputs; choose a "
                "run with the same data set, sizes and kind of --augment"
            )
        return run.model if run.model_ema is None else run.model_ema
