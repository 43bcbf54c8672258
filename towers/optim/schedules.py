"""Learning-rate schedules, functions of the number of images trained on, and rates of
single parameters.

Counting images, not steps, means that no schedule changes with the number of towers or
workers. (The multi-GPU tutorial counts the steps of one tower: with N towers its rate
decays N times late.)
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
from towers.errors import ConfigError, nearest
from towers.optim.update import RateFn

# A schedule takes the images trained on, an int64 scalar, and gives the rate, float64;
# of a tensor of them it gives the rates.
Schedule = Callable[[tf.Tensor], tf.Tensor]

# Where `one_cycle` begins, as a part of its highest rate; fastai and PyTorch divide by
# 25 as well by default.
CYCLE_START = 0.04

# No run needs a finer part of an epoch, or more images.
_FINEST = Fraction(1, 10**7)
_MAX_IMAGES = 2**100


def exact(number: float) -> Fraction:
    """The fraction that a float approximates: 11/10 for 1.1, and 5/6 for the result of
    5 / 6. A number above 0 stays above 0.
    """
    if 0 < number < _FINEST:
        return _FINEST
    return Fraction(number).limit_denominator(_FINEST.denominator)


def num_images(epochs: float, num_examples: int) -> Fraction:
    """Number of images in `epochs` of `num_examples` each.

    In floats 1.1 epochs of 50,000 are 55,000.00000000001 images, and a step too many.
    """
    return min(exact(epochs) * num_examples, Fraction(_MAX_IMAGES))


def constant(learning_rate: float) -> Schedule:
    """The same rate throughout."""
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
    """A staircase: `decay_factor` once more every `epochs_per_decay` epochs; or the
    smooth curve through the left edges of the stairs.
    """
    images_per_decay = num_images(epochs_per_decay, num_examples)
    # Of a fraction both parts, as the quotient is exact where it is a whole number.
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
    """The rate times the factor of the last epoch in `epoch_factors` that has begun,
    (epoch, factor) with rising epochs, or times 1; factors do not accumulate.
    """
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
    """Half a cosine from the rate to `min_rate_factor` times the rate at the end of the
    run (arXiv:1608.03983).
    """

    def rate(images_seen):
        done = _share_done(images_seen, num_examples, num_epochs)
        fall = 0.5 * (1 + tf.cos(math.pi * done))
        return learning_rate * (min_rate_factor + (1 - min_rate_factor) * fall)

    return rate


def linear(learning_rate: float, *, num_examples: int, num_epochs: float) -> Schedule:
    """A line from the rate to zero at the end of the run."""

    def rate(images_seen):
        return learning_rate * (1 - _share_done(images_seen, num_examples, num_epochs))

    return rate


def one_cycle(
    learning_rate: float, *, num_examples: int, num_epochs: float, peak_fraction: float
) -> Schedule:
    """A line up to the rate, and a line down to zero at the end of the run.

    After Smith (2018, arXiv:1803.09820), whose cycle ends where it began, with a tail
    far below. It begins at CYCLE_START times the rate. `peak_fraction` is the part of
    the run after which the rate is highest, in (0, 1).
    """

    def rate(images_seen):
        done = _share_done(images_seen, num_examples, num_epochs)
        rise = CYCLE_START + (1 - CYCLE_START) * (done / peak_fraction)
        fall = (1 - done) / (1 - peak_fraction)
        return learning_rate * tf.minimum(rise, fall)

    return rate


def plateau(
    learning_rate: float, *, decay_factor: float, plateau_patience: int
) -> Schedule:
    """The same rate throughout; evaluations lower it by a factor of the trainer, see
    `restore.scale_rate`.
    """
    return constant(learning_rate)


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """A factor times another schedule."""
    return lambda images_seen: factor * schedule(images_seen)


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
    """The named schedule of `towers.config.choices.SCHEDULES`, or FILE.py:FUNCTION,
    multiplied by a linear rise from `warmup_start_factor` to 1 over `warmup_epochs`.

    It gets the initial or highest rate, the training images of an epoch, and those of
    the options `shape` that its signature names: num_epochs, decay_factor,
    epochs_per_decay, epoch_factors, min_rate_factor, peak_fraction, plateau_patience.
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

# The block of a layer by its name, and where no layer has such a name.
_BLOCKS = (
    re.compile(r"(.*block_?\d+[a-z]?)(?=_|/|$)"),
    re.compile(r"[^_/]*?(\d+)(?:_|/|$)"),
)
_STAGE = re.compile(r"(.*stage\d+_)")

# Name of a parameter, in the order of the model -> its rate; None for the schedule's.
Matched = Mapping[str, ParamRate | None]


