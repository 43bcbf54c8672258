"""Tables of image files: CSV, TSV, JSON Lines or Parquet with a row for each image."""

import csv
import functools
import glob
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from towers.config.choices import MAX_IMAGE_PIXELS
from towers.data.files import containers, reading
from towers.data.files.class_folders import split_of
from towers.data.files.image_files import ImageOptions
from towers.data.files.index import (
    BETWEEN_LABELS,
    Index,
    find_column,
    index_of,
    settle_classes,
    settle_label_sets,
)
from towers.data.files.paths import is_image_name, reason, shown
from towers.data.sources import DataSet, Trained
from towers.errors import DataError

# Names of columns, by which is taken first; in lower case, with spaces as underscores.
_ROLES = {
    "path": (
        r"(image|img|file|photo)?_?(path|file_?name)|(image|img)_(file|name)"
        r"|file|image|img|photo",
        r"(image|img|file|photo)?_?id",
    ),
    "label": (r"label|class|target|class_?name|category",),
    "split": (r"split|subset|partition",),
    "fold": (r"k?fold",),
    "weight": (r"(sample_)?weight",),
}
# Of a column of a class.
_ANSWERS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "False": 0, "True": 1}


def load(
    data_dir: str = "",
    columns: str = "",
    image_dir: str = "",
    fold: int = -1,
    image_options: ImageOptions | None = None,
    trained: Trained | None = None,
) -> DataSet:
    """The images of tables; arguments and errors as of `data.load` and `read`."""
    options = image_options or ImageOptions()
    named = containers.parse_columns(columns, "table", _ROLES)
    location, paths = containers.find_files(data_dir, "table")
    more = image_dir, fold, options.max_image_pixels
    indexes = {}
    for of_table, files in paths.items():
        by_split = read(files, named, *more)
        if len(by_split) == 1 and paths.keys() != {"train"}:
            by_split = {of_table: by_split.popitem()[1]}
        for split in sorted(by_split.keys() & indexes):
            raise DataError(
                f"{shown(files[0])}: images of the split {split} are in another table "
                "too; name one table"
            )
        indexes |= by_split
    if any(index.labels.ndim == 2 for index in indexes.values()):
        indexes = {
            split: index if (index.labels < 0).all() else index.as_label_sets()
            for split, index in indexes.items()
        }
    openers = {x: lambda index=index: index for x, index in indexes.items()}
    return containers.data_set("table", location, openers, options, trained)


