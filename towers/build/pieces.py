"""The network and its update, from a Config."""

import keras

from towers import models
from towers.config import Config
from towers.config.config import options_read_by
from towers.config.list_options import (
    parse_epoch_factors,
    parse_freeze,
    parse_optimizer_options,
    parse_param_rates,
)
from towers.models.variables import variable_names
from towers.optim import losses, optimizers, param_rates, schedules
from towers.optim.update import Update
from towers.run import sizes


def create_network(
    config: Config,
    image_shape: tuple[int, int, int],
    num_classes: int,
    for_training: bool,
    device_kind: str = "CPU",
) -> keras.Model:
    """The network of a config, with its initial parameters.

    Args:
        config: of the run.
        image_shape: height, width, channels of its input.
        num_classes: number of logits.
        for_training: False for inference, which needs less memory.
        device_kind: CPU or GPU, where it will run.

    Raises:
        ConfigError: its file is missing or wrong, or it cannot fit in memory.
    """

    def check_bytes(trainable: int, others: int) -> None:
        sizes.check_variables(config, trainable, others, for_training)

    return models.create_model(
        config.model,
        image_shape=image_shape,
        num_classes=num_classes,
        width=config.width,
        weight_decay=config.weight_decay,
        precision=config.precision,
        seed=config.seed,
        device_kind=device_kind,
        check_bytes=check_bytes,
    )


def create_schedule(config: Config, num_examples: int) -> schedules.Schedule:
    """The learning rate over the images trained on, for so many training images."""
    options = options_read_by(config, "schedule")
    options["epoch_factors"] = parse_epoch_factors(config.epoch_factors)
    return schedules.create_schedule(
        config.schedule,
        config.learning_rate,
        num_examples=num_examples,
        num_epochs=config.num_epochs,
        warmup_epochs=config.warmup_epochs,
        **options,
    )


def match_parameters(
    config: Config, model: keras.Model
) -> tuple[param_rates.Matched, frozenset[str]]:
    """The rates of the parameters of a network, and the names of the frozen ones.

    Raises:
        ConfigError: a pattern fits no parameter, or all are frozen.
    """
    names = variable_names(model.trainable_variables)
    frozen = param_rates.match_frozen(parse_freeze(config.freeze), names)
    rates = parse_param_rates(config.param_rates)
    return param_rates.match_param_rates(rates, names, frozen), frozen


def create_update(
    config: Config,
    num_examples: int,
    model: keras.Model,
    matched: param_rates.Matched,
) -> Update:
    """The optimizer with its schedules.

    Args:
        config: of the run.
        num_examples: training images of an epoch; 0 for an evaluation, which has no
            schedules.
        model: the network; its regularizers are removed where the optimizer applies
            the weight decay.
        matched: the parameters' rates.
    """
    optimizer = optimizers.create_optimizer(
        config.optimizer,
        parse_optimizer_options(config.optimizer_options),
        **options_read_by(config, "optimizer"),
    )
    decays = ()
    if optimizer.takes_decay:
        decays = param_rates.scale_decays(
            losses.pop_weight_decay(model.trainable_variables), matched
        )
    learning_rate_fn, rate_fns = schedules.constant(0.0), ()
    if num_examples:
        learning_rate_fn, rate_fns = param_rates.create_rate_fns(
            matched,
            create_schedule(config, num_examples),
            config.learning_rate,
            num_examples,
            config.images_per_step,
        )
    return Update(
        optimizer=optimizer,
        learning_rate_fn=learning_rate_fn,
        clip_norm=config.clip_norm,
        ema_decay=config.ema_decay,
        decays=decays,
        rate_fns=rate_fns,
    )
