"""Tables of image files: CSV, TSV, text, JSON or Parquet with a row for each image."""

import collections
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from towers import console
from towers.data.files import containers
from towers.data.files.class_folders import split_of
from towers.data.files.image_files import ImageOptions
from towers.data.files.index import (
    Index,
    find_column,
    index_of,
    settle_classes,
    settle_label_sets,
)
from towers.data.files.paths import shown
from towers.data.files.rows import SEPARATOR, label_of, looks_like_data, read_rows
from towers.data.files.table_paths import PathFinder
from towers.data.inventory import Inventory
from towers.data.sources import DataSet, Trained
from towers.errors import DataError

# Regular expressions for names of columns, in order of precedence; names are compared
# in lower case, with underscores for spaces.
_ROLES = {
    "path": (
        r"(image|img|file|photo)?_?(path|file_?name)|(image|img)_(file|name)"
        r"|file|image|img|photo",
        r"(image|img|file|photo)?_?id",
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
# Splits by number, as in CelebA, and by the names of FER2013.
_SPLITS = {"0": "train", "1": "validation", "2": "test"}
_SPLITS |= {"publictest": "validation", "privatetest": "test"}
_BOOLEANS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "False": 0, "True": 1}
# Columns of row numbers, which pandas writes without a name.
_ROW_NUMBERS = r"|Unnamed: \d+"


def load(
    data_dir: str = "",
    columns: str = "",
    image_dir: str = "",
    fold: int = -1,
    label_separator: str = SEPARATOR,
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
    """The rows of a table.

    Attributes:
        roles: role -> name of its column.
        classes: names of the columns of classes.
        numbers: of the rows in the file.
        values: role -> its values; "classes": the names of the classes with a 1.
        splits, labels: of the rows; None without a label.
    """

    path: str
    roles: dict[str, str]
    classes: tuple[str, ...]
    numbers: list[int] = dataclasses.field(default_factory=list)
    values: dict[str, list] = dataclasses.field(default_factory=dict)
    splits: list[str] = dataclasses.field(default_factory=list)
    labels: list[str | tuple[str, ...] | None] = dataclasses.field(default_factory=list)

    def where(self, row: int) -> str:
        """Return the location of a row, for messages."""
        return f"{shown(self.path)}: row {self.numbers[row]}"


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
        column is missing, or may be one of two; a label, split, fold or weight is
        invalid; a table has other columns than the first.
        """
        tables = []
        for path in paths:
            tables.append(table := self._table(path, of_tables))
            here, first = ({*x.roles, *x.classes} for x in (table, tables[0]))
            if here != first:
                here, first = (shown(", ".join(sorted(x)), 60) for x in (here, first))
                raise DataError(
                    f"{shown(path)}: has other columns than {shown(paths[0])}: {here}, "
                    f"not {first}"
                )
        self._check_folds(tables)
        labels = list(itertools.chain(*(table.labels for table in tables)))
        splits = np.array(list(itertools.chain(*(table.splits for table in tables))))
        if not labels:
            raise DataError(f"{shown(paths[0])}: has no rows")
        is_labeled = np.array([label is not None for label in labels])
        needed = {"train"} if {"classes", "label"} & tables[0].values.keys() else set()
        unlabeled = {*splits.tolist()} - {*splits[is_labeled].tolist()} - needed
        is_set = any(isinstance(label, tuple) for label in labels)
        files, weights = [], []
        for table in tables:
            if not is_set:
                _check_labels(table, unlabeled)
            files += self._files(table, unlabeled)
            weights += _weights(table)
        settle = settle_classes
        if is_set:
            labels = [(x,) if isinstance(x, str) else x or () for x in labels]
            settle = functools.partial(settle_label_sets, class_names=tables[0].classes)
        kept = [row for row, file in enumerate(files) if file is not None]
        index = index_of(
            [files[row] for row in kept],
            [labels[row] for row in kept],
            [weights[row] for row in kept] if weights else None,
            self.options.max_image_pixels,
            settle,
        )
        splits, indexes = splits[kept], {}
        for split in np.unique(splits).tolist():
            one = index.take(np.flatnonzero(splits == split)).without_empty_classes()
            if split in unlabeled:
                no_labels = np.full(len(one), -1, np.int32)
                one = dataclasses.replace(one, labels=no_labels, class_names=())
            indexes[split] = one
        train = indexes.get("train")
        if weights and train is not None and not train.sample_weights.any():
            raise DataError(f"{shown(paths[0])}: all weights of training images are 0")
        return indexes

    def settle(
        self, indexes: Mapping[str, Index], needs_sets: bool
    ) -> dict[str, Index]:
        """Give all splits one kind of labels: one for each image, also if each row has
        exactly one 1 in columns of classes, or sets."""
        labeled = {k: x for k, x in indexes.items() if not (x.labels < 0).all()}
        sets = [x.labels for x in labeled.values() if x.labels.ndim == 2]
        if not sets and not needs_sets:
            train = labeled.get("train")
            _warn_of_joined_labels(train.class_names if train else ())
            return dict(indexes)
        is_one_hot = bool(self.first.classes) and not needs_sets
        if is_one_hot and all((x.sum(1) == 1).all() for x in sets):
            about = "one for each image: each row has exactly one 1"
            for split, x in labeled.items():
                labels = x.labels.argmax(1).astype(np.int32)
                labeled[split] = dataclasses.replace(x, labels=labels)
        else:
            about = "any number for each image"
            labeled = {split: x.as_label_sets() for split, x in labeled.items()}
        self.inventory.infer("labels", about)
        return dict(indexes) | labeled

    def _table(self, path, of_tables):
        rows = read_rows(path, self.columns, self.inventory)
        header = [str(name).strip() for name in next(rows, None) or ()]
        if not header:
            raise DataError(f"{shown(path)}: the file is empty")
        try:
            used, class_columns = self._columns(header, path, of_tables)
        except ValueError as error:
            raise DataError(f"{shown(path)}: {error}") from None
        roles = {role: header[index] for role, index in used.items()}
        table = Table(path, roles, tuple(header[i] for i in class_columns))
        table.values = {role: [] for role in used}
        if class_columns:
            table.values["classes"] = []
        for number, row in rows:
            table.numbers.append(number)
            if len(row) != len(header):
                raise DataError(
                    f"{table.where(-1)} has {len(row)} values, and the first row "
                    f"{len(header)}"
                )
            for role, index in used.items():
                table.values[role].append(row[index])
            if class_columns:
                names = _classes_with_1(row, header, class_columns, table.where)
                table.values["classes"].append(names)
        self._set_splits(table, of_tables)
        table.labels = table.values.get("classes") or [None] * len(table.numbers)
        for row, value in enumerate(table.values.get("label", ())):
            try:
                table.labels[row] = label_of(value, self.separator)
            except ValueError as error:
                raise DataError(f"{table.where(row)}: {error}") from None
        if self.first is None:
            self.first = table
            used = [f"{role}: {shown(name, 40)}" for role, name in table.roles.items()]
            if table.classes:
                used.append(f"classes: {len(table.classes):,} columns")
            self.inventory.infer("columns", ", ".join(used))
        return table

    def _columns(self, header, path, of_tables):
        """Role -> index of its column, and the indices of columns of classes."""
        for name, count in collections.Counter(filter(None, header)).items():
            if count > 1:
                raise ValueError(f"two columns are called {name!r}; rename one")
        names = self.columns
        if first := self.first:
            names = first.roles | names
            names = {role: x for role, x in names.items() if x in header}
        used = {role: find_column(role, header, name) for role, name in names.items()}
        for role, patterns in _ROLES.items():
            if role not in used:
                index = find_column(role, header, None, patterns, used.values())
                used |= {} if index is None else {role: index}
        rest = [
            index
            for index, name in enumerate(header)
            if index not in used.values() and not re.fullmatch(_ROW_NUMBERS, name)
        ]
        if first:
            class_columns = [header.index(x) for x in first.classes if x in header]
            if class_columns and len(class_columns) < len(first.classes):
                missing = next(x for x in first.classes if x not in header)
                raise ValueError(f"has no column {missing!r}, as {shown(first.path)}")
        else:
            if "label" not in used and "path" in used and len(rest) == 1:
                used["label"] = rest[0]
            class_columns = rest if "label" not in used and len(rest) > 1 else []
        if self.fold < 0 or of_tables != "train":
            used.pop("fold", None)
        for role in ("path", *["fold"] * (self.fold >= 0 and of_tables == "train")):
            if role not in used:
                finder = PathFinder(path, self.image_dir, self.inventory)
                if role == "path" and (paths := finder.present(header)):
                    raise ValueError(looks_like_data(header, paths[0]))
                raise ValueError(
                    f"no column is named like a {role}, only "
                    f"{shown(', '.join(header), 100)}; name it, as in "
                    f"--columns={role}:{header[rest[0]] if rest else 'NAME'}"
                )
        unused = {*range(len(header))} - {*used.values(), *class_columns}
        self.unused |= {header[i] or "(without a name)": None for i in sorted(unused)}
        return used, class_columns

    def _set_splits(self, table, of_tables):
        """Set the splits of a table; a column with a usual name that has no name of a
        split at all is not used."""
        table.splits, name = [of_tables] * len(table.numbers), table.roles.get("split")
        if name is None:
            return
        texts = [str(value).strip() for value in table.values["split"]]
        splits = {text: _split_of(text, name) for text in dict.fromkeys(texts)}
        is_named = "split" in self.columns or name.lower() == "split"
        if texts and not any(splits.values()) and not is_named:
            del table.roles["split"], table.values["split"]
            self.unused[name] = None
            return
        for row, text in enumerate(texts):
            if splits[text] is None:
                raise DataError(
                    f"{table.where(row)}: the split {text!r:.40} is not train, "
                    "validation or test"
                )
        table.splits = [splits[text] for text in texts]
        if any(text != splits[text] for text in splits):
            about = ", ".join(f"{text} is {splits[text]}" for text in sorted(splits))
            self.inventory.infer("split", f"column {name}: {shown(about, 100)}")

    def _check_folds(self, tables):
        """Move the rows of the fold from training to testing."""
        folds = set()
        for table in tables if "fold" in tables[0].roles else ():
            for row, value in enumerate(table.values["fold"]):
                if table.splits[row] != "train":
                    continue
                try:
                    number = float(value)
                    fold = int(number)
                except (TypeError, ValueError, OverflowError):
                    number, fold = 0.5, 0
                if fold != number:
                    raise DataError(
                        f"{table.where(row)}: the fold {value!r:.40} is not an integer"
                    )
                folds.add(fold)
                if fold == self.fold:
                    table.splits[row] = "test"
        if folds and self.fold not in folds:
            raise DataError(
                f"{shown(tables[0].path)}: no row has the fold {self.fold}, only "
                f"{shown(', '.join(map(str, sorted(folds))), 60)}; --fold names one"
            )

    def _files(self, table, unlabeled):
        """The file of each row; None if it is missing and the survey takes it."""
        files = table.values["path"] = [
            "" if value is None else str(value).strip()
            for value in table.values["path"]
        ]
        rows = [row for row, x in enumerate(table.splits) if x not in unlabeled]
        for row in rows:
            if not files[row]:
                raise DataError(f"{table.where(row)}: has no path")
        finder = PathFinder(table.path, self.image_dir, self.inventory)
        names = [files[row] for row in rows]
        found = finder(names, lambda position: table.where(rows[position]))
        num_missing = found.count(None)
        for row, name, file in zip(rows, names, found, strict=True):
            where, files[row] = table.where(row), file
            if file is None and self.options.survey is None:
                raise DataError(
                    f"{where}: {finder.missing(name)} ({num_missing:,} of "
                    f"{len(rows):,} rows; --bad_images=skip leaves them out)"
                )
            if file is None:
                self.options.survey.misplaced[where] = finder.missing(name)
                continue
            before = self.first_rows.setdefault(finder.key(file), where)
            if before is not where:
                raise DataError(f"{where}: {shown(file)} is also in {before}")
        return files


def _check_labels(table, unlabeled):
    for row, label in enumerate(table.labels):
        if label is None and table.splits[row] not in unlabeled:
            raise DataError(f"{table.where(row)}: has no label")


def _classes_with_1(row, header, class_columns, where):
    names = []
    for index in class_columns:
        value = _BOOLEANS.get(str(row[index]).strip().capitalize())
        if value is None:
            raise DataError(
                f"{where(-1)}: the column {shown(header[index], 40)} of a class has "
                f"{shown(str(row[index]), 40)!r}, and not 0 or 1; --columns=label:NAME "
                "names a column of labels"
            )
        if value:
            names.append(header[index])
    return tuple(names)


def _split_of(text, column):
    """The split that a value of a column means, or None."""
    value = text.lower().removesuffix(".0")
    if is_flag := re.match(r"is[ _]?", column.lower()):
        split = split_of(column[is_flag.end() :])
        rest = "test" if split == "train" else "train"
        return {"1": split, "true": split, "0": rest, "false": rest}.get(value)
    return _SPLITS.get(value) or split_of(text)


def _weights(table):
    """float32 of each row, 1 where a row that is not for training has none."""
    weights = []
    for row, value in enumerate(table.values.get("weight", ())):
        if value in ("", None) and table.splits[row] != "train":
            value = 1
        try:
            exact = float(value)
        except (TypeError, ValueError):
            exact = -1.0
        with np.errstate(over="ignore", under="ignore"):
            weight = np.float32(exact)
        if not 0 <= weight < np.inf or (weight == 0) != (exact == 0):
            raise DataError(
                f"{table.where(row)}: the weight {value!r:.40} is not 0 or a positive "
                "number of float32"
            )
        weights.append(weight)
    return weights


def _warn_of_joined_labels(class_names: Iterable[str]) -> None:
    """Warn if most names of classes with a usual separator share their parts."""
    names = list(class_names)
    for mark in "|, ":
        parts = [[x for x in name.split(mark) if x.strip()] for name in names]
        counts = collections.Counter(itertools.chain(*parts))
        several = [x for x in parts if len(x) > 1]
        sharing = [x for x in several if any(counts[part] > 1 for part in x)]
        if 2 * len(sharing) > len(several) and len(counts) <= len(names):
            name = names[parts.index(sharing[0])]
            console.warn(
                f"classes such as {shown(name, 60)!r} share their parts; if these are "
                f"several labels of an image, --label_separator={mark!r} divides them"
            )
            return
