"""Tables of image files: CSV, TSV, text, JSON or Parquet with a row for each image."""

import collections
import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from towers import console
from towers.data.files import cells, containers
from towers.data.files.class_folders import entries
from towers.data.files.image_files import ImageOptions
from towers.data.files.index import (
    Index,
    ambiguous_column,
    find_column,
    index_of,
    missing_column,
    sorted_classes,
)
from towers.data.files.paths import class_name, is_image_name
from towers.data.files.reading import is_url
from towers.data.files.rows import looks_like_data, read_rows
from towers.data.files.table_paths import PathFinder
from towers.data.inventory import Inventory
from towers.data.sources import DataSet, Trained
from towers.errors import DataError
from towers.messages import shown

# Regular expressions for column names, in order of precedence, see `find_column`.
_ROLES = {
    "path": (
        r"(image|img|file|photo)?_?(path|file_?name|url)|(image|img)_(file|name)"
        r"|file|image|img|photo",
        r"(image|img|file|photo)?_?id(_code)?",
    ),
    "label": (r"label|class|target|class_?name|category|choice", "labels"),
    "split": (
        r"(data_?)?split|ml_?use",
        r"(data_?)?set|subset|partition|phase|usage",
        r"is_?(train|val|test)\w*",
    ),
    "fold": (r"k?fold",),
    "weight": (r"(sample_)?weight",),
}
_ROW_NUMBERS = r"|Unnamed: \d+"  # row numbers of pandas
_PIXELS = r"(?i)pixels?[ _]?\d*|\d+x\d+"  # as in FER2013 and in digits of Kaggle


def load(
    data_dir: str = "",
    columns: str = "",
    image_dir: str = "",
    fold: int = -1,
    label_separator: str = cells.SEPARATOR,
    image_options: ImageOptions | None = None,
    trained: Trained | None = None,
) -> DataSet:
    """Load the images of tables; for arguments and errors see `data.load`."""
    options, inventory = (image_options or ImageOptions()).with_survey(), Inventory()
    named = containers.parse_columns(columns, "table", _ROLES)
    location, paths = containers.find_files(data_dir, "table", inventory)
    reader = TableReader(named, image_dir, fold, label_separator, options, inventory)
    for split in sorted(paths, key=lambda split: split != "train"):
        if not sum([reader.read(path, split) for path in paths[split]]):
            raise DataError(f"{shown(paths[split][0])}: has no rows")
    inventory.leave_out("columns", *reader.unused)
    indexes = reader.indexes(getattr(trained, "multi_label", False))
    openers = {x: lambda index=index: index for x, index in indexes.items()}
    known = options, trained, inventory, reader.names
    return containers.data_set("table", location, openers, *known)


class Table(NamedTuple):
    """A table, its columns by name."""

    path: str
    split: str
    roles: dict[str, str]
    classes: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class Row:
    """A row of a table; empty cells are None."""

    table: Table
    number: int
    split: str
    path: Any = None
    label: Any = None
    fold: int | None = None
    weight: float | None = None

    def __str__(self) -> str:
        return f"{shown(self.table.path)}: row {self.number}"

    def require(self, role: str) -> None:
        """Raise DataError if a value is missing."""
        if getattr(self, role) is None:
            raise DataError(f"{self}: has no {role}")