def match_param_rates(
    rates: Sequence[ParamRate],
    names: Sequence[str],
    frozen: frozenset[str] = frozenset(),
) -> Matched:
    """For each name the first of the rates whose pattern matches it; 0 for names in
    `frozen`. A pattern that is the first one of no name is a ConfigError.
    """
    matched = {
        name: FROZEN
        if name in frozen
        else next((r for r in rates if _fits(name, r.pattern)), None)
        for name in names
    }
    for rate in rates:
        if rate not in matched.values():
            raise ConfigError(
                f"param_rates: no parameter of the network takes {rate.pattern!r}: "
                "none is called so, or all that are fit a pattern before it or are "
                "frozen; "
                f"{nearest(rate.pattern, names)}the first are {', '.join(names[:5])}"
            )
    return matched


def match_frozen(patterns: Sequence[str], names: Sequence[str]) -> frozenset[str]:
    """The names that fit one of the patterns of --freeze; ConfigError where a pattern
    fits no name, or every name fits one.
    """
    frozen = set()
    for pattern in patterns:
        fitting = {name for name in names if _fits(name, pattern)}
        if not fitting:
            raise ConfigError(
                f"freeze: no parameter of the network fits {pattern!r}; "
                f"{_nearest(pattern, names)}the first are " + ", ".join(names[:5])
            )
        frozen |= fitting
    if len(frozen) == len(names):
        raise ConfigError(
            f"freeze={','.join(patterns)} leaves no parameter to train; freeze fewer"
        )
    return frozenset(frozen)


def _nearest(pattern, names):
    """The name, layer or part of one next to a pattern, or nothing."""
    layers = [name.rpartition("/")[0] for name in names]
    known = [*names, *layers, *(part for x in layers for part in re.split("[/_]", x))]
    text = pattern.strip("*/")
    return nearest(text, known) or nearest(text.rpartition("/")[0], known)


def _fits(name, pattern):
    """True if a name fits a pattern, in which */ also stands for no layer around it."""
    return any(fnmatch.fnmatchcase(n, pattern) for n in (name, f"/{name}"))


def create_rate_fns(
    matched: Matched,
    schedule: Schedule,
    learning_rate: float,
    num_examples: int,
    images_per_step: int,
) -> tuple[RateFn, tuple[RateFn, ...]]:
    """Learning rates as functions of the step: of the schedule, whose initial or
    highest rate is `learning_rate`, and one per parameter; empty where all follow the
    schedule. Equal rates share a function.
    """

    def rate_fn(rate: ParamRate | None = None) -> RateFn:
        by_images = schedule
        if rate and rate.epochs:
            by_images = linear(
                rate.factor * learning_rate,
                num_examples=num_examples,
                num_epochs=rate.epochs,
            )
        elif rate:
            by_images = scaled(schedule, rate.factor)
        return lambda step: by_images(step * images_per_step)

    learning_rate_fn = rate_fn()
    by_rate = {rate: rate_fn(rate) for rate in matched.values() if rate}
    if not by_rate:
        return learning_rate_fn, ()
    rate_fns = (by_rate.get(rate, learning_rate_fn) for rate in matched.values())
    return learning_rate_fn, tuple(rate_fns)


def decay_by_layer(
    matched: Matched, factor: float, head: Collection[str] = ()
) -> Matched:
    """Returns rates that fall from the head to the input (Bao et al. 2021,
    arXiv:2106.08254).

    The rate of a parameter is multiplied by `factor` once for its block and once for
    each after it. A block is layers in a row whose names are the same up to the number
    after "block" or, where no name has one, begin with a word of the same number, such
    as conv1 and norm1_2. Layers such as stage2_reduce belong to the first block of
    their stage, or are a block of their own. Other layers belong to the block before
    them, the last layer and the layers that `head` names to none.

    Raises:
        ConfigError: there are not two blocks.
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
    for (name, rate), layer, number in zip(
        matched.items(), layers, numbers, strict=True
    ):
        rate = rate or ParamRate("", 1.0)
        power = 0 if layer in head else last - number
        rates[name] = rate._replace(factor=rate.factor * factor**power)
    return rates


def scale_decays(decays: Sequence[float], matched: Matched) -> tuple[float, ...]:
    """Coefficients of weight decay over the factors of the rates: a parameter with a
    higher rate does not decay faster.
    """
    pairs = zip(decays, matched.values(), strict=True)
    return tuple(d / r.factor if r and r.factor else d for d, r in pairs)


def freezing_steps(
    matched: Matched, num_examples: int, images_per_step: int
) -> dict[str, int]:
    """Name -> first step at which the parameter's rate is zero for good."""
    steps = {}
    for name, rate in matched.items():
        if rate and rate.factor == 0:
            steps[name] = 0
        elif rate and rate.epochs:
            steps[name] = math.ceil(
                num_images(rate.epochs, num_examples) / images_per_step
            )
    return steps
