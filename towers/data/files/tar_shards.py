"""Tar files with an image and its label as neighbors, as `webdataset` writes them."""

import contextlib
import dataclasses
import functools
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from towers.data.files import containers, reading
from towers.data.files.class_folders import is_split, split_of
from towers.data.files.image_files import ImageOptions
from towers.data.files.index import Shard, label_text, read_shards
from towers.data.files.paths import is_image_name, shown
from towers.data.sources import DataSet, Trained
from towers.errors import one_line

ROLES = ("image", "label")
_LABELS = ("cls", "json", "txt")
_BLOCK = 512
_REGULAR, _LINKS = (b"0", b"\0", b"7"), (b"1", b"2")
# Kinds of members without content: links, devices, folders, FIFOs, and names of volumes
# and lists of files of GNU tar.
_EMPTY = (*_LINKS, b"3", b"4", b"5", b"6", b"V", b"N", b"D")
# How files begin that gzip, bzip2, xz and zstd wrote.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
# Labels of members that have none but their folders, for the inventory.
_BY_FOLDER = ("labels", "the folders of the images in the archive")


def load(
    data_dir: str = "",
    columns: str = "",
    image_options: ImageOptions | None = None,
    trained: Trained | None = None,
) -> DataSet:
    """Load tar files with images; arguments and errors as of `containers.load`."""
    return containers.load(
        "webdataset", ROLES, _read_files, data_dir, columns, image_options, trained
    )


def _read_files(paths, columns, inventory):
    index = read_shards(paths, columns, inventory, read)
    is_by_folder = inventory.inferred.get(_BY_FOLDER[0]) == _BY_FOLDER[1]
    if is_by_folder and len(index.class_names) == 1:  # a folder of images to predict
        inventory.inferred.pop(_BY_FOLDER[0])
        labels = np.full(len(index), -1, np.int32)
        return dataclasses.replace(index, labels=labels, class_names=())
    return index


def read(path: str, version: reading.Version, columns: Mapping[str, str]) -> Shard:
    """Return the index of the images in a tar file; headers and labels are read.

    Members whose names are equal up to the first dot of their last part are of one
    example: the image, and its label in `.cls`, `.txt` or the key `label` of `.json`.
    If that gives no label to some image, names are compared up to their last dot, or
    without their folders; if no member has labels, folders are the classes. `columns`
    are "image" and "label" -> other endings, or "json:KEY". ValueError if the file
    breaks off, is not a tar file, has two members of one name, or some of its images
    have no label.
    """
    wanted, label = columns.get("image"), columns.get("label")
    kind = label.partition(":")[0] if label else ""
    label_endings = (kind,) if kind else _LABELS
    with _reader(path, version) as (read_at, size):
        members = _resolved(_members(read_at, size))
        _require_one_split(members)
        examples, pairing = _paired(members, wanted, label_endings)
        inferred = [("names", pairing)] if pairing else []
        labels, names, used = [], [], set()
        for example in examples:
            images = [x for x in example if _is_image(x, wanted)]
            if images[1:]:
                raise ValueError(
                    f"{example[images[0]]} has two images, {' and '.join(images[:2])}; "
                    f"--columns=image:{images[0]} names one"
                )
            if images:
                names.append(example[images[0]])
                ending = next((x for x in label_endings if x in example), None)
                used |= {images[0], ending}
                text = None
                if ending is not None:
                    name = example[ending]
                    text = _label(name, label, read_at, *members[name])
                labels.append(text)
        unused = {x for example in examples for x in example} - used
    missing = [name for name, x in zip(names, labels, strict=True) if x is None]
    if names and not label and not used.intersection(label_endings):
        labels = _folders(names)
        inferred += [_BY_FOLDER] if labels[0] is not None else []
    elif missing and (len(missing) < len(names) or label):
        raise ValueError(
            f"{shown(missing[0])} has no label in {' or '.join(label_endings)}"
        )
    spans = np.array([members[name] for name in names], np.int64).reshape(-1, 2)
    endings = ", ".join(f".{x}" for x in sorted(used - {None}))
    inferred.append(("columns", f"members {endings}"))
    unused = [("kinds of members", f".{x}") for x in sorted(unused)]
    return Shard(spans[:, 0], spans[:, 1], labels, names, inferred, unused)


