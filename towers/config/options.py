"""Options, the fields of Config, with their help, bounds and checks."""

import contextlib
import dataclasses
import functools
import inspect
import json
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from towers.config import choices as tables
from towers.config.synonyms import suggestion
from towers.errors import ConfigError, refuse_url

_INT64 = 2**63  # bound of integers

# Bounds of floats other than 0, as steps are computed in float32.
_MIN, _MAX = 1e-30, 1e30


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number; None for no bound."""

    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None


NOT_NEGATIVE = Range(at_least=0)
POSITIVE = Range(above=0)
AT_LEAST_1 = Range(at_least=1)
BELOW_1 = Range(at_least=0, below=1)
FRACTION = Range(at_least=0, at_most=1)


def option(
    default: Any,
    help: str,
    range: Range = Range(),
    *,
    choices: tuple[str, ...] = (),
    table: str = "",
    read_by: str = "",
    resumable: bool = False,
) -> Any:
    """Return a field of Config.

    Args:
        default: its value if none is given.
        help: description, with the unit.
        range: bounds of a number.
        choices: values of a text; empty if it takes any.
        table: the name of its table in `towers.config.choices`, instead of `choices`.
        read_by: the option, such as "optimizer", whose choice gets this one as a
            keyword argument if its signature names it, see `Config.options_of`.
        resumable: may differ in a resumed run, as it does not change the mathematics.
    """
    if table:
        choices = tuple(tables.TABLES[table])
    metadata = {"help": help, "range": range, "choices": choices, "table": table}
    metadata |= {"read_by": read_by, "resumable": resumable}
    return dataclasses.field(default=default, metadata=metadata)


# Options that may be URLs, as they are only read.
MAY_BE_URLS = "data_dir", "image_dir", "init_from"

resumable_option = functools.partial(option, resumable=True)

# Options that only the choice of another option reads.
dataset_option = functools.partial(option, read_by="dataset")
model_option = functools.partial(option, read_by="model")
optimizer_option = functools.partial(option, read_by="optimizer")
loss_option = functools.partial(option, read_by="loss")
schedule_option = functools.partial(option, read_by="schedule")
strategy_option = functools.partial(option, read_by="strategy")


def check_option(field: dataclasses.Field, value: Any) -> Any:
    """Return the value in the field's type, or raise ConfigError."""
    class_options = ("class_weights", "pos_weights")
    if field.name in class_options and isinstance(value, Mapping):
        pairs = sorted(map(list, value.items()), key=repr)
        value = json.dumps(pairs, default=_plain) if pairs else ""
    value, choices = _with_type(field, value), field.metadata["choices"]
    if field.type == int | str:
        value = _size(field.name, value)
    if field.metadata["table"]:
        tables.find(field.name, value)
    elif choices and value not in choices:
        way = f"{suggestion(value, choices)}must be one of {', '.join(choices)}"
        raise ConfigError(f"{field.name}={_short(value)}: {way}")
    bounds = field.metadata["range"]
    for relation, bound, is_wrong in (
        ("at least", bounds.at_least, lambda bound: value < bound),
        ("above", bounds.above, lambda bound: value <= bound),
        ("below", bounds.below, lambda bound: value >= bound),
        ("at most", bounds.at_most, lambda bound: value > bound),
    ):
        if bound is not None and not isinstance(value, str) and is_wrong(bound):
            raise ConfigError(f"{field.name}={value}: must be {relation} {bound}")
    return value


def _plain(value):
    """Return a number of NumPy as Python's, anything else as text."""
    return value.item() if hasattr(value, "item") else repr(value)