@dataclasses.dataclass
class TableReader:
    """Reader of the rows of tables and of the files that they name."""

    columns: Mapping[str, str]  # role -> name; others have their usual names
    image_dir: str  # folder that paths start from, by default that of each table
    fold: int  # training rows with this value in the column `fold` are for testing
    separator: str  # text between several labels of an image; "" for none
    options: ImageOptions  # their survey takes rows without a file
    inventory: Inventory  # filled with what was used and inferred
    first: Table | None = None
    rows: list[Row] = dataclasses.field(default_factory=list)  # of all tables
    # Names of columns without a role, and split -> table and column it comes from.
    unused: dict[str, None] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)

    def read(self, path: str, split: str) -> int:
        """Read a table of a split and return its number of rows."""
        lines = read_rows(path, self.columns.values(), self.inventory)
        header = [str(name).strip() for name in next(lines, ())]
        start = list(itertools.islice(lines, 1))
        first_row = start[0][1][: len(header)] if start else ()
        images = [i for i, x in enumerate(first_row) if is_image_name(str(x).strip())]
        try:
            used, classes = self._columns(header, path, split, images)
        except ValueError as error:
            text = f"{shown(path)}: {error}"
            if self.first and self.first.split == split:
                text += f"; {shown(self.first.path)} is another table for the split "
                text += f"{split}: --data_dir names one of them"
            raise DataError(text) from None
        roles = {role: header[i] for role, i in used.items()}
        table = Table(path, split, roles, tuple(header[i] for i in classes))
        parsers: dict[str, Callable[[Any], Any]] = {
            "path": lambda x: str(x).strip() or None,
            "label": lambda x: cells.label(x, self.separator),
            "split": str,
            "fold": cells.fold,
            "weight": cells.weight,
        }
        rows = []
        for number, values in itertools.chain(start, lines):
            row = Row(table, number, split)
            rows.append(row)
            try:
                if len(values) != len(header):
                    text = f"has {len(values)} values, and the first row {len(header)}"
                    raise ValueError(text)
                for role, i in used.items():
                    is_empty = cells.is_empty(values[i])
                    setattr(row, role, None if is_empty else parsers[role](values[i]))
                if classes:
                    ones = [values[i] for i in classes]
                    row.label = cells.with_1(ones, table.classes)
            except ValueError as error:
                raise DataError(f"{row}: {error}") from None
        self._set_splits(table, rows)
        self.rows += rows
        if self.first is None:
            self.first = table
            about = [f"{role}: {shown(name, 40)}" for role, name in roles.items()]
            about += [f"classes: {len(classes):,} columns"] if classes else []
            self.inventory.infer("columns", ", ".join(about))
        return len(rows)

    def indexes(self, needs_sets: bool) -> dict[str, Index]:
        """Return split -> Index of its images.

        Labels are sets if a cell holds several, or if classes are columns of 0 and 1
        (unless each row has exactly one 1); `needs_sets` makes all labels sets.
        """
        self._move_fold()
        first, indexes = self.rows[0].table, {}
        labeled = {row.split for row in self.rows if row.label is not None}
        if first.classes or "label" in first.roles:
            labeled.add("train")
        elif not labeled and any(row.split == "train" for row in self.rows):
            error = missing_column("label", [*first.roles.values(), *self.unused])
            raise DataError(f"{shown(first.path)}: {error}")
        used = [row for row in self.rows if row.split in labeled]
        are_sets = any(isinstance(row.label, tuple) for row in used)
        for row in used:
            if are_sets and not isinstance(row.label, tuple):
                row.label = (row.label,) if row.label else ()
            row.require("label")
            row.require("path")
            if row.split == "train" and "weight" in row.table.roles:
                row.require("weight")
        first_rows: dict[str, Row] = {}
        for table, group in itertools.groupby(used, lambda row: row.table):
            self._find_files(table, list(group), first_rows)
        self._leave_out_others(first_rows)
        is_single = bool(first.classes) and not needs_sets
        is_single = is_single and all(len(row.label) == 1 for row in used)
        for split in sorted({row.split for row in self.rows}):
            rows = [x for x in self.rows if x.split == split and x.path is not None]
            if not rows:
                continue
            table, classes = rows[0].table, first.classes
            self.names[split] = shown(os.path.basename(table.path), 60)
            if "split" in table.roles:
                self.names[split] += f", column {table.roles['split']}"
            if any(row.table.split != table.split for row in rows):
                why = f"images of the split {split} are in another table too"
                raise DataError(f"{shown(rows[-1].table.path)}: {why}; name one table")
            if are_sets and split in labeled:
                alike = [row for row in used if row.table.split == table.split]
                names = {class_name(x) for row in alike for x in row.label}
                classes = classes or sorted_classes(names)
            weights = None
            if "weight" in table.roles:
                weights = [1 if row.weight is None else row.weight for row in rows]
                if split == "train" and not any(weights):
                    path = shown(table.path)
                    raise DataError(f"{path}: all weights for training are 0")
            index = index_of(
                [row.path for row in rows],
                [row.label for row in rows],
                weights,
                self.options.max_image_pixels,
                classes,
            )
            if is_single and split in labeled:
                numbers = index.labels.argmax(1).astype(np.int32)
                index = dataclasses.replace(index, labels=numbers)
            elif needs_sets and split in labeled:
                index = index.as_label_sets()
            indexes[split] = index
        if is_single or are_sets or needs_sets:
            text = "one for each image: each row has one 1" if is_single else ""
            self.inventory.infer("labels", text or "any number for each image")
        elif "train" in indexes:
            _warn_of_labels(indexes["train"].class_names)
        return indexes

    def _columns(self, header, path, split, images):
        """Return role -> column index, and the indices of the class columns."""
        if not header:
            raise ValueError("the file is empty")
        for name, count in collections.Counter(filter(None, header)).items():
            if count > 1:
                raise ValueError(f"two columns are called {name!r}; rename one")
        used: dict[str, int] = {}
        first = self.first
        is_alike = first is not None and first.split == split
        for role in sorted(_ROLES, key=lambda role: role not in self.columns):
            name = (first.roles if first else self.columns).get(role)
            name = name if name in header or is_alike or not first else None
            index = find_column(role, header, name, _ROLES[role], used.values())
            if role == "path" and not name and images and index not in images:
                if images[1:]:
                    raise ambiguous_column(role, [header[i] for i in images])
                [index] = images
            if is_alike and name is None and index is not None:
                if header[index] not in self.unused:
                    text = f"has a column {header[index]!r}, unlike {shown(first.path)}"
                    raise ValueError(text)
            elif index is not None:
                used[role] = index
        if first:
            needed = first.classes if is_alike or {*first.classes} & {*header} else ()
            classes = [find_column("class", header, name) for name in needed]
        else:
            is_data = [not re.fullmatch(_ROW_NUMBERS, name) for name in header]
            rest = [i for i, x in enumerate(is_data) if x and i not in used.values()]
            if "label" not in used and "path" in used and len(rest) == 1:
                used["label"] = rest[0]
            classes = rest if "label" not in used and len(rest) > 1 else []
        has_folds = self.fold >= 0 and split == "train"
        if not has_folds:
            used.pop("fold", None)
        for role in ("path", "fold"):
            if role not in used and (role == "path" or has_folds):
                if role == "path" and any(re.fullmatch(_PIXELS, x) for x in header):
                    way = "write them to an .npz file, as docs/data.md shows"
                    raise ValueError(f"has pixels in its cells, not files; {way}")
                finder = PathFinder(path, self.image_dir, self.inventory)
                if role == "path" and (files := finder.present(header)):
                    raise ValueError(looks_like_data(header, files[0]))
                raise missing_column(role, header)
        unused = {*range(len(header))} - {*used.values(), *classes}
        self.unused |= {header[i] or "(without a name)": None for i in sorted(unused)}
        return used, classes

    def _set_splits(self, table, rows):
        name = table.roles.get("split")
        if name is None:
            return
        splits = {x: cells.split(x, name) for x in dict.fromkeys(x.split for x in rows)}
        is_named = "split" in self.columns or name.lower() == "split"
        if not is_named and not any(splits.values()):
            self.unused[table.roles.pop("split")] = None
            splits = dict.fromkeys(splits, table.split)
        elif {x.removesuffix(".0") for x in splits} == {"0", "1"} and (
            not name.lower().startswith("is")
        ):
            way = "Write train and test, or call the column is_test or is_train"
            what = f"{shown(table.path)}: column {name}: is 0 or 1 for training?"
            raise DataError(f"{what} {way}")
        elif any(text != split for text, split in splits.items()):
            about = ", ".join(f"{text} is {split}" for text, split in splits.items())
            self.inventory.infer("split", f"column {name}: {shown(about, 100)}")
        for row in rows:
            if splits[row.split] is None:
                text = f"the split {row.split!r:.40} is not train, validation or test"
                raise DataError(f"{row}: {text}")
            row.split = splits[row.split]

    def _move_fold(self):
        rows = [row for row in self.rows if row.split == "train"]
        if self.fold < 0 or not rows:
            return
        for row in rows:
            row.require("fold")
            row.split = "test" if row.fold == self.fold else "train"
        folds = sorted({row.fold for row in rows})
        if self.fold not in folds:
            known = shown(", ".join(map(str, folds)), 60)
            why = f"no row has the fold {self.fold}, only {known}; --fold names one"
            raise DataError(f"{shown(self.first.path)}: {why}")

    def _find_files(self, table, rows, first_rows):
        """Set the file of each row; `first_rows` are file -> row that names it."""
        has_others = any(row.table.split != table.split for row in self.rows)
        finder = PathFinder(table.path, self.image_dir, self.inventory, has_others)
        names = [row.path for row in rows]
        files = finder(names, lambda i, text: DataError(f"{rows[i]}: {text}"))
        for row, name, row.path in zip(rows, names, files, strict=True):
            if row.path is not None:
                before = first_rows.setdefault(finder.key(row.path), row)
                if before is not row:
                    raise DataError(f"{row}: {shown(row.path)} is also in {before}")
            elif self.options.survey is not None:
                self.options.survey.misplaced[str(row)] = f"no file {shown(name)}"
            else:
                count = f"{files.count(None):,} of {len(rows):,} rows have none"
                way = "--bad_images=skip leaves them out"
                raise DataError(f"{row}: {finder.missing(name)} ({count}, {way})")

    def _leave_out_others(self, files):
        """Record the images without a row in the folders of `files`."""
        folders = {os.path.dirname(file) for file in files if not is_url(file)}
        images = (x.path for folder in sorted(folders) for x in entries(folder))
        rest = sorted(x for x in images if is_image_name(x) and x not in files)
        self.inventory.leave_out("images without a labeled row", *rest)


def _warn_of_labels(names: Sequence[str]) -> None:
    fractions = [name for name in names if re.fullmatch(r"-?\d+[.,]\d+", name)]
    if 2 * len(fractions) > len(names):
        what = f"labels are numbers such as {fractions[0]}, and each is a class"
        console.warn(f"{what}; there is no regression: write names of ranges instead")
    for mark in "|, ":
        joined = [name for name in names if mark in name]
        parts = {part.strip() for name in names for part in name.split(mark)}
        if joined and len(parts) <= len(names):
            what = f"classes such as {shown(joined[0], 60)!r} share their parts"
            way = f"--label_separator={mark!r} divides several labels of an image"
            console.warn(f"{what}; {way}")
            return
