"""Rows of tables: CSV, TSV, lists in text files, JSON, JSON Lines and Parquet."""

import codecs
import csv
import io
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from towers.data.files import reading
from towers.data.files.class_folders import split_of
from towers.data.files.paths import ending, is_image_name, reason, shown
from towers.data.inventory import Inventory
from towers.errors import DataError

SEPARATOR = ";"
# Texts that programs write for a missing value.
_MISSING = ("nan", "NaN", "NA", "N/A", "<NA>", "None", "null", "NULL")
# Keys of JSON annotations that are not tables -> the program that writes them.
_ANNOTATIONS = {"annotations": "COCO", "imagePath": "LabelMe", "regions": "VIA"}


def read_rows(
    path: str, columns: Mapping[str, str], inventory: Inventory
) -> Iterator[Any]:
    """Yield the names of the columns, then (number, values) of each row.

    Rows are counted from 1, the header being the first row of a text file. If the names
    in `columns` are numbers, a text file has no header and its columns are called "1",
    "2" and so on. DataError if the file cannot be read, or its first row is data.
    """
    kind = ending(path)
    try:
        if kind == ".parquet":
            yield from _parquet_rows(path, inventory)
            return
        with reading.open_file(path) as file:
            if kind in (".json", ".jsonl", ".ndjson"):
                yield from _json_rows(file, kind)
            else:
                yield from _text_rows(file, kind, columns)
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise DataError(f"{shown(path)}: {reason(error)}") from error


def looks_like_data(cells: Sequence[str], path: int) -> str:
    """Return what to do if the first row of a table is not a header; `path` is the
    index of a value that names a file."""
    rest = [number for number in range(len(cells)) if number != path]
    split = next((n for n in rest[: len(rest) - 1] if split_of(cells[n])), None)
    label = next((n for n in rest if n != split), None)
    roles = {"path": path, "label": label, "split": split}
    roles = {role: number for role, number in roles.items() if number is not None}
    names = ",".join(sorted(roles, key=roles.get))
    options = ",".join(f"{role}:{number + 1}" for role, number in roles.items())
    return (
        f"row 1 looks like data ({shown(cells[path], 60)}) and not like the names of "
        f"columns; add a first row such as {names}, or number the columns: "
        f"--columns={options}"
    )


def _text(file):
    """The lines of a file in UTF-8, or in UTF-16 if it begins with its mark."""
    start = file.read(2)
    file.seek(0)
    is_wide = start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return io.TextIOWrapper(file, "utf-16" if is_wide else "utf-8-sig", newline="")


def _text_rows(file, kind, columns):
    text = _text(file)
    try:
        yield from _rows_of_lines(text, kind, columns)
    except UnicodeError as error:
        file.seek(0)
        lines = (number for number, x in enumerate(file, 1) if _is_wrong(x))
        raise ValueError(
            f"row {next(lines, 1)}: is not UTF-8 ({error.reason}); save the table as "
            "CSV UTF-8, or convert it: iconv -f LATIN1 -t UTF-8"
        ) from error


def _is_wrong(line):
    try:
        return line.decode() is None
    except UnicodeError:
        return True


def _rows_of_lines(text, kind, columns):
    first = text.readline()
    if "\0" in first:
        raise ValueError("is not UTF-8 text; save the table as CSV UTF-8")
    delimiter = "\t" if kind == ".tsv" else max(",;\t", key=first.count)
    lines = itertools.chain([first], text)
    if kind == ".txt" and delimiter not in first:  # lines of a path and a label
        rows = ((n, x.rsplit(None, 1)) for n, x in enumerate(lines, 1))
    else:
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        rows = ((reader.line_num, row) for row in _checked(reader))
    number, row = next(rows, (1, []))
    cells = [cell.strip() for cell in row]
    if kind == ".txt" and len(cells) == 2 and is_image_name(cells[0]):
        header = ["path", "label"]
    elif _are_numbers(columns.values(), cells):
        header = [str(number + 1) for number in range(len(cells))]
    elif images := [n for n, cell in enumerate(cells) if is_image_name(cell)]:
        raise ValueError(looks_like_data(cells, images[0]))
    else:
        yield cells
        header = None
    if header:
        yield header
        yield number, row
    yield from ((number, row) for number, row in rows if row)