def bind_arguments(
    function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return the arguments of a call in the types of its annotations.

    Raises:
        ConfigError: a value has another type and is not NumPy's, or a path.
        TypeError: an argument is missing or unknown.
    """
    bound = inspect.signature(function).bind(*args, **kwargs)
    hints = typing.get_type_hints(function)
    for name, value in bound.arguments.items():
        try:
            bound.arguments[name] = _as_annotated(value, hints[name])
        except TypeError:
            is_dict = name == "config" and isinstance(value, Mapping)
            way = "; give Config(**config)" if is_dict else ""
            why = f"must be {_words(hints[name])}{way}"
            raise ConfigError(f"{name}={_short(value)}: {why}") from None
    return bound


def _as_annotated(value, hint):
    """Return the value in the type of an annotation, or raise TypeError."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        for part in parts:
            with contextlib.suppress(TypeError):
                return _as_annotated(value, part)
        raise TypeError
    if origin in (tuple, Sequence):
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            raise TypeError
        return tuple(_as_annotated(x, parts[0]) for x in value)
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()  # of NumPy
    if hint is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    kind = {int: numbers.Integral, float: numbers.Real}.get(hint, origin or hint)
    if not isinstance(value, kind) or isinstance(value, bool) != (hint is bool):
        raise TypeError
    return hint(value) if hint in (int, float, str) else value


def _words(hint):
    """Describe an annotation."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_words, parts))
    if origin in (tuple, Sequence):
        return f"a list of {_words(parts[0])}"
    return "None" if hint is type(None) else (origin or hint).__name__


def check_path(name: str, path: str | os.PathLike, may_be_url: bool = False) -> None:
    """Raise ConfigError for a text that cannot be a local path, or URL."""
    try:
        is_possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_possible = False
    text = os.fspath(path)
    if not is_possible:
        why = "has a character that no path can have, a zero or half of a pair"
        raise ConfigError(f"{name}={_short(text)}: {why}; leave it out")
    text = os.fsdecode(text)
    if not may_be_url or "://" not in text:
        refuse_url(name, path)
    home = text.partition(os.sep)[0]
    if home.startswith("~") and os.path.expanduser(home) == home:
        why = f"unknown user {home[1:]!r}; give the whole path, or begin with ./"
        raise ConfigError(f"{name}={_short(text)}: {why} for a folder here")


def _with_type(field, value):
    name, kind = field.name, field.type
    if isinstance(value, numbers.Integral) and not -_INT64 <= value < _INT64:
        way = "must be at least -2**63 and below 2**63"
        raise ConfigError(f"{name}={_short(value)}: {way}")
    try:
        value = _as_annotated(value, kind)
    except TypeError:
        is_open = field.metadata["table"] not in ("", *tables.CLOSED)
        hint = f"; give {tables.IN_A_FILE}" if is_open and callable(value) else ""
        why = f"must be {_words(kind)}, is {type(value).__name__}{hint}"
        raise ConfigError(f"{name}={_short(value)}: {why}") from None
    if kind is float:
        if not math.isfinite(value):
            raise ConfigError(f"{name}={value}: must be finite")
        if 0 < abs(value) < _MIN:
            way = f"must be at least {_MIN}; float32 makes it 0"
            raise ConfigError(f"{name}={value}: {way}")
        if abs(value) > _MAX:
            raise ConfigError(f"{name}={value}: must be at most {_MAX}")
    if kind is str:
        check_path(name, value, may_be_url=name in MAY_BE_URLS)
    return value


def _size(name, value):
    """Return an int for a square, HEIGHTxWIDTH for another rectangle."""
    if isinstance(value, int) or re.fullmatch(r"\s*[+-]?\d{1,9}\s*", value):
        return int(value)
    sides = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", value, re.IGNORECASE)
    if not sides:
        way = "must be pixels, such as 96, or HEIGHTxWIDTH, such as 96x128"
        raise ConfigError(f"{name}={_short(value)}: {way}")
    height, width = map(int, sides.groups())
    return height if height == width else f"{height}x{width}"


def _short(value):
    """Return the value as Python writes it, at most 60 characters."""
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:  # of thousands of digits or levels, or of the user's own class
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."
