"""Images as ranges of bytes in files, the form in which all containers are read."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from towers import store
from towers.config.choices import MAX_IMAGE_PIXELS
from towers.data.files import byte_cache, reading
from towers.data.files.paths import class_name, reason
from towers.data.inventory import Inventory
from towers.data.streams import call_in_readers
from towers.errors import DataError, TowersError, did_you_mean, with_nearest
from towers.messages import shown

FORMAT = 4  # version of the cached arrays of a shard


class Names(Sequence):
    """A compact sequence of texts: one buffer, each text followed by a zero byte."""

    def __init__(self, content: bytes, folder: str = ""):
        self.folder, self.content = folder, content
        self._ends = np.flatnonzero(np.frombuffer(self.content, np.uint8) == 0)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """Return the texts as Names."""
        return cls(b"".join(os.fsencode(f"{text}\0") for text in texts))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        begin = self._ends[index - 1] + 1 if index else 0
        name = os.fsdecode(self.content[begin : self._ends[index]])
        return os.path.join(self.folder, name)


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """Images in files with their labels; implements `ImageFiles`.

    Image i lies in `files[numbers[i]]` at `offsets` and `lengths`, int64 [n]; without
    offsets each file is one image. `versions` are those of the indexed files; reading
    another version fails. `labels` are int32 [n], or uint8 [n, classes] for label sets.
    `sample_weights` are float32 [n]. `rows`, int64 [n], index `names`, or are numbers
    within the file. `max_pixels` bounds the size of a file that is one image, and
    `block_bytes` is the mean size of a block.
    """

    files: Sequence[str]
    numbers: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    offsets: Any = None
    lengths: Any = None
    sample_weights: np.ndarray | None = None
    names: Sequence[str] | None = None
    rows: np.ndarray | None = None
    max_pixels: int = MAX_IMAGE_PIXELS
    versions: Sequence[reading.Version] = ()
    block_bytes: int = reading.BLOCK_BYTES

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the bytes and the label of an image."""
        number = self.numbers.item(index)
        file, label = self.files[number], 0
        if self.labels.ndim == 1:
            label = self.labels.item(index)
        if self.offsets is None:
            return reading.read_image_file(file, self.max_pixels), label
        span = self.offsets.item(index), self.lengths.item(index)
        try:
            return reading.read_range(file, *span, self.versions[number]), label
        except OSError as error:  # concerns the whole file
            raise data_error(file, error) from error

    def location(self, index: int) -> str:
        """Return where an image is stored, for messages."""
        file = self.files[self.numbers[index]]
        if self.rows is None:
            return file
        if self.names is not None:
            return f"{file}: {self.names[self.rows[index]]}"
        return f"{file}: image {self.rows[index]} (counted from 0)"

    def checksum(self) -> int:
        """Return a checksum of labels, file names and positions."""
        labels = self.labels.astype("u1" if self.labels.ndim == 2 else "<i4")
        numbers = self.numbers if self.offsets is None else np.unique(self.numbers)
        names = "\0".join(os.path.basename(self.files[x]) for x in numbers)
        crc = zlib.crc32(os.fsencode(names), zlib.crc32(labels.tobytes()))
        for values in (self.offsets, self.rows, self.sample_weights):
            crc = crc if values is None else zlib.crc32(values.tobytes(), crc)
        return crc

    @property
    def blocks(self) -> np.ndarray | None:
        """Return the block number of each image, int64 [n]; None for local files."""
        if self.offsets is None or not any(map(reading.is_url, self.files)):
            return None
        most = int(self.offsets.max(initial=0)) // reading.BLOCK_BYTES + 1
        return self.numbers * most + self.offsets // reading.BLOCK_BYTES

    def with_classes(self, class_names: tuple[str, ...], where: str) -> Self:
        """Return the index with these classes; DataError if it has others."""
        numbers = {name: number for number, name in enumerate(class_names)}
        new = np.array([numbers.get(x, -1) for x in self.class_names] or [0], np.int32)
        is_known = new >= 0
        if self.labels.ndim == 2:
            labels = np.zeros([len(self), len(class_names)], np.uint8)
            labels[:, new[is_known]] = self.labels[:, is_known]
            is_wrong = self.labels[:, ~is_known].any(1)
        else:
            labels = np.where(self.labels < 0, -1, new[self.labels])
            is_wrong = (labels < 0) & (self.labels >= 0)
        if is_wrong.any():
            index = int(is_wrong.argmax())
            own = self.labels[index]
            number = own if own.ndim == 0 else (own * ~is_known).argmax()
            name = self.class_names[number]
            why = f"has the class {shown(name, 40)}, which is not in {where}; "
            why += did_you_mean(name, class_names)
            why += f"it has {shown(', '.join(class_names[:20]), 100)}"
            raise DataError(f"{shown(self.location(index))}: {why}")
        return dataclasses.replace(self, labels=labels, class_names=tuple(class_names))

    def as_label_sets(self) -> Self:
        """Return the index with label sets of one label each."""
        if self.labels.ndim == 2:
            return self
        numbers = np.arange(len(self.class_names))
        labels = (self.labels[:, np.newaxis] == numbers).astype(np.uint8)
        return dataclasses.replace(self, labels=labels)


