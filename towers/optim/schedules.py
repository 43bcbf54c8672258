"""Learning-rate schedules by images trained on, and rates of single parameters.

By images, not steps, a schedule does not change with the number of towers or workers.
(The multi-GPU tutorial counts the steps of one tower: with N towers its rate decays N
times late.)
"""

import fnmatch
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import tensorflow as tf

from towers.config import factories
from towers.config.list_options import ParamRate
from towers.errors import ConfigError, did_you_mean
from towers.optim.update import RateFn

# Images trained on, int64 of any shape -> rates, float64.
Schedule = Callable[[tf.Tensor], tf.Tensor]

# First rate of `one_cycle` over its highest, as in fastai and PyTorch.
CYCLE_START = 0.04

# Finest part of an epoch, and most images of a run.
_FINEST = Fraction(1, 10**7)
_MAX_IMAGES = 2**100


def exact(number: float) -> Fraction:
    """Return the fraction that a float approximates, such as 11/10 for 1.1."""
    if 0 < number < _FINEST:
        return _FINEST
    return Fraction(number).limit_denominator(_FINEST.denominator)


def num_images(epochs: float, num_examples: int) -> Fraction:
    """Return the number of images in `epochs` of `num_examples` each, as a fraction.

    In floats 1.1 epochs of 50,000 are 55,000.00000000001 images, and a step too many.
    """
    return min(exact(epochs) * num_examples, Fraction(_MAX_IMAGES))


def constant(learning_rate: float) -> Schedule:
    """Keep the rate."""
    return lambda images_seen: tf.fill(
        tf.shape(images_seen), tf.constant(learning_rate, tf.float64)
    )


def exponential(
    learning_rate: float,
    *,
    num_examples: int,
    decay_factor: float,
    epochs_per_decay: float,
    is_smooth: bool = False,
) -> Schedule:
    """Multiply the rate by `decay_factor` every `epochs_per_decay` epochs."""
    images_per_decay = num_images(epochs_per_decay, num_examples)
    # Keep numerator and denominator, so that whole quotients stay exact.
    images, decays = map(float, images_per_decay.as_integer_ratio())

    def rate(images_seen):
        stairs = tf.cast(images_seen, tf.float64) * decays / images
        stairs = stairs if is_smooth else tf.floor(stairs)
        return learning_rate * tf.constant(decay_factor, tf.float64) ** stairs

    return rate


def piecewise(
    learning_rate: float,
    *,
    num_examples: int,
    epoch_factors: Sequence[tuple[float, float]],
) -> Schedule:
    """Multiply the rate by the factor of the last (epoch, factor) that has begun."""
    boundaries = [float(num_images(epoch, num_examples)) for epoch, _ in epoch_factors]
    factors = [1.0, *(factor for _, factor in epoch_factors)]

    def rate(images_seen):
        images = tf.cast(images_seen, tf.float64)[..., None]
        is_past = images >= tf.constant(boundaries, tf.float64)
        piece = tf.reduce_sum(tf.cast(is_past, tf.int32), axis=-1)
        return learning_rate * tf.gather(tf.constant(factors, tf.float64), piece)

    return rate


def cosine(
    learning_rate: float,
    *,
    num_examples: int,
    num_epochs: float,
    min_rate_factor: float = 0.0,
) -> Schedule:
    """Lower the rate by half a cosine to `min_rate_factor` of it (arXiv:1608.03983)."""

    def rate(images_seen):
        done = _share_done(images_seen, num_examples, num_epochs)
        fall = 0.5 * (1 + tf.cos(math.pi * done))
        return learning_rate * (min_rate_factor + (1 - min_rate_factor) * fall)

    return rate


def linear(learning_rate: float, *, num_examples: int, num_epochs: float) -> Schedule:
    """Lower the rate linearly to zero at the end of the run."""

    def rate(images_seen):
        return learning_rate * (1 - _share_done(images_seen, num_examples, num_epochs))

    return rate


