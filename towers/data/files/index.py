"""Images as ranges of bytes in files, the form in which all containers are read."""

import contextlib
import dataclasses
import hashlib
import itertools
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
from towers.data.files import reading
from towers.data.files.paths import class_name, reason
from towers.data.inventory import Inventory
from towers.data.streams import call_in_readers
from towers.errors import DataError, TowersError, nearest, with_nearest
from towers.messages import shown

FORMAT = 3  # of the cached arrays of a shard


class Names(Sequence):
    """Texts in one buffer, each followed by a zero byte; as Python's strings they would
    take four times the memory. `folder` precedes each.
    """

    def __init__(self, content: bytes, folder: str = ""):
        self.folder, self.content = folder, content
        self._ends = np.flatnonzero(np.frombuffer(self.content, np.uint8) == 0)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        """The texts in their order."""
        return cls(b"".join(os.fsencode(f"{text}\0") for text in texts))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        begin = self._ends[index - 1] + 1 if index else 0
        name = os.fsdecode(self.content[begin : self._ends[index]])
        return os.path.join(self.folder, name)


@dataclasses.dataclass(frozen=True, eq=False)
class Index:
    """Images of files, with their labels; an `ImageFiles`.

    Image i is in `files[numbers[i]]`, at `offsets` and of `lengths`, int64 [n]; None
    if a file is one image; else `versions` has the version of each file that was
    indexed, and another is not read. `labels` are int32 [n], or of label sets uint8 [n,
    classes]; `sample_weights`, float32 [n], are factors on the losses. `rows`, int64
    [n], of images inside of files, are indices of `names`, or numbers in the file where
    there are no names. `max_pixels` bounds the size of a file that is one image.
    """

    files: Sequence[str]
    numbers: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    offsets: np.ndarray | None = None
    lengths: np.ndarray | None = None
    sample_weights: np.ndarray | None = None
    names: Sequence[str] | None = None
    rows: np.ndarray | None = None
    max_pixels: int = MAX_IMAGE_PIXELS
    versions: Sequence[reading.Version] = ()

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, index: int) -> tuple[bytes, int]:
        file, label = self.files[self.numbers[index]], 0
        if self.labels.ndim == 1:
            label = int(self.labels[index])
        if self.offsets is None:
            return reading.read_image_file(file, self.max_pixels), label
        span = int(self.offsets[index]), int(self.lengths[index])
        version = self.versions[self.numbers[index]]
        try:
            return reading.read_range(file, *span, version), label
        except OSError as error:  # not of one image
            raise data_error(file, error) from error

    def location(self, index: int) -> str:
        file = self.files[self.numbers[index]]
        if self.rows is None:
            return file
        if self.names is not None:
            return f"{file}: {self.names[self.rows[index]]}"
        return f"{file}: image {self.rows[index]} (counted from 0)"

    def checksum(self) -> int:
        """Checksum of the labels and names of the files, and the positions in them."""
        is_set = self.labels.ndim == 2
        crc = zlib.crc32(np.ascontiguousarray(self.labels, "u1" if is_set else "<i4"))
        numbers = self.numbers if self.offsets is None else np.unique(self.numbers)
        names = "\0".join(os.path.basename(self.files[x]) for x in numbers)
        crc = zlib.crc32(names.encode(errors="surrogateescape"), crc)
        for values in (self.offsets, self.rows, self.sample_weights):
            if values is not None:
                crc = zlib.crc32(np.ascontiguousarray(values), crc)
        return crc

    @property
    def blocks(self) -> np.ndarray | None:
        """int64 [n], the numbers of the pieces that are read as a whole, in ascending
        order; None where each image is read by itself.
        """
        if self.offsets is None or not any(map(reading.is_url, self.files)):
            return None
        most = int(self.offsets.max(initial=0)) // reading.BLOCK_BYTES + 1
        return self.numbers * most + self.offsets // reading.BLOCK_BYTES

    @property
    def block_bytes(self) -> int:
        """Mean size of a block in memory, or on the disk."""
        return reading.BLOCK_BYTES

    def take(self, indices: np.ndarray) -> Self:
        """The images with some indices."""
        per_image = "numbers", "labels", "offsets", "lengths", "sample_weights", "rows"
        values = {name: getattr(self, name) for name in per_image}
        return dataclasses.replace(
            self, **{k: x[indices] for k, x in values.items() if x is not None}
        )

    def with_classes(self, class_names: tuple[str, ...], where: str) -> Self:
        """The labels in the order of these classes; DataError where an image is of
        another class.
        """
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
        for index in np.flatnonzero(is_wrong)[:1]:
            own = self.labels[index]
            number = own if own.ndim == 0 else (own * ~is_known).argmax()
            name = self.class_names[number]
            raise DataError(
                f"{shown(self.location(index))}: has the class {shown(name, 40)}, and "
                f"there is no such class in {where}; {nearest(name, class_names)}"
                f"it has {shown(', '.join(class_names[:20]), 100)}"
            )
        return dataclasses.replace(self, labels=labels, class_names=tuple(class_names))

    def as_label_sets(self) -> Self:
        """The same images with label sets: labels become sets of one."""
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
    settle: Callable[[np.ndarray, Iterable[str]], dict] | None = None,
) -> Index:
    """Files that are one image each; `settle` is by default `settle_classes`."""
    return Index(
        Names.of(files),
        np.arange(len(files), dtype=np.int32),
        sample_weights=sample_weights and np.array(sample_weights, np.float32),
        max_pixels=max_pixels,
        **(settle or settle_classes)(*_numbered(labels)),
    )