@contextlib.contextmanager
def _reader(path, version) -> Iterator[tuple[Callable[[int, int], bytes], int]]:
    """Yield a function (offset, length) -> bytes, and the size of the file."""
    with reading.open_file(path, version) as file:
        if reading.is_url(path):

            def read_at(offset, length):
                file.seek(offset)
                return file.read(length)

            yield read_at, version.size
        elif version.size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                yield lambda offset, n: content[offset : offset + n], version.size
        else:
            raise ValueError("the file is empty")


def _members(read_at, size):
    """Yield (name, first byte, number of bytes, None) of each regular file, and (name,
    0, 0, target) of each link: of the formats of V7, POSIX (ustar, pax) and GNU tar.

    Python's `tarfile` takes five times as long, ends in silence at a damaged header,
    and never ends at a negative size.
    """
    offset, extended = 0, {}
    while offset < size:
        header = read_at(offset, _BLOCK)
        if header.count(0) == _BLOCK:
            return
        if len(header) < _BLOCK or not _has_checksum(header):
            if header.startswith(_COMPRESSED) and not offset:
                raise ValueError("is compressed; unpack it, such as with gunzip")
            if len(header) == _BLOCK and (offset or header[257:262] == b"ustar"):
                raise ValueError(f"is damaged at byte {offset:,}, in a header")
            fault = f"breaks off at byte {offset:,}" if offset else "is not a tar file"
            raise ValueError(fault)
        name = extended.get(b"path") or header[:100].partition(b"\0")[0]
        is_ustar = header[257:263] == b"ustar\0" and b"path" not in extended
        if header[345] and is_ustar:
            name = header[345:500].partition(b"\0")[0] + b"/" + name
        kind, begin = header[156:157], offset + _BLOCK
        length = 0
        if kind not in _EMPTY:
            length = int(extended.get(b"size") or _number(header[124:136]))
        if length < 0:
            raise ValueError(f"is damaged at byte {offset:,}: a size is negative")
        offset = begin + length + -length % _BLOCK
        if offset > size:
            raise ValueError(f"breaks off in {shown(os.fsdecode(name), 60)}")
        if kind in (b"L", b"K"):  # long names, of GNU tar
            key = b"path" if kind == b"L" else b"linkpath"
            extended[key] = read_at(begin, length).partition(b"\0")[0]
        elif kind == b"x":  # long names and others, of pax
            extended |= _pax_records(read_at(begin, length))
        elif kind != b"g":
            if kind in _LINKS:
                target = extended.get(b"linkpath", header[157:257].partition(b"\0")[0])
                folder = b"" if kind == b"1" else os.path.dirname(name)
                target = os.path.normpath(os.path.join(folder, target))
                yield os.fsdecode(name), 0, 0, os.fsdecode(target)
            elif kind not in _EMPTY and not name.endswith(b"/"):
                if kind not in _REGULAR or any(b"sparse" in key for key in extended):
                    raise ValueError(
                        f"{shown(os.fsdecode(name), 60)} is sparse, or of another kind "
                        "that is not read; pack the files without --sparse"
                    )
                yield os.fsdecode(name), begin, length, None
            extended = {}
    raise ValueError("breaks off: the end of the archive is missing")


def _has_checksum(header):
    """True if the bytes of a header, spaces for the checksum, add up to it. Adler-32
    has one more than their sum, modulo 65521, in its lower half."""
    field = header[148:156]
    try:
        expected = 1 + int(field.strip(b"\0 "), 8) + sum(field) - 8 * ord(" ")
    except ValueError:
        return False
    return zlib.adler32(header) & 0xFFFF == expected % 65521


def _number(field):
    if field[0] & 0x80:  # binary, of more than 8 GiB
        return int.from_bytes(field[1:]) if field[0] == 0x80 else -1
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def _pax_records(content):
    records = {}
    while content.strip(b"\0"):
        size = int(content.split(b" ", 1)[0])
        key, _, value = content[:size].partition(b" ")[2].partition(b"=")
        if size <= 0 or not value.endswith(b"\n"):
            raise ValueError("is damaged in a header of pax")
        records[key], content = value[:-1], content[size:]
    return records