def index_of(
    files: Sequence[str],
    labels: Sequence[Hashable],
    sample_weights: Sequence[float] | None = None,
    max_pixels: int = MAX_IMAGE_PIXELS,
    class_names: Sequence[str] = (),
) -> Index:
    """Return the index of files that are one image each."""
    numbers, names = _numbered(labels)
    if any(isinstance(name, tuple) for name in names):
        numbers, classes = _label_sets(numbers, names, class_names)
    else:
        numbers, classes = settle_classes(numbers, names)
    weights = None if sample_weights is None else np.array(sample_weights, np.float32)
    return Index(
        Names.of(files),
        np.arange(len(files), dtype=np.int32),
        numbers,
        classes,
        sample_weights=weights,
        max_pixels=max_pixels,
    )


def _numbered(labels):
    names = [name for name in dict.fromkeys(labels) if name is not None]
    numbers = {name: number for number, name in enumerate(names)} | {None: -1}
    return np.array([numbers[label] for label in labels], np.int64), names


def find_column(
    role: str,
    header: Sequence[str],
    name: str | None,
    patterns: Sequence[str] = (),
    taken: Iterable[int] = (),
) -> int | None:
    """Return the index of a column by its name, or else by the first matching pattern.

    Names are normalized for patterns: lower case, underscores for spaces.
    """
    if name:
        if name not in header:
            listed = shown(", ".join(map(str, header)), 100)
            message = f"has no column {name!r}, only {listed}"
            raise ValueError(with_nearest(message, name, header))
        return header.index(name)
    plain = [str(x).strip().lower().replace(" ", "_").replace("-", "_") for x in header]
    for pattern in patterns:
        matching = (i for i, x in enumerate(plain) if re.fullmatch(pattern, x))
        fitting = [i for i in matching if i not in taken]
        if fitting[1:]:
            raise ambiguous_column(role, [header[i] for i in fitting])
        if fitting:
            return fitting[0]
    return None


def ambiguous_column(role: str, names: Sequence[str]) -> ValueError:
    """Return the error about two columns that may have a role."""
    text = f"ambiguous {role} column: {names[0]} or {names[1]}"
    return ValueError(f"{text}; choose one with --columns={role}:{names[0]}")


def missing_column(role: str, header: Sequence[str]) -> ValueError:
    """Return the error about a role that no column has."""
    text = f"no {role} column found among {shown(', '.join(header), 100)}"
    return ValueError(f"{text}; choose one with --columns={role}:NAME")


def sorted_classes(names: Iterable[str]) -> tuple[str, ...]:
    """Sort class names: by value if all are integers, else as text."""
    names = list(names)
    is_number = all(re.fullmatch(r"0|-?[1-9]\d*", name) for name in names)
    return tuple(sorted(names, key=int if is_number else str))


