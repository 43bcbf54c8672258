"""From a Config to how its network is trained: the update, and the run's stages."""

import fnmatch
import math
from collections.abc import Callable

import keras

from towers.config import Config
from towers.config.checks import nearest
from towers.config.list_options import (
    ParamRate,
    parse_early_sizes,
    parse_epoch_factors,
    parse_param_rates,
)
from towers.errors import ConfigError
from towers.optim import losses, optimizers, schedules
from towers.optim.phases import Stage, image_size
from towers.optim.update import RateFn, Update
from towers.parallel.strategy import variable_names


def create_schedule(config: Config, num_examples: int) -> schedules.Schedule:
    """The learning rate over the images seen, with so many training images."""
    return schedules.create_schedule(
        config.schedule,
        config.learning_rate,
        num_examples=num_examples,
        num_epochs=config.num_epochs,
        warmup_epochs=config.warmup_epochs,
        decay_factor=config.decay_factor,
        epochs_per_decay=config.epochs_per_decay,
        epoch_factors=parse_epoch_factors(config.epoch_factors),
        peak_fraction=config.peak_fraction,
    )


def create_update(config: Config, num_examples: int, model: keras.Model) -> Update:
    """The optimizer with its schedules.

    Args:
        config: what the run is.
        num_examples: training images of an epoch.
        model: the network.

    Raises:
        ConfigError: `param_rates` name no parameter of it.
    """
    schedule = create_schedule(config, num_examples)
    optimizer = optimizers.create_optimizer(
        config.optimizer,
        momentum=config.momentum,
        beta1=config.beta1,
        beta2=config.beta2,
        rho=config.rho,
        epsilon=config.epsilon,
        trust_coefficient=config.trust_coefficient,
        muon_momentum=config.muon_momentum,
    )
    own_rates = _own_rates(config, model)
    decays = ()
    if optimizer.takes_decay:
        # A parameter of a higher rate is not to decay faster.
        taken = losses.take_weight_decay(model.trainable_variables)
        pairs = zip(taken, own_rates, strict=True)
        decays = tuple(d / r.factor if r and r.factor else d for d, r in pairs)

    def rate_fn(own: ParamRate | None = None) -> RateFn:
        found = schedule
        if own and own.epochs:
            rate = own.factor * config.learning_rate
            found = schedules.linear(
                rate, num_examples=num_examples, num_epochs=own.epochs
            )
        elif own:
            found = schedules.scaled(schedule, own.factor)
        return lambda step: found(step * config.images_per_step)

    learning_rate_fn = rate_fn()
    of_own = {own: rate_fn(own) for own in own_rates if own}
    return Update(
        optimizer=optimizer,
        learning_rate_fn=learning_rate_fn,
        clip_norm=config.clip_norm,
        ema_decay=config.ema_decay,
        decays=decays,
        rate_fns=tuple(of_own.get(own, learning_rate_fn) for own in own_rates)
        if of_own
        else (),
    )


def _own_rates(config: Config, model: keras.Model) -> list[ParamRate | None]:
    """Per parameter the first of the `param_rates` that fits its name."""
    names = variable_names(model.trainable_variables)
    rates = parse_param_rates(config.param_rates)
    found = [
        next((r for r in rates if fnmatch.fnmatchcase(name, r.pattern)), None)
        for name in names
    ]
    for rate in rates:
        if rate not in found:
            raise ConfigError(
                f"param_rates: no parameter of model={config.model} takes "
                f"{rate.pattern!r}: none is called so, or all that are fit a pattern "
                f"before it; {nearest(rate.pattern, names)}the first are "
                + ", ".join(names[:5])
            )
    return found


def create_stages(
    config: Config,
    num_examples: int,
    total_steps: int,
    model: keras.Model,
    model_for: Callable[[int], keras.Model],
) -> tuple[Stage, ...]:
    """The parts of a run whose steps are not alike; empty where all are alike and
    nothing is frozen.

    Args:
        config: what the run is.
        num_examples: training images of an epoch.
        total_steps: steps of the run.
        model: the network for whole images.
        model_for: makes the network for images of so many pixels in height and width.

    Raises:
        ConfigError: the images cannot be shrunk so, or another network would be needed.
    """
    frozen_from = {}
    names = variable_names(model.trainable_variables)
    for name, own in zip(names, _own_rates(config, model), strict=True):
        if own and own.factor == 0:
            frozen_from[name] = 0
        elif own and own.epochs:
            images = own.epochs * num_examples
            frozen_from[name] = math.ceil(images / config.images_per_step)
    early = [
        (math.floor(round(part * total_steps, 6)), size)
        for size, part in parse_early_sizes(config.early_sizes)
    ]
    smaller = {size: _smaller(config, size, model, model_for) for _, size in early}
    ends = {end for end, _ in early} | set(frozen_from.values())
    stages, begin = [], 0
    for end in sorted(end for end in ends if 0 < end < total_steps) + [math.inf]:
        size = next((size for until, size in early if begin < until), 0)
        frozen = {name for name, since in frozen_from.items() if since <= begin}
        stages.append(Stage(end, smaller.get(size, model), frozenset(frozen)))
        begin = end
    return tuple(stages) if len(stages) > 1 or stages[0].frozen else ()


def _smaller(config, size, model, model_for):
    """The network for images of another size, with the same variables."""

    def described(network):
        inputs = [(x.name, x.shape) for x in network.inputs if x.name != "images"]
        return [(v.path, v.shape) for v in network.variables], inputs

    what = f"early_sizes={config.early_sizes!r}"
    height, width = image_size(model)
    if height != width or not size < height:
        raise ConfigError(
            f"{what}: images of {height}x{width} cannot be shrunk to {size}x{size}"
        )
    try:
        found = model_for(size)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    if described(found) != described(model):
        raise ConfigError(
            f"{what}: model={config.model} has other parameters on images of "
            f"{size}x{size}; choose a network that ends in a global pool"
        )
    return found
