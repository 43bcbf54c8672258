"""Learning rates of single parameters, chosen by patterns of their names."""

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence

from towers.config.list_options import ParamRate
from towers.errors import ConfigError, nearest
from towers.optim import schedules
from towers.optim.schedules import Schedule, num_images
from towers.optim.update import RateFn

FROZEN = ParamRate("", 0.0)

# The block of a layer by its name, and where no layer has such a name.
_BLOCKS = (
    re.compile(r"(.*block_?\d+[a-z]?)(?=_|/|$)"),
    re.compile(r"[^_/]*?(\d+)(?:_|/|$)"),
)

# Name of a parameter, in the order of the model -> its rate; None for the schedule's.
Matched = Mapping[str, ParamRate | None]


def match_param_rates(
    rates: Sequence[ParamRate],
    names: Sequence[str],
    frozen: frozenset[str] = frozenset(),
) -> Matched:
    """For each name the first of the rates whose pattern matches it; 0 for names in
    `frozen`. A pattern that is the first one of no name is a ConfigError."""
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
                "none is called so, or all that are fit a pattern before it; "
                f"{nearest(rate.pattern, names)}the first are {', '.join(names[:5])}"
            )
    return matched


def match_frozen(patterns: Sequence[str], names: Sequence[str]) -> frozenset[str]:
    """The names that fit one of the patterns of --freeze; ConfigError where a pattern
    fits no name, or every name fits one."""
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
    schedule. Equal rates share a function."""

    def rate_fn(rate: ParamRate | None = None) -> RateFn:
        by_images = schedule
        if rate and rate.epochs:
            by_images = schedules.linear(
                rate.factor * learning_rate,
                num_examples=num_examples,
                num_epochs=rate.epochs,
            )
        elif rate:
            by_images = schedules.scaled(schedule, rate.factor)
        return lambda step: by_images(step * images_per_step)

    learning_rate_fn = rate_fn()
    by_rate = {rate: rate_fn(rate) for rate in matched.values() if rate}
    if not by_rate:
        return learning_rate_fn, ()
    rate_fns = (by_rate.get(rate, learning_rate_fn) for rate in matched.values())
    return learning_rate_fn, tuple(rate_fns)


def decay_by_layer(matched: Matched, factor: float) -> Matched:
    """Rates that fall from the head to the input (Bao et al. 2021, arXiv:2106.08254).

    The rate of a parameter is multiplied by `factor` once for its block and once for
    each after it. A block is layers in a row whose names are the same up to the number
    after "block" or, where no name has one, begin with a word of the same number, such
    as conv1 and norm1_2. Other layers belong to the block before them, the last layer
    to none.

    Raises:
        ConfigError: there are not two blocks.
    """
    if factor == 1:
        return matched
    layers = [name.rpartition("/")[0] for name in matched]
    pattern = next((x for x in _BLOCKS if any(map(x.match, layers))), _BLOCKS[-1])
    block, number, numbers = "", 0, []
    for layer in layers:
        match, previous = pattern.match(layer), block
        block = match[1] if match else block
        number += block != previous
        numbers.append(number)
    below_head = {n for n, x in zip(numbers, layers, strict=True) if x != layers[-1]}
    if len(below_head) < 2:
        raise ConfigError(
            f"layer_decay={factor}: the names of the network's layers show no blocks, "
            f"such as block1_conv or conv1; the first are {', '.join(layers[:3])}; set "
            "--param_rates"
        )
    rates, head = {}, max(below_head) + 1
    for (name, rate), layer, number in zip(
        matched.items(), layers, numbers, strict=True
    ):
        rate = rate or ParamRate("", 1.0)
        power = 0 if layer == layers[-1] else head - number
        rates[name] = rate._replace(factor=rate.factor * factor**power)
    return rates


def scale_decays(decays: Sequence[float], matched: Matched) -> tuple[float, ...]:
    """Coefficients of weight decay over the factors of the rates: a parameter with a
    higher rate does not decay faster."""
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
