"""Tables of image files: CSV, TSV, text, JSON or Parquet with a row for each image."""

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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
)
from towers.data.files.paths import shown
from towers.data.files.rows import looks_like_data, read_rows
from towers.data.files.table_paths import PathFinder
from towers.data.inventory import Inventory
from towers.data.sources import DataSet, Trained
from towers.errors import DataError

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
        r"split",
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
    `TableReader.read`."""
    options, inventory = (image_options or ImageOptions()).with_survey(), Inventory()
    named = containers.parse_columns(columns, "table", _ROLES)
    location, paths = containers.find_files(data_dir, "table", inventory)
    reader = TableReader(named, image_dir, fold, label_separator, options, inventory)
    indexes = {}
    for of_tables in sorted(paths, key=lambda split: split != "train"):
        by_split = reader.read(paths[of_tables], of_tables)
        for split in sorted(by_split.keys() & indexes):
            raise DataError(
                f"{shown(paths[of_tables][0])}: images of the split {split} are in "
                "another table too; name one table"
            )
        indexes |= by_split
    inventory.leave_out("columns", *reader.unused)
    indexes = reader.settle(indexes, getattr(trained, "multi_label", False))
    openers = {x: lambda index=index: index for x, index in indexes.items()}
    return containers.data_set("table", location, openers, options, trained, inventory)


@dataclasses.dataclass
class Table:
    """Rows of a table: the split in its name, role -> name of a column, names of
    the columns of classes, numbers of the rows, and role -> their values."""

    path: str
    split: str
    roles: dict[str, str]
    classes: tuple[str, ...]
    numbers: list[int] = dataclasses.field(default_factory=list)
    values: dict[str, list] = dataclasses.field(default_factory=dict)

    def where(self, row: int) -> str:
        """Return the location of a row, for messages."""
        return f"{shown(self.path)}: row {self.numbers[row]}"

    def error(self, row: int, text: object) -> DataError:
        """Return an error about a row."""
        return DataError(f"{self.where(row)}: {text}")

    def parse(self, role: str, function: Callable[[Any], Any]) -> None:
        """Parse the values of a role, empty ones to None; DataError with the row if
        `function` raises ValueError."""
        values, cached = (
            self.values.get(role, []),
            functools.lru_cache(10_000, typed=True)(function),
        )
        for row, value in enumerate(values):
            parse = function if isinstance(value, list | dict) else cached
            try:
                values[row] = None if cells.is_empty(value) else parse(value)
            except ValueError as error:
                raise self.error(row, error) from None

    def require(self, role: str, splits: Iterable[str]) -> None:
        """Raise DataError if a row of some splits has an empty value."""
        for row, value in enumerate(self.values.get(role, ())):
            if value is None and self.values["split"][row] in splits:
                raise self.error(row, f"has no {role}")


@dataclasses.dataclass
class TableReader:
    """Reads tables to an Index for each split.

    Attributes:
        columns: role -> name; others go by their usual names.
        image_dir: folder that paths start from, by default the folder of each table.
        fold: training rows of this number in the column `fold` are for testing.
        separator: text between the labels of an image; "" if none has several.
        options: their survey takes the rows without a file.
        inventory: is filled.
        first: the first table; others use its columns.
        unused: names of columns without a role.
        first_rows: file -> the row that names it.
    """

    columns: Mapping[str, str]
    image_dir: str
    fold: int
    separator: str
    options: ImageOptions
    inventory: Inventory
    first: Table | None = None
    unused: dict[str, None] = dataclasses.field(default_factory=dict)
    first_rows: dict[str, str] = dataclasses.field(default_factory=dict)

    def read(self, paths: Sequence[str], of_tables: str) -> dict[str, Index]:
        """Read the tables of a split, which have the same columns: split -> Index of
        its images. A column may divide them into other splits.

        Labels are -1 without a column of labels, and in a split for evaluation that has
        none; its files are not looked for. Labels are sets if one has several names,
        `cat;outdoor`, or is a list, and if each class has a column of 0 and 1.

        DataError names the file and the row: a file is missing, or has two rows; a
        column is missing, or may be one of two; a value is invalid.
        """
        tables = [self._table(path, of_tables) for path in paths]

        def joined(role):
            return list(itertools.chain(*(x.values.get(role, ()) for x in tables)))

        self._move_fold(tables)
        labels, splits = joined("label"), np.array(joined("split"))
        if not labels:
            raise DataError(f"{shown(paths[0])}: has no rows")
        labeled = {*splits[[label is not None for label in labels]].tolist()}
        if tables[0].classes or "label" in tables[0].roles:
            labeled.add("train")
        settle = settle_classes
        if any(isinstance(label, tuple) for label in labels):
            labels = [(x,) if isinstance(x, str) else x or () for x in labels]
            classes = tables[0].classes
            settle = functools.partial(settle_label_sets, class_names=classes)
        for table in tables:
            if settle is settle_classes:
                table.require("label", labeled)
            table.require("weight", {"train"})
            table.require("path", labeled)
            self._find_files(table, labeled)
        files = joined("path")
        weights = [1 if x is None else x for x in joined("weight")]
        pixels = self.options.max_image_pixels
        index = index_of(files, labels, weights or None, pixels, settle)
        is_found, indexes = np.array([file is not None for file in files]), {}
        for split in np.unique(splits[is_found]).tolist():
            one = index.take(np.flatnonzero((splits == split) & is_found))
            if split not in labeled:
                no_labels = np.full(len(one), -1, np.int32)
                one = dataclasses.replace(one, labels=no_labels, class_names=())
            indexes[split] = one.without_empty_classes()
            if weights and split == "train" and not one.sample_weights.any():
                raise DataError(f"{shown(paths[0])}: all weights for training are 0")
        return indexes

    def settle(self, indexes: Mapping[str, Index], needs_sets: bool) -> dict:
        """Give all splits one kind of labels: one for each image, also if each row has
        exactly one 1 in columns of classes, or sets."""
        labeled = {k: x for k, x in indexes.items() if not (x.labels < 0).all()}
        sets = [x.labels for x in labeled.values() if x.labels.ndim == 2]
        if not sets and not needs_sets:
            names = labeled["train"].class_names if "train" in labeled else ()
            _warn_of_joined_labels(names)
        elif (
            not needs_sets
            and self.first.classes
            and all((x.sum(1) == 1).all() for x in sets)
        ):
            self.inventory.infer("labels", "one for each image: each row has one 1")
            for split, x in labeled.items():
                labels = x.labels.argmax(1).astype(np.int32)
                labeled[split] = dataclasses.replace(x, labels=labels)
        else:
            self.inventory.infer("labels", "any number for each image")
            labeled = {split: x.as_label_sets() for split, x in labeled.items()}
        return dict(indexes) | labeled

    def _table(self, path, of_tables):
        rows = read_rows(path, self.columns.values(), self.inventory)
        header = [str(name).strip() for name in next(rows, ())]
        if not header:
            raise DataError(f"{shown(path)}: the file is empty")
        try:
            used, classes = self._columns(header, path, of_tables)
        except ValueError as error:
            raise DataError(f"{shown(path)}: {error}") from None
        names = tuple(header[i] for i in classes)
        roles = {role: header[i] for role, i in used.items()}
        table = Table(path, of_tables, roles, names)
        values = table.values = {role: [] for role in ("label", "split", *used)}
        for number, row in rows:
            table.numbers.append(number)
            if len(row) != len(header):
                text = f"has {len(row)} values, and the first row {len(header)}"
                raise table.error(-1, text)
            for role, index in used.items():
                values[role].append(row[index])
            if classes:
                values["label"].append([row[index] for index in classes])
        if classes:
            table.parse("label", lambda row: cells.with_1(row, names))
        else:
            table.parse("label", lambda x: cells.label(x, self.separator))
        table.parse("path", lambda x: str(x).strip() or None)
        table.parse("weight", cells.weight)
        self._set_splits(table)
        for role in ("label", "split"):
            default = of_tables if role == "split" else None
            values[role] = values[role] or [default] * len(table.numbers)
        if self.first is None:
            self.first = table
            about = [f"{role}: {shown(x, 40)}" for role, x in table.roles.items()]
            about += [f"classes: {len(classes):,} columns"] if classes else []
            self.inventory.infer("columns", ", ".join(about))
        return table

    def _columns(self, header, path, of_tables):
        """Return role -> index of its column, and the indices of class columns."""
        for name, count in collections.Counter(filter(None, header)).items():
            if count > 1:
                raise ValueError(f"two columns are called {name!r}; rename one")
        used, first = {}, self.first
        is_alike = first is not None and first.split == of_tables
        for role in sorted(_ROLES, key=lambda role: role not in self.columns):
            name = (first.roles if first else self.columns).get(role)
            name = name if name in header or is_alike or not first else None
            index = find_column(role, header, name, _ROLES[role], used.values())
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
        has_folds = self.fold >= 0 and of_tables == "train"
        if not has_folds:
            used.pop("fold", None)
        for role in ("path", *["fold"] * has_folds):
            if role not in used:
                finder = PathFinder(path, self.image_dir, self.inventory)
                if role == "path" and (files := finder.present(header)):
                    raise ValueError(looks_like_data(header, files[0]))
                rest = [x for i, x in enumerate(header) if i not in used.values()]
                raise ValueError(
                    f"no column is named like a {role}, only "
                    f"{shown(', '.join(header), 100)}; name it, as in "
                    f"--columns={role}:{rest[0] if rest else 'NAME'}"
                )
        unused = {*range(len(header))} - {*used.values(), *classes}
        self.unused |= {header[i] or "(without a name)": None for i in sorted(unused)}
        return used, classes

    def _set_splits(self, table):
        """Parse the column of splits; one with a usual name, but no name of a split in
        it, is not used."""
        values, name = table.values["split"], table.roles.get("split")
        if name is None:
            return
        texts = list(map(str, values))
        splits = {text: cells.split(text, name) for text in dict.fromkeys(texts)}
        is_named = "split" in self.columns or name.lower() == "split"
        if not is_named and not any(splits.values()):
            del table.roles["split"], values[:]
            self.unused[name] = None
            return
        for row, text in enumerate(texts):
            if splits[text] is None:
                text = f"the split {text!r:.40} is not train, validation or test"
                raise table.error(row, text)
        values[:] = [splits[text] for text in texts]
        if any(text != split for text, split in splits.items()):
            about = ", ".join(f"{text} is {split}" for text, split in splits.items())
            self.inventory.infer("split", f"column {name}: {shown(about, 100)}")

    def _move_fold(self, tables):
        """Move the rows of the fold from training to testing."""
        folds = set()
        for table in tables:
            table.parse("fold", cells.fold)
            table.require("fold", {"train"})
            splits = table.values["split"]
            for row, fold in enumerate(table.values.get("fold", ())):
                if splits[row] == "train":
                    folds.add(fold)
                    splits[row] = "test" if fold == self.fold else "train"
        if folds and self.fold not in folds:
            raise DataError(
                f"{shown(tables[0].path)}: no row has the fold {self.fold}, only "
                f"{shown(', '.join(map(str, sorted(folds))), 60)}; --fold names one"
            )

    def _find_files(self, table, splits):
        """Set the file of each row of some splits, None if it is missing and the survey
        takes it."""
        paths, of_rows = table.values["path"], table.values["split"]
        rows = [row for row, split in enumerate(of_rows) if split in splits]
        finder = PathFinder(table.path, self.image_dir, self.inventory)
        names = [paths[row] for row in rows]
        found = finder(names, lambda i, text: table.error(rows[i], text))
        for row, name, file in zip(rows, names, found, strict=True):
            where, paths[row] = table.where(row), file
            if file is None and self.options.survey is not None:
                text = f"there is no file {shown(name)}"
                self.options.survey.misplaced[where] = text
            elif file is None:
                about = f"{found.count(None):,} of {len(rows):,} rows have none"
                text = finder.missing(name)
                about += ", --bad_images=skip leaves them out"
                raise table.error(row, f"{text} ({about})")
            else:
                before = self.first_rows.setdefault(finder.key(file), where)
                if before is not where:
                    raise table.error(row, f"{shown(file)} is also in {before}")


def _warn_of_joined_labels(names: Sequence[str]) -> None:
    """Warn if most names of classes with a usual separator share their parts."""
    for mark in "|, ":
        parts = [[x for x in name.split(mark) if x.strip()] for name in names]
        counts = collections.Counter(itertools.chain(*parts))
        several = [x for x in parts if len(x) > 1]
        sharing = [x for x in several if any(counts[part] > 1 for part in x)]
        if 2 * len(sharing) > len(several) and len(counts) <= len(names):
            name = shown(mark.join(sharing[0]), 60)
            console.warn(
                f"classes such as {name!r} share their parts; if these are several "
                f"labels of an image, --label_separator={mark!r} divides them"
            )
            return
