"""List options: options written as lists, such as '30:0.1,60:0.01'."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from towers.errors import ConfigError


def _parts(
    option: str, text: str, read: Callable[..., Any], words: str
) -> Iterator[tuple[str, Any]]:
    """Each part between commas, with the result of `read` for its values between
    colons; `words` describe a valid part."""
    for part in text.split(",") if text else []:
        try:
            values = read(*part.split(":"))
        except (TypeError, ValueError):
            raise ConfigError(
                f"{option}={text!r}: {part!r} should be {words}"
            ) from None
        yield part, values


def parse_epoch_factors(text: str) -> tuple[tuple[float, float], ...]:
    """'30:0.1,60:0.01' -> ((30.0, 0.1), (60.0, 0.01)); nothing for an empty text.

    Raises:
        ConfigError: it is written in another way, an epoch is not after the one before,
            a factor is negative, or a number is not finite.
    """
    pairs, before = [], 0.0
    for _, (epoch, factor) in _parts(
        "epoch_factors",
        text,
        lambda epoch, factor: (float(epoch), float(factor)),
        "an epoch and a factor, such as 30:0.1",
    ):
        if not before < epoch < math.inf:
            raise ConfigError(
                f"epoch_factors={text!r}: epoch {epoch:g} must be finite and "
                f"above {before:g}"
            )
        if not 0 <= factor < math.inf:
            raise ConfigError(
                f"epoch_factors={text!r}: factor {factor:g} must be finite, at least 0"
            )
        pairs.append((epoch, factor))
        before = epoch
    return tuple(pairs)


def parse_early_sizes(text: str) -> tuple[tuple[int, float], ...]:
    """'16:0.2,24:0.5' -> ((16, 0.2), (24, 0.5)); nothing for an empty text.

    Raises:
        ConfigError: it is written in another way, or does not grow.
    """
    pairs = []
    for part, (size, until) in _parts(
        "early_sizes",
        text,
        lambda size, until: (int(size), float(until)),
        "pixels and a part of the run, such as 24:0.5",
    ):
        last_size, last_until = pairs[-1] if pairs else (0, 0.0)
        if not (last_size < size and last_until < until < 1):
            raise ConfigError(
                f"early_sizes={text!r}: {part!r} should have more than {last_size} "
                f"pixels and end between {last_until:g} and 1, parts of the run"
            )
        pairs.append((size, until))
    return tuple(pairs)


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
    """'*/bias:2,stem/kernel:0.1:3' -> their ParamRates; nothing for an empty text.

    Raises:
        ConfigError: it is written in another way, or a number is out of range.
    """
    rates = []
    for part, rate in _parts(
        "param_rates",
        text,
        lambda pattern, *numbers: ParamRate(pattern, *map(float, numbers)),
        "a pattern, a factor and, if any, a number of epochs, such as */bias:2 or "
        "stem/kernel:0.1:3",
    ):
        epochs = 1 if rate.epochs is None else rate.epochs
        if not (0 <= rate.factor < math.inf and 0 < epochs < math.inf):
            raise ConfigError(
                f"param_rates={text!r}: {part!r} must have a finite factor of at least "
                "0 and, if any, a finite number of epochs above 0"
            )
        if rate.factor == 0 and rate.epochs is not None:
            raise ConfigError(
                f"param_rates={text!r}: {part!r} is 0 from the start, so that its "
                "epochs mean nothing; leave them out"
            )
        rates.append(rate)
    return tuple(rates)


def parse_freeze(text: str) -> tuple[str, ...]:
    """'stem*,stage1*' -> ("stem*", "stage1*"); nothing for an empty text.

    Raises:
        ConfigError: a pattern is empty.
    """
    patterns = tuple(part.strip() for part in text.split(",")) if text else ()
    if not all(patterns):
        raise ConfigError(
            f"freeze={text!r}: a pattern is empty; write them as stem*,stage1*"
        )
    return patterns


def parse_optimizer_options(text: str) -> dict[str, float]:
    """'beta3:0.99,warm:5' -> {"beta3": 0.99, "warm": 5.0}.

    Raises:
        ConfigError: it is written in another way, a name comes twice, or a number is
            not finite.
    """
    numbers = {}
    for part, (name, number) in _parts(
        "optimizer_options",
        text,
        lambda name, number: (name.strip(), float(number)),
        "a hyperparameter and a number, such as beta3:0.99",
    ):
        if not name.isidentifier() or name in numbers or not math.isfinite(number):
            raise ConfigError(
                f"optimizer_options={text!r}: {part!r} should be a name that comes "
                "once and a finite number, such as beta3:0.99"
            )
        numbers[name] = number
    return numbers


# Option -> the function that parses it.
PARSERS = {
    "early_sizes": parse_early_sizes,
    "epoch_factors": parse_epoch_factors,
    "freeze": parse_freeze,
    "optimizer_options": parse_optimizer_options,
    "param_rates": parse_param_rates,
}
