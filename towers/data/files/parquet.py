"""Parquet files with encoded images, as Hugging Face's `datasets` writes them."""

import collections
import contextlib
import dataclasses
import functools
import json
import os
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from pyarrow import parquet, types

from towers.data.files import containers, reading
from towers.data.files.image_files import ImageOptions
from towers.data.files.index import (
    Index,
    data_error,
    find_column,
    label_text,
    missing_column,
    settle_classes,
)
from towers.data.files.paths import class_name
from towers.data.inventory import Inventory
from towers.data.sources import DataSet, Trained
from towers.errors import DataError
from towers.messages import one_line, shown

_NAMES = {
    "image": "image|img|jpg|jpeg|png|webp|picture|image_bytes",
    "label": "labels?|class|cls|target|fine_label",
}
_MIN_GROUPS = 4


class RowGroups:
    """A thread-safe LRU cache of row groups, of `megabytes` uncompressed."""

    def __init__(self, megabytes: float):
        self._max_bytes, self._num_bytes = megabytes * 1e6, 0
        # Key -> bytes, lock, and a list that holds the group once it is read.
        self._groups: collections.OrderedDict[Any, tuple[int, Any, list]]
        self._groups = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, num_bytes: int, read: Callable[[], Any]) -> Any:
        """Return a row group; the first thread that asks for it reads it."""
        with self._lock:
            if key not in self._groups:
                self._groups[key] = num_bytes, threading.Lock(), []
                self._num_bytes += num_bytes
            self._groups.move_to_end(key)
            _, lock, group = self._groups[key]
            while self._num_bytes > self._max_bytes and len(self._groups) > _MIN_GROUPS:
                self._num_bytes -= self._groups.popitem(last=False)[1][0]
        with lock:
            if not group:
                group.append(read())
        return group[0]