def one_cycle(
    learning_rate: float, *, num_examples: int, num_epochs: float, peak_fraction: float
) -> Schedule:
    """Raise the rate to `peak_fraction` of the run, then lower it to zero."""

    def rate(images_seen):
        done = _share_done(images_seen, num_examples, num_epochs)
        rise = CYCLE_START + (1 - CYCLE_START) * (done / peak_fraction)
        fall = (1 - done) / (1 - peak_fraction)
        return learning_rate * tf.minimum(rise, fall)

    return rate


def plateau(
    learning_rate: float, *, decay_factor: float, plateau_patience: int
) -> Schedule:
    """Keep the rate, which evaluations lower; see `Trainer.set_rate_factor`."""
    return constant(learning_rate)


def _share_done(images_seen, num_examples, num_epochs):
    all_images = float(num_images(num_epochs, num_examples))
    return tf.minimum(tf.cast(images_seen, tf.float64) / all_images, 1.0)


def create_schedule(
    name: str,
    learning_rate: float,
    *,
    num_examples: int,
    warmup_epochs: float,
    warmup_start_factor: float = 0.0,
    **shape: Any,
) -> Schedule:
    """Create a schedule of `towers.config.choices.SCHEDULES`, or FILE.py:FUNCTION.

    It is multiplied by a linear rise from `warmup_start_factor` to 1 over
    `warmup_epochs`. It gets the initial or highest rate, the training images of an
    epoch, and the options of `shape` that its signature names.
    """
    schedule = factories.create(
        "schedule",
        name,
        learning_rate=learning_rate,
        num_examples=num_examples,
        **shape,
    )
    if warmup_epochs == 0:
        return schedule

    def rate(images_seen):
        done = _share_done(images_seen, num_examples, warmup_epochs)
        rise = warmup_start_factor + (1 - warmup_start_factor) * done
        return rise * schedule(images_seen)

    return rate


# Learning rates of single parameters, chosen by patterns of their names.

FROZEN = ParamRate("", 0.0)

# Block of a layer by its name; the second pattern is for networks without such names.
_BLOCKS = (
    re.compile(r"(.*block_?\d+[a-z]?)(?=_|/|$)"),
    re.compile(r"[^_/]*?(\d+)(?:_|/|$)"),
)
_STAGE = re.compile(r"(.*stage\d+_)")

# Name of a parameter, in the order of the model -> its rate, or None for the
# schedule's.
Matched = Mapping[str, ParamRate | None]


def match_param_rates(
    rates: Sequence[ParamRate],
    names: Sequence[str],
    frozen: frozenset[str] = frozenset(),
) -> Matched:
    """Return the first rate whose pattern matches, per name; 0 for frozen names."""
    matched = {
        name: FROZEN
        if name in frozen
        else next((r for r in rates if _matches(name, r.pattern)), None)
        for name in names
    }
    for rate in rates:
        if rate not in matched.values():
            raise ConfigError(
                f"param_rates: {rate.pattern!r} matches no parameter of the network, "
                "or every match is claimed by an earlier pattern or frozen; "
                f"{did_you_mean(rate.pattern, names)}"
                f"the first are {', '.join(names[:5])}"
            )
    return matched


def match_frozen(patterns: Sequence[str], names: Sequence[str]) -> frozenset[str]:
    """Return the names that match a pattern of --freeze."""
    frozen: set[str] = set()
    for pattern in patterns:
        matching = {name for name in names if _matches(name, pattern)}
        if not matching:
            raise ConfigError(
                f"freeze: {pattern!r} matches no parameter of the network; "
                f"{_nearest(pattern, names)}the first are " + ", ".join(names[:5])
            )
        frozen |= matching
    if len(frozen) == len(names):
        raise ConfigError(
            f"freeze={','.join(patterns)} leaves no parameter to train; freeze fewer"
        )
    return frozenset(frozen)


def _nearest(pattern, names):
    """Return a hint with the nearest name, layer or part of one."""
    layers = [name.rpartition("/")[0] for name in names]
    known = [*names, *layers, *(part for x in layers for part in re.split("[/_]", x))]
    text = pattern.strip("*/")
    return did_you_mean(text, known) or did_you_mean(text.rpartition("/")[0], known)


