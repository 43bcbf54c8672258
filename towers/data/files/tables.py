"""Tables of image files: CSV, TSV, text, JSON or Parquet with a row for each image."""

import collections
import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from towers import console
from towers.data.files import cells, containers
from towers.data.files.image_files import ImageOptions
from towers.data.files.index import (
    Index,
    find_column,
    index_of,
    settle_classes,
    settle_label_sets,
    sorted_classes,
)
from towers.data.files.paths import is_image_name
from towers.data.files.rows import looks_like_data, read_rows
from towers.data.files.table_paths import PathFinder
from towers.data.inventory import Inventory
from towers.data.sources import DataSet, Trained
from towers.errors import DataError
from towers.messages import shown

# Regular expressions for names of columns, in order of precedence; names are compared
# in lower case, with underscores for spaces.
_ROLES = {
    "path": (
        r"(image|img|file|photo)?_?(path|file_?name|url)|(image|img)_(file|name)"
        r"|file|image|img|photo",
        r"(image|img|file|photo)?_?id(_code)?",
    ),
    "label": (r"label|class|target|class_?name|category",),
    "split": (
        r"(data_?)?split|ml_?use",
        r"subset|partition|set|phase|usage",
        r"is_?(train|val|test)\w*",
    ),
    "fold": (r"k?fold",),
    "weight": (r"(sample_)?weight",),
}
# Columns of row numbers, which pandas writes without a name.
_ROW_NUMBERS = r"|Unnamed: \d+"


def load(
    data_dir: str = "",
    columns: str = "",
    image_dir: str = "",
    fold: int = -1,
    label_separator: str = cells.SEPARATOR,
    image_options: ImageOptions | None = None,
    trained: Trained | None = None,
) -> DataSet:
    """Load the images of tables; arguments and errors as of `data.load` and
    `TableReader`.
    """
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
    return containers.data_set(
        "table", location, openers, options, trained, inventory, reader.names
    )


class Table(NamedTuple):
    """A table: the split in its name, role -> name of a column, and the names of the
    columns of classes.
    """

    path: str
    split: str
    roles: dict[str, str]
    classes: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class Row:
    """A row of a table; values are None if they are empty."""

    table: Table
    number: int
    split: str
    path: str | None = None
    label: str | tuple[str, ...] | None = None
    fold: int | None = None
    weight: float | None = None

    def __str__(self) -> str:
        return f"{shown(self.table.path)}: row {self.number}"

    def require(self, role: str) -> None:
        """Raise DataError if a value is empty."""
        if getattr(self, role) is None:
            raise DataError(f"{self}: has no {role}")


