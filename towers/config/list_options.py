"""List options: options written as lists, such as '30:0.1,60:0.01'."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from towers.errors import ConfigError


class ParamRate(NamedTuple):
    """The learning rate of some parameters."""

    pattern: str  # of their names, such as `conv*/kernel`
    factor: float  # on the learning rate; 0 freezes them from the start
    epochs: float | None = None  # within which it falls to zero, without a schedule


def parse(option: str, text: str) -> Any:
    """Return the value of a list option: a tuple, or a dict of optimizer_options."""
    read, least, expected = LISTS[option]
    values: list[Any] = []
    for part in text.split(",") if text else []:
        try:
            value = read(values, *part.split(":"))
        except (IndexError, TypeError, ValueError):
            value = None
        if value is None:
            raise ConfigError(f"{option}={text!r}: {part!r} should be {expected}")
        values.append(value)
    if len(values) < least:
        raise ConfigError(f"{option}={text!r}: {text!r} should be {expected}")
    return dict(values) if read is _hyperparameter else tuple(values)


def height_and_width(image_size: int | str) -> tuple[int, int]:
    """Return height and width of image_size: 96 is 96x96, "96x128" is 96 high."""
    height, _, width = str(image_size).partition("x")
    return int(height), int(width or height)


# Each returns the value of a part, from the values before it and its texts between
# colons; None, IndexError, TypeError or ValueError if it is wrong.


def _epoch_factor(before, epoch, factor):
    pair = _number(epoch), _number(factor)
    return pair if pair[0] > (before[-1][0] if before else 0) else None


def _share(before, text):
    share, least = _number(text), max([0, *before])
    is_right = len(before) < 2 and 0 < share <= 1 and share >= least
    return share if is_right else None


def _early_size(before, size, until):
    last_size, last_until = before[-1] if before else (0, 0)
    pair = int(size), _number(until)
    return pair if pair[0] > last_size and last_until < pair[1] < 1 else None


def _param_rate(_, pattern, *numbers):
    rate = ParamRate(pattern, *map(_number, numbers))
    return rate if rate.epochs is None or rate.epochs * rate.factor > 0 else None


def _pattern(_, *texts):
    return ":".join(texts).strip() or None


def _hyperparameter(before, name, number):
    name, number = name.strip(), float(number)
    is_new = name.isidentifier() and name not in dict(before)
    return (name, number) if is_new and math.isfinite(number) else None


def _rand_augment(before, text):
    least, most = ((1, 14), (0, 30))[len(before)]
    return int(text) if least <= int(text) <= most else None


def _number(text):
    """Return a finite float of at least 0, or raise ValueError."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise ValueError
    return number


# Option -> (function that reads a part, minimum number of parts, a valid part).
LISTS: dict[str, tuple[Callable[..., Any], int, str]] = {
    "crop_scale": (_share, 2, "fractions, the smaller one first, such as 0.35,1"),
    "early_sizes": (_early_size, 0, "SIZE:UNTIL, both growing, such as 16:0.2,24:0.5"),
    "epoch_factors": (_epoch_factor, 0, "a later EPOCH:FACTOR, such as 30:0.1"),
    "freeze": (_pattern, 0, "a pattern, such as stem*"),
    "optimizer_options": (_hyperparameter, 0, "another NAME:NUMBER, such as beta3:0.9"),
    "rand_augment": (_rand_augment, 2, "count 1-14, then magnitude 0-30, such as 2,9"),
    "param_rates": (_param_rate, 0, "PATTERN:FACTOR[:EPOCHS], such as stem/bias:0.1:3"),
}
