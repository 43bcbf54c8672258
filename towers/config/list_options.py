"""List options: options written as lists, such as '30:0.1,60:0.01'."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from towers.errors import ConfigError


def _parse(option: str, text: str, read: Callable[..., Any], words: str) -> list[Any]:
    """The values of the parts between commas; none of an empty text.

    Args:
        read: what the parts before gave, and the texts between the colons of a part ->
            its value; None, a TypeError or a ValueError where it is wrong.
        words: describe a valid part.

    Raises:
        ConfigError: a part is wrong.
    """
    values = []
    for part in text.split(",") if text else []:
        try:
            value = read(values, *part.split(":"))
        except (TypeError, ValueError):
            value = None
        if value is None:
            raise ConfigError(f"{option}={text!r}: {part!r} should be {words}")
        values.append(value)
    return values


def _number(text):
    """A finite float of at least 0, or a ValueError."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError
    return number


def parse_epoch_factors(text: str) -> tuple[tuple[float, float], ...]:
    """'30:0.1,60:0.01' -> ((30.0, 0.1), (60.0, 0.01)), or a ConfigError."""

    def read(before, epoch, factor):
        last = before[-1][0] if before else 0
        pair = _number(epoch), _number(factor)
        return pair if pair[0] > last else None

    words = "an epoch after those before, and a factor, such as 30:0.1"
    return tuple(_parse("epoch_factors", text, read, words))


def parse_crop_scale(text: str) -> tuple[float, float]:
    """'0.35,1' -> (0.35, 1.0), or a ConfigError."""

    def read(before, share):
        share, least = _number(share), max([0, *before])
        is_right = len(before) < 2 and 0 < share <= 1 and share >= least
        return share if is_right else None

    words = "a share of the area, first the least, then the most, such as 0.35,1"
    shares = _parse("crop_scale", text, read, words)
    if len(shares) < 2:
        raise ConfigError(f"crop_scale={text!r}: {text!r} should be {words}")
    return tuple(shares)


def parse_early_sizes(text: str) -> tuple[tuple[int, float], ...]:
    """'16:0.2,24:0.5' -> ((16, 0.2), (24, 0.5)), or a ConfigError."""

    def read(before, size, until):
        last_size, last_until = before[-1] if before else (0, 0)
        pair = int(size), _number(until)
        return pair if pair[0] > last_size and last_until < pair[1] < 1 else None

    words = (
        "pixels and the part of the run, below 1, that ends with them, both growing, "
        "such as 16:0.2,24:0.5"
    )
    return tuple(_parse("early_sizes", text, read, words))


class ParamRate(NamedTuple):
    """The learning rate of some parameters.

    Attributes:
        pattern: of their names, such as `conv*/kernel`.
        factor: on the learning rate; 0 freezes them from the start.
        epochs: where given, their rate follows no schedule but falls linearly to zero
            over so many epochs.
    """

    pattern: str
    factor: float
    epochs: float | None = None


def parse_param_rates(text: str) -> tuple[ParamRate, ...]:
    """'*/bias:2,stem/kernel:0.1:3' -> their ParamRates, or a ConfigError."""

    def read(_, pattern, *numbers):
        rate = ParamRate(pattern, *map(_number, numbers))
        return rate if rate.epochs is None or rate.epochs * rate.factor > 0 else None

    words = (
        "a pattern, a factor and, if that is not 0, a number of epochs above 0, such "
        "as */bias:2 or stem/kernel:0.1:3"
    )
    return tuple(_parse("param_rates", text, read, words))


def parse_freeze(text: str) -> tuple[str, ...]:
    """'stem*,stage1*' -> ("stem*", "stage1*"), or a ConfigError."""

    def read(_, *texts):
        return ":".join(texts).strip() or None

    return tuple(_parse("freeze", text, read, "a pattern, such as stem*"))


def parse_optimizer_options(text: str) -> dict[str, float]:
    """'beta3:0.99,warm:5' -> {"beta3": 0.99, "warm": 5.0}, or a ConfigError."""

    def read(before, name, number):
        name, number = name.strip(), float(number)
        is_new = name.isidentifier() and name not in dict(before)
        return (name, number) if is_new and math.isfinite(number) else None

    words = "a hyperparameter that comes once, and a number, such as beta3:0.99"
    return dict(_parse("optimizer_options", text, read, words))


# Option -> the function that parses it.
PARSERS = {
    "crop_scale": parse_crop_scale,
    "early_sizes": parse_early_sizes,
    "epoch_factors": parse_epoch_factors,
    "freeze": parse_freeze,
    "optimizer_options": parse_optimizer_options,
    "param_rates": parse_param_rates,
}