@dataclasses.dataclass(frozen=True, eq=False)
class ParquetIndex(Index):
    """Images in row groups: `offsets` are row group numbers and `lengths` rows in them.

    `groups` are (file number, number in the file, uncompressed bytes); `column` is the
    path of the bytes column.
    """

    groups: Sequence[tuple[int, int, int]] = ()
    column: tuple[str, ...] = ()
    cache: Any = None  # RowGroups

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the bytes and the label of an image."""
        group = self.offsets.item(index)
        *place, num_bytes = self.groups[group]
        key = id(self.groups), group  # splits share the cache, and no groups
        values = self.cache.get(key, num_bytes, lambda: self._read_group(*place))
        content = values[self.lengths.item(index)].as_py()
        if content is None:
            raise ValueError("has no bytes; only images inside the file are read")
        return content, self.labels.item(index)

    def _read_group(self, file_number, number):
        names = [".".join(self.column)]
        place = self.files[file_number], self.versions[file_number]
        with _errors_of_arrow(f"row group {number} "), _opened(*place) as file:
            table = file.read_row_group(number, names, use_threads=False)
            values = table.column(0).combine_chunks()
        for name in self.column[1:]:
            values = values.field(name)
        return values

    @property
    def blocks(self) -> np.ndarray:
        """Return the row group of each image."""
        return self.offsets


def load(
    data_dir: str = "",
    columns: str = "",
    image_options: ImageOptions | None = None,
    trained: Trained | None = None,
) -> DataSet:
    """Load Parquet files with images; for arguments and errors see `data.load`."""
    options = image_options or ImageOptions()
    cache = RowGroups(1.25 * options.shuffle_buffer_mb)
    read_files = functools.partial(read, cache=cache)
    given = data_dir, columns, options, trained
    return containers.load("parquet", _NAMES, read_files, *given)


def read(
    paths: Sequence[str], columns: Mapping[str, str], inventory: Inventory, cache: Any
) -> Index:
    """Return the index of the images in files; only labels are read."""
    groups, num_rows, label_parts, versions = [], [], [], []
    label_numbers: dict[str, int] = {}
    first: Any = None
    for file_number, path in enumerate(paths):
        try:
            versions.append(reading.current_version(path))
            with _errors_of_arrow(), _opened(path, versions[-1]) as file:
                columns_here = _find_columns(file.schema_arrow, columns)
                if first is None:
                    first = columns_here
                    _describe(file.schema_arrow, first, inventory)
                if columns_here != first:
                    why = f"has other columns than {shown(paths[0])}: "
                    why += f"{columns_here.description}, not {first.description}"
                    raise ValueError(why)
                sizes, num_nulls = _group_sizes(file.metadata, first.image)
                if 0 < num_nulls == file.metadata.num_rows:
                    _refuse_paths(file, first.image[0])
                if first.label:
                    values = file.read([first.label]).column(0)
                    label_parts.append(_label_numbers(values, first, label_numbers))
        except (OSError, ValueError) as error:
            raise data_error(path, error) from error
        groups += [(file_number, i, size) for i, (_, size) in enumerate(sizes)]
        num_rows += [rows for rows, _ in sizes]
    if not sum(num_rows):
        raise DataError(f"{shown(paths[0])}: has no rows")
    group_numbers = np.repeat(np.arange(len(groups)), num_rows)
    numbers = np.array([x[0] for x in groups], np.int32)[group_numbers]
    labels = np.concatenate(label_parts or [np.full(len(numbers), -1)])
    classes = labels, first.class_names
    if not first.class_names:
        classes = settle_classes(labels, label_numbers)
    return ParquetIndex(
        paths,
        numbers,
        *classes,
        offsets=group_numbers,
        lengths=_positions(group_numbers),
        rows=_positions(numbers),
        block_bytes=sum(x[2] for x in groups) // len(groups),
        groups=groups,
        column=first.image,
        cache=cache,
        versions=versions,
    )


def _positions(numbers):
    """Return the position of each number among equal ones; they ascend."""
    return np.arange(len(numbers)) - np.searchsorted(numbers, numbers)


class _Columns(NamedTuple):
    """Path of the bytes column, label column, its type, and class names if known."""

    image: tuple[str, ...]
    label: str | None
    label_type: str
    class_names: tuple[str, ...]

    @property
    def description(self) -> str:
        """Short text for messages."""
        label = f"{self.label} ({self.label_type})" if self.label else "no labels"
        count = f" of {len(self.class_names)} classes" if self.class_names else ""
        return f"{'.'.join(self.image)} and {label}{count}"


def _find_columns(schema, columns):
    features = _features(schema)
    names = {}
    for role, kind in (("image", "Image"), ("label", "ClassLabel")):
        typed = [x for x, y in features.items() if y.get("_type") == kind]
        name = columns.get(role) or (typed[0] if len(typed) == 1 else None)
        index = find_column(role, schema.names, name, [_NAMES[role]])
        names[role] = None if index is None else schema.names[index]
    if names["image"] is None:
        error = missing_column("image", schema.names)
        raise ValueError(f"{error}; of paths, --dataset=table reads it")
    image, path = schema.field(names["image"]).type, (names["image"],)
    if types.is_struct(image) and image.get_field_index("bytes") >= 0:
        image, path = image.field("bytes").type, (*path, "bytes")
    if not (types.is_binary(image) or types.is_large_binary(image)):
        raise ValueError(f"the column {'.'.join(path)} is {image}, and not of bytes")
    label = names["label"]
    class_names = features.get(label, {}).get("names") or []
    if not isinstance(class_names, list) or {*map(type, class_names)} - {str}:
        text = f"the metadata of datasets have no texts for the classes of {label}"
        raise ValueError(f"{text}; write the file anew")
    kind = str(schema.field(label).type) if label else ""
    if re.fullmatch(r"u?int\d+", kind):  # files of one set may differ in their bits
        kind = "integers"
    return _Columns(path, label, kind, tuple(map(class_name, class_names)))


def _describe(schema, columns, inventory):
    inventory.inferred.setdefault("columns", columns.description)
    if "columns" not in inventory.unused:  # recorded for another split
        used = columns.image[0], columns.label
        inventory.leave_out("columns", *(x for x in schema.names if x not in used))
    if b"huggingface" in (schema.metadata or {}) and not _features(schema):
        inventory.leave_out("metadata", "huggingface")


def _features(schema):
    """Return column -> feature of the metadata of `datasets`, if valid."""
    try:
        about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        items = about["info"]["features"].items()
    except (ValueError, RecursionError, LookupError, AttributeError, TypeError):
        return {}
    return {name: x for name, x in items if isinstance(x, dict)}


def _group_sizes(metadata, image):
    """Return (rows, bytes of images) of each row group, and the number of nulls."""
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    column = names.index(".".join(image))
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = [(group.num_rows, group.column(column)) for group in groups]
    num_nulls = sum(getattr(x.statistics, "null_count", None) or 0 for _, x in chunks)
    return [(rows, x.total_uncompressed_size) for rows, x in chunks], num_nulls


def _refuse_paths(file, column):
    """Raise ValueError if a file without images has their paths."""
    [row] = next(file.iter_batches(1, columns=[f"{column}.path"])).to_pylist()
    if path := (row.get(column) or {}).get("path"):
        way = "docs/containers.md#parquet says how to add them"
        if os.path.exists(path):
            folder = shlex.quote(os.path.dirname(os.path.dirname(path)))
            way += f", or train on --dataset=image_folder --data_dir={folder}"
        raise ValueError(f"has paths, such as {shown(path)}, and no images; {way}")


def _label_numbers(values, columns, numbers):
    kind = values.type
    if types.is_dictionary(kind):
        values, kind = values.cast(kind.value_type), kind.value_type
    is_text = types.is_string(kind) or types.is_large_string(kind)
    is_other = types.is_boolean(kind) or types.is_floating(kind)
    is_other = is_text or (is_other and not columns.class_names)
    if not types.is_integer(kind) and not is_other:
        text = f"the column {columns.label} is {kind}, and not of integers or texts"
        raise ValueError(text)
    if columns.class_names:
        labels = values.fill_null(-1).to_numpy().astype(np.int64)
        most = len(columns.class_names) - 1
        is_wrong = (labels < -1) | (labels > most)
        if is_wrong.any():
            text = f"row {is_wrong.argmax()} has the label {labels[is_wrong][0]}"
            raise ValueError(f"{text}, expected 0 to {most}")
        return labels.astype(np.int32)
    encoded = values.combine_chunks().dictionary_encode()
    texts = [label_text(None if x == -1 else x) for x in encoded.dictionary.to_pylist()]
    new = [-1 if x is None else numbers.setdefault(x, len(numbers)) for x in texts]
    indices = encoded.indices.fill_null(len(new)).to_numpy()
    return np.array([*new, -1], np.int32)[indices]


def _opened(path, version):
    if reading.is_url(path):
        return parquet.ParquetFile(reading.open_file(path, version))
    file = parquet.ParquetFile(path, memory_map=True)
    version.require(path, reading.current_version(path))
    return file


@contextlib.contextmanager
def _errors_of_arrow(what: str = "") -> Iterator[None]:
    """Convert errors of Arrow, which have several classes, to ValueErrors."""
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{what}cannot be read: {one_line(error, 150)}") from error