@dataclasses.dataclass
class TableReader:
    """Reads the rows of tables, then finds their files.

    DataError names the file and the row: a file is missing, or has two rows; a column
    is missing, or may be one of two; tables of a split have different columns; a value
    is invalid.

    Attributes:
        columns: role -> name; others go by their usual names.
        image_dir: folder that paths start from, by default the folder of each table.
        fold: training rows of this number in the column `fold` are for testing.
        separator: text between the labels of an image; "" if none has several.
        options: their survey takes the rows without a file.
        inventory: is filled.
        first: the first table; others use its columns.
        rows: those of all tables.
        unused: names of columns without a role.
        names: split -> the table, and the column, that it is in.
    """

    columns: Mapping[str, str]
    image_dir: str
    fold: int
    separator: str
    options: ImageOptions
    inventory: Inventory
    first: Table | None = None
    rows: list[Row] = dataclasses.field(default_factory=list)
    unused: dict[str, None] = dataclasses.field(default_factory=dict)
    names: dict[str, str] = dataclasses.field(default_factory=dict)

    def read(self, path: str, split: str) -> int:
        """Read a table of a split, and return its number of rows; a column may divide
        them into other splits.
        """
        lines = read_rows(path, self.columns.values(), self.inventory)
        header = [str(name).strip() for name in next(lines, ())]
        first_row = next(lines, None)
        lines = itertools.chain([first_row] if first_row else [], lines)
        images = [
            i
            for i, value in enumerate(first_row[1][: len(header)] if first_row else ())
            if is_image_name(str(value).strip())
        ]
        try:
            used, classes = self._columns(header, path, split, images)
        except ValueError as error:
            raise DataError(f"{shown(path)}: {error}") from None
        roles = {role: header[i] for role, i in used.items()}
        table = Table(path, split, roles, tuple(header[i] for i in classes))
        parsers = {
            "path": lambda x: str(x).strip() or None,
            "label": lambda x: cells.label(x, self.separator),
            "split": str,
            "fold": cells.fold,
            "weight": cells.weight,
        }
        rows = []
        for number, values in lines:
            row = Row(table, number, split)
            rows.append(row)
            if len(values) != len(header):
                text = f"has {len(values)} values, and the first row {len(header)}"
                raise DataError(f"{row}: {text}")
            try:
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

        Labels are -1 in a split for evaluation without any; its files are not looked
        for. Labels are sets if one has several names, `cat;outdoor`, or is a list, and
        if each class has a column of 0 and 1, unless each row has exactly one 1;
        `needs_sets` makes sets of all.
        """
        self._move_fold()
        classes, indexes = self.first.classes, {}
        labeled = {row.split for row in self.rows if row.label is not None}
        if classes or "label" in self.first.roles:
            labeled.add("train")
        used = [row for row in self.rows if row.split in labeled]
        are_sets = any(isinstance(row.label, tuple) for row in used)
        for row in used:
            if are_sets and not isinstance(row.label, tuple):
                row.label = (row.label,) if row.label else ()
            row.require("label")
            row.require("path")
            if row.split == "train" and "weight" in row.table.roles:
                row.require("weight")
        first_rows = {}
        for table, rows in itertools.groupby(used, lambda row: row.table):
            self._find_files(table, list(rows), first_rows)
        is_single = bool(classes) and not needs_sets
        is_single = is_single and all(len(row.label) == 1 for row in used)
        for split in sorted({row.split for row in self.rows}):
            rows = [x for x in self.rows if x.split == split and x.path is not None]
            if not rows:
                continue
            table, settle = rows[0].table, settle_classes
            column = table.roles.get("split")
            self.names[split] = shown(os.path.basename(table.path), 60)
            self.names[split] += f", column {column}" if column else ""
            if any(row.table.split != table.split for row in rows):
                raise DataError(
                    f"{shown(rows[-1].table.path)}: images of the split {split} are in "
                    "another table too; name one table"
                )
            if are_sets and split in labeled:
                alike = [row for row in used if row.table.split == table.split]
                names = sorted_classes({x for row in alike for x in row.label})
                settle = functools.partial(
                    settle_label_sets, class_names=classes or names
                )
            weights = None
            if "weight" in table.roles:
                weights = [1 if row.weight is None else row.weight for row in rows]
                if split == "train" and not any(weights):
                    path = shown(table.path)
                    raise DataError(f"{path}: all weights for training are 0")
            files, labels = [row.path for row in rows], [row.label for row in rows]
            pixels = self.options.max_image_pixels
            index = index_of(files, labels, weights, pixels, settle)
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
            _warn_of_joined_labels(indexes["train"].class_names)
        return indexes

    def _columns(self, header, path, split, images):
        """Return role -> index of its column, and the indices of class columns;
        `images` are indices of columns with names of images in the first row.
        """
        if not header:
            raise ValueError("the file is empty")
        for name, count in collections.Counter(filter(None, header)).items():
            if count > 1:
                raise ValueError(f"two columns are called {name!r}; rename one")
        used, first = {}, self.first
        is_alike = first is not None and first.split == split
        for role in sorted(_ROLES, key=lambda role: role not in self.columns):
            name = (first.roles if first else self.columns).get(role)
            name = name if name in header or is_alike or not first else None
            index = find_column(role, header, name, _ROLES[role], used.values())
            if role == "path" and not name and images and index not in images:
                if images[1:]:
                    names = " or ".join(header[i] for i in images[:2])
                    raise ValueError(
                        f"is the path in column {names}? --columns=path:"
                        f"{header[images[0]]} names it"
                    )
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
        for role in ("path", *["fold"] * has_folds):
            if role not in used:
                finder = PathFinder(path, self.image_dir, self.inventory)
                if role == "path" and (files := finder.present(header)):
                    raise ValueError(looks_like_data(header, files[0]))
                raise ValueError(
                    f"no column is named like a {role}, only "
                    f"{shown(', '.join(header), 100)}; --columns={role}:NAME names it"
                )
        unused = {*range(len(header))} - {*used.values(), *classes}
        self.unused |= {header[i] or "(without a name)": None for i in sorted(unused)}
        return used, classes

    def _set_splits(self, table, rows):
        """Set the splits that a column names; one with a usual name, but no name of a
        split in it, is not used.
        """
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
            raise DataError(
                f"{shown(table.path)}: column {name}: is 0 or 1 for training? "
                "Write train and test in their place, or call the column is_test or "
                "is_train"
            )
        elif any(text != split for text, split in splits.items()):
            about = ", ".join(f"{text} is {split}" for text, split in splits.items())
            self.inventory.infer("split", f"column {name}: {shown(about, 100)}")
        for row in rows:
            if splits[row.split] is None:
                text = f"the split {row.split!r:.40} is not train, validation or test"
                raise DataError(f"{row}: {text}")
            row.split = splits[row.split]

    def _move_fold(self):
        """Move the rows of the fold from training to testing."""
        rows = [row for row in self.rows if row.split == "train"]
        if self.fold < 0 or not rows:
            return
        for row in rows:
            row.require("fold")
            row.split = "test" if row.fold == self.fold else "train"
        folds = sorted({row.fold for row in rows})
        if self.fold not in folds:
            raise DataError(
                f"{shown(self.first.path)}: no row has the fold {self.fold}, only "
                f"{shown(', '.join(map(str, folds)), 60)}; --fold names one"
            )

    def _find_files(self, table, rows, first_rows):
        """Set the file of each row, None if it is missing and the survey takes it;
        `first_rows` are file -> the row that names it.
        """
        has_others = any(row.table.split != table.split for row in self.rows)
        finder = PathFinder(table.path, self.image_dir, self.inventory, has_others)
        names = [row.path for row in rows]
        found = finder(names, lambda i, text: DataError(f"{rows[i]}: {text}"))
        for row, name, row.path in zip(rows, names, found, strict=True):
            if row.path is not None:
                before = first_rows.setdefault(finder.key(row.path), row)
                if before is not row:
                    raise DataError(f"{row}: {shown(row.path)} is also in {before}")
            elif self.options.survey is not None:
                text = f"there is no file {shown(name)}"
                self.options.survey.misplaced[str(row)] = text
            else:
                raise DataError(
                    f"{row}: {finder.missing(name)} ({found.count(None):,} of "
                    f"{len(rows):,} rows have none, --bad_images=skip leaves them out)"
                )


def _warn_of_joined_labels(names: Sequence[str]) -> None:
    """Warn if names of classes have a usual separator, and share their parts."""
    for mark in "|, ":
        joined = [name for name in names if mark in name]
        parts = {part.strip() for name in names for part in name.split(mark)}
        if joined and len(parts) <= len(names):
            console.warn(
                f"classes such as {shown(joined[0], 60)!r} share their parts; if these "
                f"are several labels of an image, --label_separator={mark!r} divides "
                "them"
            )
            return