def read(
    paths: Sequence[str],
    columns: Mapping[str, str],
    image_dir: str = "",
    fold: int = -1,
    max_pixels: int = MAX_IMAGE_PIXELS,
) -> dict[str, Index]:
    """The images of tables, which have the same columns, by split: "train",
    "validation" and "test" where they have any.

    `columns` are role -> name; others go by their usual names. Paths start from
    `image_dir`, or the folder of each table. Without a column for the split all are in
    "train"; of these the images of `fold` in the column `fold` are for testing. Labels
    are -1 without a column of labels. They are sets where a label has several names,
    `cat;outdoor`, or is a list, and where each class has a column of 0 and 1.

    DataError names the file and the row: a file is missing, or has two rows; a column
    is missing, or may be one of two; a table has other columns than the first.
    """
    files, labels, splits, weights = [], [], [], []
    first_rows, unlabeled, are_sets = {}, "", False
    for table in paths:
        rows = _rows(table)
        header = next(rows, None)
        if not header:
            raise DataError(f"{shown(table)}: the file is empty")
        try:
            used, class_columns = _columns(header, columns, fold)
        except ValueError as error:
            raise DataError(f"{shown(table)}: {error}") from None
        classes_here = tuple(header[i] for i in class_columns)
        roles_here = used.keys() - ({"fold"} if fold < 0 else ())
        if table == paths[0]:
            classes, roles = classes_here, roles_here
        if (roles_here, {*classes_here}) != (roles, {*classes}):
            here, first = (
                shown(", ".join(sorted(x)), 60)
                for x in ({*roles_here, *classes_here}, {*roles, *classes})
            )
            raise DataError(
                f"{shown(table)}: has other columns than {shown(paths[0])}: {here}, "
                f"not {first}"
            )
        resolve = _Resolver(os.path.expanduser(image_dir) or os.path.dirname(table))
        for number, row in rows:
            where = f"{shown(table)}: row {number}"
            if len(row) != len(header):
                raise DataError(
                    f"{where} has {len(row)} values, and the first row {len(header)}"
                )
            values = {role: row[index] for role, index in used.items()}
            file = resolve(values["path"], where)
            before = first_rows.setdefault(file, where)
            if before is not where:
                raise DataError(f"{where}: {shown(file)} is also in {before}")
            files.append(file)
            label = values.get("label")
            if class_columns:
                label = _label_set(row, header, class_columns, where)
            if isinstance(label, list):
                label, are_sets = BETWEEN_LABELS.join(map(str, label)), True
            has_label = bool(class_columns) or "label" in used
            if label in ("", None) and has_label:
                unlabeled, label = unlabeled or where, ""
            labels.append(None if label is None else str(label))
            splits.append(_split(values, fold, where))
            if "weight" in used:
                weights.append(_weight(values["weight"], where))
    if not files:
        raise DataError(f"{shown(paths[0])}: has no rows")
    are_sets |= any(BETWEEN_LABELS in name for name in set(labels) - {None})
    if unlabeled and not are_sets:
        raise DataError(f"{unlabeled}: has no label")
    settle = settle_classes
    if are_sets:
        settle = functools.partial(settle_label_sets, class_names=classes)
    index = index_of(files, labels, weights or None, max_pixels, settle)
    splits = np.array(splits)
    if not (splits != "train").any():
        return {"train": index}
    return {
        split: index.take(np.flatnonzero(splits == split)).without_empty_classes()
        for split in np.unique(splits)
    }


def _rows(path) -> Iterator:
    """The names of the columns, then (number, values) of each row; rows are counted
    from 1, the first of a CSV file being the header."""
    kind = os.path.splitext(path)[1].lower()
    try:
        if kind == ".parquet":
            yield from _rows_of_parquet(path)
        elif kind in (".jsonl", ".ndjson"):
            with reading.open_file(path) as file:
                yield from _rows_of_json(file)
        else:
            with reading.open_file(path) as file:
                yield from _rows_of_csv(file, "\t" if kind == ".tsv" else None)
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{shown(path)}: {reason(error)}") from error


def _rows_of_csv(file, delimiter):
    lines = (line.decode("utf-8-sig") for line in file)
    first = next(lines, "")
    if delimiter is None:
        delimiter = max(",;\t", key=first.count)
    reader = csv.reader(
        itertools.chain([first], lines), delimiter=delimiter, strict=True
    )
    yield next(reader, [])
    try:
        for row in reader:
            if row:
                yield reader.line_num, row
    except (ValueError, csv.Error) as error:
        # The reader has not counted a line that is not UTF-8.
        number = reader.line_num + isinstance(error, ValueError)
        raise ValueError(f"row {number}: {error}") from error