def _resolved(members):
    """Return name -> (first byte, number of bytes), of links those of their target, in
    the order of the archive. ValueError if a name stands for two files, or a link is to
    nothing in the archive."""
    spans, targets = {}, {}
    for name, begin, length, target in members:
        name = name.removeprefix("./")
        if name in spans:
            raise ValueError(
                f"has two members called {shown(name, 60)}; tar would overwrite one: "
                "unpack the archive and pack it anew"
            )
        spans[name] = begin, length
        if target is not None:
            targets[name] = target
    for name in targets:
        seen, target = {name}, targets[name]
        while target in targets and target not in seen:
            seen.add(target)
            target = targets[target]
        if target in spans and target not in targets:
            spans[name] = spans[target]
        elif os.path.splitext(name)[1]:
            raise ValueError(
                f"{shown(name, 60)} is a link to {shown(target, 60)}, which is not a "
                "file in the archive; tar --dereference packs the files themselves"
            )
        else:  # to a folder
            spans.pop(name)
    return spans


def _require_one_split(members):
    """Raise ValueError if the members are in folders of several splits."""
    folders = [x.split("/") for x in {name.rpartition("/")[0] for name in members}]
    names = {part for folder in folders for part in folder[:-1]}
    last = {folder[-1] for folder in folders}
    names |= last if all(map(split_of, last)) else {*filter(is_split, last)}
    splits = {split: name for name in sorted(names) if (split := split_of(name))}
    if len(splits) > 1:
        both = " and ".join(f"{name}/" for name in list(splits.values())[:2])
        raise ValueError(
            f"has the folders {both}; unpack it and give --data_dir the folder, or "
            "pack an archive for each split"
        )


def _paired(members, wanted, label_endings):
    """Return the examples, ending -> name of a member, by the first rule that gives
    each image one label, and what is special about the rule; by the first rule if none
    does."""
    first = _examples(members, str.partition, True)
    for cut, with_folder, text in (
        (str.partition, True, ""),
        (str.rpartition, True, "are paired up to their last dot"),
        (str.partition, False, "are paired in any folder"),
        (str.rpartition, False, "are paired up to their last dot, in any folder"),
    ):
        with contextlib.suppress(ValueError):
            examples = _examples(members, cut, with_folder) if text else first
            images = [sum(_is_image(x, wanted) for x in each) for each in examples]
            pairs = sum(
                count == 1 and any(x in each for x in label_endings)
                for count, each in zip(images, examples, strict=True)
            )
            if pairs and pairs == sum(images):
                return examples, text
    return first, ""


def _examples(members, cut, with_folder):
    """Return ending -> name of a member, of each example. ValueError if two members
    have one ending."""
    examples = {}
    for name in members:
        folder, _, base = name.rpartition("/")
        stem, _, ending = cut(base, ".")
        if not stem or not ending or base[0] == ".":
            continue
        example = examples.setdefault((folder if with_folder else "", stem), {})
        if (other := example.setdefault(ending.lower(), name)) != name:
            raise ValueError(f"{shown(name, 60)} and {shown(other, 60)} are one member")
    return list(examples.values())


def _folders(names):
    """Return the folder that each image is in, as its class; None if some are in no
    folder. ValueError if one has two readings."""
    folders = dict.fromkeys(name.rpartition("/")[0] for name in names)
    classes = {folder: folder.rpartition("/")[2] for folder in folders}
    if "" in classes.values() or any(map(is_split, classes.values())):
        return [None] * len(names)
    by_class = {}
    for folder, name in classes.items():
        if (other := by_class.setdefault(name, folder)) != folder:
            raise ValueError(
                f"{shown(other, 60)} and {shown(folder, 60)}: is {shown(name, 40)} the "
                "class, or the folder above? Unpack it and use --dataset=image_folder"
            )
    return [classes[name.rpartition("/")[0]] for name in names]


@functools.lru_cache(100)
def _is_image(ending, wanted):
    return ending == wanted if wanted else is_image_name(f"x.{ending}")


def _label(name, wanted, read_at, begin, length):
    """Return the text of a label; None for an empty one."""
    try:
        content = read_at(begin, length).decode()
        if not name.lower().endswith(".json"):
            return label_text(content)
        values = json.loads(content)
        if not isinstance(values, dict):
            raise ValueError("is not an object {...}")
        key = (wanted or "").partition(":")[2] or "label"
        if key not in values:
            keys = shown(", ".join(values), 100)
            raise ValueError(
                f"has no key {key}, only {keys}; --columns=label:json:KEY names it"
            )
        return label_text(values[key])
    except RecursionError:
        raise ValueError(f"{shown(name, 60)} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{shown(name, 60)}: {one_line(error, 200)}") from error