def _numbered(labels):
    """int64 [n]: the number of each label, -1 without one; and the numbered names."""
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
    """The index of a column by its name, or of the only one that is not taken and fits
    the first of the patterns that any fits; None without. Patterns are compared with
    lower case, and underscores for spaces. ValueError where it is missing or
    ambiguous.
    """
    if name:
        if name not in header:
            listed = shown(", ".join(map(str, header)), 100)
            message = f"has no column {name!r}, only {listed}"
            raise ValueError(with_nearest(message, name, header))
        return header.index(name)
    plain = [str(x).strip().lower().replace(" ", "_").replace("-", "_") for x in header]
    for pattern in patterns:
        fitting = [i for i, x in enumerate(plain) if re.fullmatch(pattern, x)]
        fitting = [i for i in fitting if i not in taken]
        if fitting[1:]:
            names = " or ".join(header[i] for i in fitting[:2])
            raise ValueError(
                f"is the {role} in column {names}? --columns={role}:"
                f"{header[fitting[0]]} names it"
            )
        if fitting:
            return fitting[0]
    return None


def sorted_classes(names: Iterable[str]) -> tuple[str, ...]:
    """Names of classes in the order of their labels: integers by value, others as
    texts.
    """
    names = list(names)
    is_number = all(re.fullmatch(r"0|-?[1-9]\d*", name) for name in names)
    return tuple(sorted(names, key=int if is_number else str))


def settle_classes(labels: np.ndarray, names: Iterable[str]) -> dict:
    """`labels` and `class_names` of an Index, from integers [n], -1 without a label,
    and the names that they number.
    """
    names = list(map(class_name, names))
    classes = sorted_classes(set(names))
    order = {name: number for number, name in enumerate(classes)}
    new = np.array([order[name] for name in names] or [0], np.int32)
    labels = np.where(labels < 0, -1, new[labels]).astype(np.int32)
    return {"labels": labels, "class_names": classes}


def settle_label_sets(
    labels: np.ndarray,
    names: Iterable[tuple[str, ...]],
    class_names: Sequence[str] = (),
) -> dict:
    """As `settle_classes`, of tuples of names; the classes are by default those in the
    tuples.
    """
    names = [tuple(map(class_name, each)) for each in names]
    classes = tuple(map(class_name, class_names))
    classes = classes or sorted_classes(set(itertools.chain(*names)))
    order = {name: number for number, name in enumerate(classes)}
    sets = np.zeros([len(names), len(classes)], np.uint8)
    for row, each in zip(sets, names, strict=True):
        row[[order[name] for name in each]] = 1
    return {"labels": sets[labels], "class_names": classes}


# Texts that programs write for a missing value, in lower case.
_MISSING = ("nan", "-nan", "na", "n/a", "#n/a", "<na>", "none", "null")


def label_text(value: Any) -> str | None:
    """Return the name of the class that a value means, or None for an empty one;
    ValueError if it is not a label, or a text that programs write for a missing
    value.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = "" if value is None or value != value else str(value).strip()
    if not isinstance(value, str | int | None) and text:
        raise ValueError(
            f"{shown(text, 40)} is not a label: expected a name or an integer"
        )
    if text[:1] == "[" and text[-1:] == "]":
        raise ValueError(
            f"{shown(text, 40)} is a list written as a text; write its names with ; "
            "between them"
        )
    if text.lower() in _MISSING:
        raise ValueError(
            f"is {text} a missing label, or a class? Leave the image out, or rename "
            "the class"
        )
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
    """The images of one file.

    Offsets and lengths are int64 [n]; labels [n], None without one; names inside of the
    file [n], None if they are numbered. `inferred` and `unused` are for the inventory:
    (heading, text) and (kind, name).
    """

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
    """Return the images of files, in their order. `read` reads each once, and its index
    is kept in `reading.cache_folder` until the file changes; DataError if one cannot be
    read.
    """
    shards, versions = [None] * len(paths), [None] * len(paths)

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
    for heading in {x: 0 for each in about for x, _ in each["inferred"]}:
        texts = {y: 0 for each in about for x, y in each["inferred"] if x == heading}
        inventory.infer(heading, " or ".join(texts))
    known = {*inventory.unused}  # of another split
    for kind, name in {(*x,): 0 for each in about for x in each["unused"]}:
        if kind not in known:
            inventory.leave_out(kind, name)
    texts = [x["classes"].tobytes().decode().split("\0")[:-1] for x in shards]
    names = list(dict.fromkeys(itertools.chain(*texts)))
    numbers = {name: number for number, name in enumerate(names)}
    labels = []
    for shard, classes in zip(shards, texts, strict=True):
        new = np.array([*(numbers[x] for x in classes), -1])
        labels.append(new[shard["labels"]])
    joined = {x: np.concatenate([s[x] for s in shards]) for x in ("offsets", "lengths")}
    buffers = [shard["names"].tobytes() for shard in shards]
    is_named = all(buffers)
    rows = [np.arange(sum(counts))] if is_named else map(np.arange, counts)
    return Index(
        paths,
        np.repeat(np.arange(len(paths), dtype=np.int32), counts),
        **settle_classes(np.concatenate(labels), names),
        **joined,
        names=Names(b"".join(buffers)) if is_named else None,
        rows=np.concatenate(list(rows)),
        versions=versions,
    )


def _arrays(shard):
    """A shard as arrays; names of classes and images are texts that end with zero."""
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
    """Arrays that are made once, and then read from the cache."""
    name = hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]
    path = os.path.join(reading.cache_folder(), "index", f"{name}.npz")
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        arrays = make()
    with contextlib.suppress(OSError):  # it is made again
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with store.aside(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **arrays)
    return arrays