def _rows_of_json(file):
    header = None
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise ValueError("is no object {...}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"row {number}: {error}") from error
        if header is None:
            header = list(values)
            yield header
        if values.keys() != set(header):
            raise ValueError(f"row {number}: has other keys than the first row")
        yield number, [values[name] for name in header]


def _rows_of_parquet(path):
    import pyarrow
    from pyarrow import parquet, types

    try:
        table = parquet.ParquetFile(reading.local_copy(path), memory_map=True)
        names = [
            x.name
            for x in table.schema_arrow
            if not types.is_nested(x.type) and not types.is_binary(x.type)
        ]
        yield names
        number = 0
        for batch in table.iter_batches(columns=names):
            for row in zip(*(x.to_pylist() for x in batch.columns), strict=True):
                number += 1
                yield number, row
    except pyarrow.ArrowException as error:
        raise ValueError(f"is no Parquet file: {error}") from error


def _label_set(row, header, class_columns, where):
    """The names of the columns of classes that have a 1."""
    values = [str(row[index]) for index in class_columns]
    for index, value in zip(class_columns, values, strict=True):
        if value not in _ANSWERS:
            raise DataError(
                f"{where}: the column {shown(str(header[index]), 40)} of a class has "
                f"{shown(value, 40)!r}, and not 0 or 1; --columns=label:NAME names a "
                "column of labels"
            )
    chosen = zip(class_columns, values, strict=True)
    return [header[index] for index, value in chosen if _ANSWERS[value]]


def _columns(header, columns, fold):
    """Role -> index of its column, and the indices of columns of classes."""
    used = {x: find_column(x, header, name) for x, name in columns.items()}
    for role, patterns in _ROLES.items():
        if role not in used:
            index = find_column(role, header, None, patterns, used.values())
            used |= {} if index is None else {role: index}
    rest = [i for i in range(len(header)) if i not in used.values()]
    if "label" not in used and "path" in used and len(rest) == 1:
        used["label"] = rest[0]
    class_columns = rest if "label" not in used and len(rest) > 1 else []
    for role in ("path", *["fold"] * (fold >= 0)):
        if role not in used:
            raise ValueError(
                f"no column is named like a {role}, only "
                f"{shown(', '.join(map(str, header)), 100)}; name it, as in "
                f"--columns={role}:{header[rest[0]] if rest else 'NAME'}"
            )
    return used, class_columns


class _Resolver:
    """Finds files by their path in a table, or by that without its ending."""

    def __init__(self, folder):
        self._folder, self._listings = folder, {}

    def __call__(self, name, where):
        if name in (None, ""):
            raise DataError(f"{where}: has no path")
        path = os.path.join(self._folder, str(name))
        if reading.is_url(path):
            return path
        folder, base = os.path.split(path)
        listing = self._listings.get(folder)
        if listing is None:
            listing = self._listings[folder] = _listing(folder)
        names = listing.get(base, ())
        if len(names) == 1:
            return os.path.join(folder, names[0])
        if names:
            files = " or ".join(os.path.join(folder, x) for x in sorted(names)[:2])
            raise DataError(f"{where}: is {shown(str(name), 60)} the file {files}?")
        raise DataError(
            f"{where}: there is no file {shown(path)}; {self._hint(base)}--image_dir "
            "names the folder that the paths start from"
        )

    def _hint(self, base):
        """Names a folder next to the table with such a file."""
        for folder in sorted(glob.glob(f"{glob.escape(self._folder)}/*/")):
            if base in _listing(folder):
                return f"{shown(folder.rstrip('/'))} has one: "
        return ""


def _listing(folder):
    """Name of a file, and of an image without its ending -> names of files."""
    listing = {}
    names = os.listdir(folder) if os.path.isdir(folder) else []
    for name in filter(is_image_name, names):
        listing.setdefault(os.path.splitext(name)[0], []).append(name)
    return listing | {name: [name] for name in names}


def _split(values, fold, where):
    split = split_of(str(values.get("split", "train")))
    if split is None:
        raise DataError(
            f"{where}: the split {values['split']!r:.40} is none of train, validation "
            "and test"
        )
    if fold < 0 or split != "train":
        return split
    try:
        return "test" if int(values["fold"]) == fold else "train"
    except (TypeError, ValueError):
        raise DataError(
            f"{where}: the fold {values['fold']!r:.40} is no number"
        ) from None


def _weight(value, where):
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = -1.0
    if not 0 <= weight < float("inf"):
        raise DataError(f"{where}: the weight {value!r:.40} is no number of at least 0")
    return weight