def _are_numbers(names, cells):
    """True if columns are named by their numbers, which are not the header itself."""
    is_header = cells == [str(number) for number in range(len(cells))]
    are_numbers = all(x.isdecimal() and 1 <= int(x) <= len(cells) for x in names)
    return bool(names) and are_numbers and not is_header


def _checked(reader):
    try:
        yield from reader
    except csv.Error as error:
        raise ValueError(f"row {reader.line_num}: {error}") from error


def _json_rows(file, kind):
    objects, names = [], {}
    for number, values in _objects(file, kind):
        if not isinstance(values, dict):
            raise ValueError(f"row {number}: is not an object {{...}}")
        for key in _ANNOTATIONS.keys() & values.keys():
            raise ValueError(
                f"holds annotations of {_ANNOTATIONS[key]}, which are not a table; "
                "write a CSV with a row path,label for each image"
            )
        objects.append((number, values))
        names |= dict.fromkeys(values)
    yield list(names)
    for number, values in objects:
        yield number, [values.get(name) for name in names]


def _objects(file, kind):
    """(number, value) of each item of a list, or of each line."""
    text = _text(file)
    if kind == ".json":
        content = text.read()
        try:
            values = json.loads(content)
        except ValueError as error:
            if "Extra data" not in str(error):
                raise
        else:
            if isinstance(values, dict) and not _ANNOTATIONS.keys() & values.keys():
                raise ValueError(
                    "is one object; a table is a list of objects, or has one on each "
                    'line, such as {"image": "1.jpg", "label": "cat"}'
                )
            yield from enumerate([values] if isinstance(values, dict) else values, 1)
            return
        text = io.StringIO(content)
    for number, line in enumerate(text, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"row {number}: {error}") from error


def _parquet_rows(path, inventory):
    import pyarrow
    from pyarrow import parquet, types

    def is_read(kind):
        if types.is_list(kind) or types.is_large_list(kind):  # several labels
            kind = kind.value_type
        return not types.is_nested(kind) and not types.is_binary(kind)

    try:
        table = parquet.ParquetFile(reading.local_copy(path), memory_map=True)
        names = [x.name for x in table.schema_arrow if is_read(x.type)]
        others = [x for x in table.schema_arrow.names if x not in names]
        inventory.leave_out("columns", *others)
        yield names
        number = 0
        for batch in table.iter_batches(columns=names):
            for row in zip(*(x.to_pylist() for x in batch.columns), strict=True):
                number += 1
                yield number, row
    except pyarrow.ArrowException as error:
        raise ValueError(f"is not a Parquet file: {error}") from error


def label_text(value: Any) -> str | None:
    """Return the name of the class that a value means, or None for an empty one.

    Whole numbers are written without a fraction, so 1.0 is 1; true and false in any
    case are True and False. Other texts stay as they are, but for spaces around them.
    ValueError if it is not a label, or a text that programs write for a missing value.
    """
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if not value.is_integer():
            raise ValueError(f"{value} is not a label: expected a name or an integer")
    elif not isinstance(value, str | int | None):
        raise ValueError(
            f"{shown(str(value), 40)} is not a label: expected a name or an integer"
        )
    text = "" if value is None else str(value).strip()
    if text in _MISSING:
        raise ValueError(
            f"is {text} a missing label, or a class? Leave the row out, or rename the "
            "class"
        )
    if whole := re.fullmatch(r"(-?\d+)\.0+", text):
        return whole[1]
    return (text.capitalize() if text.lower() in ("true", "false") else text) or None


def label_of(value: Any, separator: str) -> str | tuple[str, ...] | None:
    """Return the class of a label, or a tuple of classes if it is a list, has the
    separator, or any separator but the default is named; None for an empty label.

    ValueError as of `label_text`, or if a list has an empty label.
    """
    if isinstance(value, list):
        names = tuple(map(label_text, value))
        if None in names:
            raise ValueError(f"{shown(str(value), 40)} has an empty label")
        return names
    text = label_text(value)
    if text and separator and (separator in text or separator != SEPARATOR):
        return tuple(filter(None, map(label_text, text.split(separator))))
    return text