def settle_classes(
    labels: np.ndarray, names: Iterable[str]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels and class names from numbered names; -1 is unlabeled."""
    names = list(map(class_name, names))
    classes = sorted_classes(set(names))
    order = {name: number for number, name in enumerate(classes)}
    new = np.array([order[name] for name in names] or [0], np.int32)
    return np.where(labels < 0, -1, new[labels]).astype(np.int32), classes


def _label_sets(numbers, names, class_names):
    classes = tuple(map(class_name, class_names))
    order = {name: number for number, name in enumerate(classes)}
    sets = np.zeros([len(names), len(classes)], np.uint8)
    for row, each in zip(sets, names, strict=True):
        row[[order[class_name(name)] for name in each]] = 1
    return sets[numbers], classes


# Missing values as programs write them, in lower case.
_MISSING = ("nan", "-nan", "na", "n/a", "#n/a", "<na>", "none", "null")


def label_text(value: Any) -> str | None:
    """Return a label as text, None if empty; ValueError for missing values."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = "" if value is None or value != value else str(value).strip()
    if not isinstance(value, str | int | None) and text:
        expected = "expected a name or an integer"
        raise ValueError(f"{shown(text, 40)} is not a label: {expected}")
    if text[:1] == "[" and text[-1:] == "]":
        why = f"{shown(text, 40)} is a list written as a text"
        raise ValueError(f"{why}; write its names with ; between them")
    if text.lower() in _MISSING:
        way = "Leave the image out, or rename the class"
        raise ValueError(f"is {text} a missing label, or a class? {way}")
    return text or None


def data_error(path: str, error: Exception) -> TowersError:
    """Return the error to raise for a container that cannot be read."""
    if isinstance(error, TowersError):
        return error
    text = reason(error)
    with contextlib.suppress(OSError), reading.open_file(path) as file:
        text = reading.LFS_HINT if file.read(len(reading.LFS)) == reading.LFS else text
    return DataError(f"{shown(path)}: {text}")


class Shard(NamedTuple):
    """Images of one file, and (heading, text) and (kind, name) for the inventory."""

    offsets: np.ndarray
    lengths: np.ndarray
    labels: list[str | None]
    names: list[str] | None = None
    inferred: Sequence[tuple[str, str]] = ()
    unused: Sequence[tuple[str, str]] = ()


def read_shards(
    paths: Sequence[str],
    columns: Mapping[str, str],
    inventory: Inventory,
    read: Callable[[str, reading.Version, Mapping[str, str]], Shard],
) -> Index:
    """Return the images of several files; the index of each is cached on disk."""
    shards: list[Any] = [None] * len(paths)
    versions: list[Any] = [None] * len(paths)

    def read_one(number):
        path = paths[number]

        def make():
            arrays = _arrays(read(path, version, columns))
            version.require(path, reading.current_version(path))
            return arrays

        try:
            version = versions[number] = reading.current_version(path)
            place = path if reading.is_url(path) else os.path.realpath(path)
            key = f"{FORMAT} {read.__module__} {columns} {place} {version[:3]}"
            shards[number] = _cached_arrays(key, make)
        except (OSError, ValueError, RecursionError) as error:
            raise data_error(path, error) from error

    call_in_readers(read_one, len(paths))
    counts = [len(x["offsets"]) for x in shards]
    for path, count in zip(paths, counts, strict=True):
        if not count:
            raise DataError(f"{shown(path)}: has no images")
    about = [json.loads(shard["about"].tobytes()) for shard in shards]
    inferred = dict.fromkeys((*x,) for each in about for x in each["inferred"])
    for heading in dict.fromkeys(x for x, _ in inferred):
        text = " or ".join(y for x, y in inferred if x == heading)
        inventory.inferred.setdefault(heading, text)  # the first split is for training
    known = {*inventory.unused}  # recorded for another split
    for kind, name in dict.fromkeys((*x,) for each in about for x in each["unused"]):
        if kind not in known:
            inventory.leave_out(kind, name)
    numbers: dict[str, int] = {}
    labels = []
    for shard in shards:
        texts = shard["classes"].tobytes().decode().split("\0")[:-1]
        new = np.array([*(numbers.setdefault(x, len(numbers)) for x in texts), -1])
        labels.append(new[shard["labels"]])
    buffers = [shard["names"].tobytes() for shard in shards]
    is_named = all(buffers)
    rows = [np.arange(sum(counts))] if is_named else map(np.arange, counts)
    return Index(
        paths,
        np.repeat(np.arange(len(paths), dtype=np.int32), counts),
        *settle_classes(np.concatenate(labels), numbers),
        offsets=np.concatenate([shard["offsets"] for shard in shards]),
        lengths=np.concatenate([shard["lengths"] for shard in shards]),
        names=Names(b"".join(buffers)) if is_named else None,
        rows=np.concatenate(list(rows)),
        versions=versions,
    )


def _arrays(shard):
    labels, classes = _numbered(shard.labels)
    about = {"inferred": shard.inferred, "unused": shard.unused}

    def joined(names):
        return np.frombuffer(Names.of(names).content, np.uint8)

    return {
        "offsets": shard.offsets,
        "lengths": shard.lengths,
        "labels": labels,
        "classes": joined(classes),
        "names": joined(shard.names or ()),
        "about": np.frombuffer(json.dumps(about).encode(), np.uint8),
    }


def _cached_arrays(key, make):
    name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
    path = os.path.join(byte_cache.folder(), "index", f"{name}.npz")
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        arrays = make()
    with contextlib.suppress(OSError):  # then it is made again
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with store.aside(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **arrays)
    return arrays