def _matches(name, pattern):
    """Return whether a name matches a pattern, in which */ may be nothing."""
    return any(fnmatch.fnmatchcase(n, pattern) for n in (name, f"/{name}"))


def create_rate_fns(
    matched: Matched,
    schedule: Schedule,
    learning_rate: float,
    num_examples: int,
    images_per_step: int,
) -> tuple[RateFn, tuple[RateFn, ...]]:
    """Return rates by step: of the schedule, and of each parameter if they differ."""

    def rate_fn(rate: ParamRate | None = None) -> RateFn:
        by_images, factor = schedule, rate.factor if rate else 1.0
        if rate and rate.epochs:
            peak, factor = factor * learning_rate, 1.0
            by_images = linear(peak, num_examples=num_examples, num_epochs=rate.epochs)
        if factor == 1.0:  # on a GPU a product is a kernel of its own
            return lambda step: by_images(step * images_per_step)
        return lambda step: factor * by_images(step * images_per_step)

    learning_rate_fn = rate_fn()
    if not any(matched.values()):
        return learning_rate_fn, ()
    by_rate = {rate: rate_fn(rate) for rate in matched.values()}
    by_rate[None] = learning_rate_fn
    return learning_rate_fn, tuple(by_rate[rate] for rate in matched.values())


def decay_by_layer(
    matched: Matched, factor: float, head: Collection[str] = ()
) -> Matched:
    """Return rates that fall from the head to the input (arXiv:2106.08254).

    The rate of a parameter is multiplied by `factor` for its block and for each later
    one. A block is consecutive layers whose names are the same up to the number after
    "block" or, if no name has one, begin with a word of the same number. Layers such as
    stage2_reduce belong to the first block of their stage, others to the block before
    them, the last layer and those in `head` to none.

    Raises:
        ConfigError: there are fewer than two blocks.
    """
    if factor == 1:
        return matched
    layers = [name.rpartition("/")[0] for name in matched]
    head = {*head, layers[-1]}
    pattern = next((x for x in _BLOCKS if any(map(x.match, layers))), _BLOCKS[-1])
    block, number, numbers = "", 0, []
    for layer in layers:
        match, stage, previous = pattern.match(layer), _STAGE.match(layer), block
        if match:
            block = match[1]
        elif stage and not block.startswith(stage[1]):
            block = stage[1]
        goes_on = previous and block == f"{previous}block1"
        number += block != previous and not goes_on
        numbers.append(number)
    below_head = {n for n, x in zip(numbers, layers, strict=True) if x not in head}
    if len(below_head) < 2:
        raise ConfigError(
            f"layer_decay={factor}: the names of the network's layers show no blocks, "
            f"such as block1_conv or conv1; the first are {', '.join(layers[:3])}; set "
            "--param_rates"
        )
    rates, last = {}, max(below_head) + 1
    for name, layer, number in zip(matched, layers, numbers, strict=True):
        rate = matched[name] or ParamRate("", 1.0)
        power = 0 if layer in head else last - number
        rates[name] = rate._replace(factor=rate.factor * factor**power)
    return rates


def scale_decays(decays: Sequence[float], matched: Matched) -> tuple[float, ...]:
    """Divide weight decay by the factors of the rates, which speed it up."""
    pairs = zip(decays, matched.values(), strict=True)
    return tuple(d / r.factor if r and r.factor else d for d, r in pairs)


def freezing_steps(
    matched: Matched, num_examples: int, images_per_step: int
) -> dict[str, int]:
    """Return the first step, by name, from which a parameter's rate is zero."""
    steps = {}
    for name, rate in matched.items():
        if rate and rate.factor == 0:
            steps[name] = 0
        elif rate and rate.epochs:
            steps[name] = math.ceil(
                num_images(rate.epochs, num_examples) / images_per_step
            )
    return steps
