"""Values of the cells of tables: labels, splits, folds, weights, 0 and 1."""

import re
from collections.abc import Sequence
from typing import Any

from towers.data.files.class_folders import split_of
from towers.data.files.index import label_text
from towers.messages import shown

SEPARATOR = ";"
# Splits by number, as in CelebA, and the names of FER2013.
_SPLITS = {"0": "train", "1": "validation", "2": "test"}
_SPLITS |= {"publictest": "validation", "privatetest": "test"}


def is_empty(value: Any) -> bool:
    """Return whether a cell is empty: "", null or NaN."""
    return value is None or value != value or (isinstance(value, str) and not value)


def label(value: Any, separator: str) -> str | tuple[str, ...] | None:
    """Return the class, or the classes as a tuple, of a label cell; None if empty."""
    if isinstance(value, list):
        names = tuple(map(_class, value))
        if None in names:
            raise ValueError(f"{shown(str(value), 40)} has an empty label")
        return names
    text = _class(value)
    if text and separator and (separator in text or separator != SEPARATOR):
        return tuple(filter(None, map(_class, text.split(separator))))
    return text


def _class(value):
    text = label_text(value) or ""
    if text.lower() in ("true", "false"):
        return text.capitalize()
    return re.sub(r"^(-?\d+)\.0+$", r"\1", text) or None


def split(value: Any, column: str) -> str | None:
    """Return the split that a cell means in a column; None for an unknown name."""
    if is_flag := re.match(r"is[ _]?", column.lower()):
        flagged = split_of(column[is_flag.end() :])
        rest = "test" if flagged == "train" else "train"
        return {"1": flagged, "0": rest}.get(_number(value))
    return _SPLITS.get(_number(value)) or split_of(str(value))


def _number(value):
    """Return a cell as lower-case text; booleans and floats as integers."""
    text = str(value).strip().lower().removesuffix(".0")
    return {"false": "0", "true": "1"}.get(text, text)


def fold(value: Any) -> int:
    """Return the number of a fold."""
    if not re.fullmatch(r"\s*-?\d+(\.0*)?\s*", str(value)):
        raise ValueError(f"the fold {value!r:.40} is not an integer")
    return int(float(value))


def weight(value: Any) -> float:
    """Return a sample weight within the range of float32."""
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if number != 0 and not 1e-45 <= number <= 3e38:
        raise ValueError(f"the weight {value!r:.40} is not 0, or 1e-45 to 3e38")
    return number


def with_1(values: Sequence[Any], columns: Sequence[str]) -> tuple[str, ...]:
    """Return the class columns whose cell is 1; the others must be 0."""
    for value, column in zip(values, columns, strict=True):
        if _number(value) not in ("0", "1"):
            cell = shown(str(value), 40)
            why = f"column {shown(column, 40)} has {cell!r}, not 0 or 1"
            raise ValueError(f"{why}; --columns=label:NAME names a column of labels")
    return tuple(x for x, y in zip(columns, values, strict=True) if _number(y) == "1")
