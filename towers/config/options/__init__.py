"""Options: the fields of Config, with their help and bounds, and the check of one."""

import dataclasses
import math
import numbers
import os
from typing import Any

from towers.config import choices as tables
from towers.errors import ConfigError, nearest

INT64 = 2**63

# Of a number other than 0; float32, in which updates are computed, begins at 1.2e-38.
LEAST = 1e-30


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    table: str = "",
    read_by: str = "",
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    free: bool = False,
) -> Any:
    """A field of Config.

    Args:
        default: its value where neither a recipe nor a flag gives one.
        help: one sentence, with the unit.
        choices: the values; empty where it takes any.
        table: in place of `choices`, the option whose table in `towers.config.choices`
            lists them.
        read_by: the option, such as "optimizer", whose choice gets this one as a
            keyword argument if its signature names it.
        at_least, above, below, at_most: bounds.
        free: a resumed run may change it, because it does not touch the mathematics.
    """
    metadata = {
        "help": help,
        "choices": tuple(tables.TABLES[table]) if table else choices,
        "table": table,
        "read_by": read_by,
        "at_least": at_least,
        "above": above,
        "below": below,
        "at_most": at_most,
        "free": free,
    }
    return dataclasses.field(default=default, metadata=metadata)


def check_option(field: dataclasses.Field, value: Any) -> Any:
    """The value in the field's own type, or a ConfigError that names the field."""
    value = _with_type(field, value)
    _check_choice(field, value)
    for name, is_wrong in (
        ("at_least", lambda bound: value < bound),
        ("above", lambda bound: value <= bound),
        ("below", lambda bound: value >= bound),
        ("at_most", lambda bound: value > bound),
    ):
        bound = field.metadata[name]
        if bound is not None and is_wrong(bound):
            words = name.replace("_", " ")
            raise ConfigError(f"{field.name}={value}: must be {words} {bound}")
    return value


def check_path(name: str, path: str | os.PathLike) -> None:
    """Refuses a text that can be no path, and no part of one.

    Raises:
        ConfigError: it has a zero character, or one that the encoding of the names of
            files lacks; names the option.
    """
    try:
        is_possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise ConfigError(
            f"{name}={_short(os.fspath(path))}: has a character that no path can have, "
            "a zero or half of a pair; leave it out"
        )


def _with_type(field, value):
    kind = field.type
    # Also NumPy's numbers, which are of these abstract types.
    abstract = {int: numbers.Integral, float: numbers.Real}.get(kind, kind)
    if isinstance(value, numbers.Integral) and not -INT64 <= value < INT64:
        raise ConfigError(
            f"{field.name}={_short(value)}: must be at least -2**63 and below 2**63"
        )
    if isinstance(value, abstract) and not (
        isinstance(value, bool) and kind is not bool
    ):
        value = kind(value)
    if type(value) is not kind:
        raise ConfigError(
            f"{field.name}={_short(value)}: must be {kind.__name__}, "
            f"is {type(value).__name__}"
        )
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{field.name}={value}: must be finite")
    if kind is float and 0 < abs(value) < LEAST:
        raise ConfigError(
            f"{field.name}={value}: must be at least {LEAST}; float32 makes it 0"
        )
    if kind is str:
        check_path(field.name, value)
    return value


def _short(value):
    """The value as Python writes it, cut where it is long."""
    try:
        text = repr(value)
    except Exception:  # of thousands of digits or levels, or of the user's own class
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def _check_choice(field, value):
    choices, table = field.metadata["choices"], field.metadata["table"]
    if table:
        tables.find(table, value)
    elif choices and value not in choices:
        raise ConfigError(
            f"{field.name}={_short(value)}: "
            f"{nearest(value, choices)}must be one of " + ", ".join(choices)
        )
