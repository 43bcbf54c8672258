"""Tar files with images and labels as members, as `webdataset` writes them."""

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
from towers.data.files.index import Shard, label_text, read_shards
from towers.data.files.paths import is_image_name
from towers.messages import one_line, shown

ROLES = ("image", "label")
_LABELS = ("cls", "json", "txt")
_BLOCK = 512
_REGULAR, _LINKS = {b"0", b"\0", b"7"}, {b"1", b"2"}
# Members without content: links, devices, folders and FIFOs.
_EMPTY = {*_LINKS, b"3", b"4", b"5", b"6"}
# First bytes of gzip, bzip2, xz and zstd files.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
# The stem of an example's names: its end, whether it has the folder, a note for users.
_RULES = (
    (str.partition, True, ""),
    (str.rpartition, True, "are paired up to their last dot"),
    (str.partition, False, "are paired in any folder"),
)


def _read_files(paths, columns, inventory):
    index = read_shards(paths, columns, inventory, read)
    if len(index.class_names) == 1 and inventory.inferred.pop("labels", None):
        labels = np.full(len(index), -1, np.int32)  # a folder of images to predict
        return dataclasses.replace(index, labels=labels, class_names=())
    return index


def read(path: str, version: reading.Version, columns: Mapping[str, str]) -> Shard:
    """Return the index of the images in a tar file.

    An example is an image and its label in `.cls`, `.txt` or the key `label` of
    `.json`, paired by the first of `_RULES` that labels every image. Without label
    members, folders are classes. `columns` are "image" and "label" -> other endings, or
    "json:KEY".
    """
    label = columns.get("label", "")
    kind, _, key = label.partition(":")
    endings = (kind,) if kind else _LABELS
    with _reader(path, version) as (read_at, size):
        members = _resolved(_members(read_at, size))
        _require_one_split(members)
        images, label_names, used, unused, inferred = _paired(
            members, columns.get("image"), endings
        )
        labels = [
            name and _label(name, key or "label", read_at(*members[name]))
            for name in label_names
        ]
    if images and not label and not any(label_names):
        labels = _folders(images)
        inferred += [("labels", "the folders of the images")] if labels[0] else []
    elif None in labels and (label or any(labels)):
        name = shown(images[labels.index(None)])
        raise ValueError(f"{name} has no label in {' or '.join(endings)}")
    spans = np.array([members[x] for x in images], np.int64).reshape(-1, 2)
    inferred.append(("columns", "members " + ", ".join(f".{x}" for x in sorted(used))))
    unused = [("kinds of members", f".{x}") for x in sorted(unused)]
    lost = members.keys() - {*images, *label_names}
    lost = sorted(x for x in lost if x.lower().endswith(tuple(used)))
    unused += [("labels without an image", x) for x in lost]
    return Shard(spans[:, 0], spans[:, 1], labels, images, inferred, unused)


load = functools.partial(containers.load, "webdataset", ROLES, _read_files)


@contextlib.contextmanager
def _reader(path, version) -> Iterator[tuple[Callable[[int, int], bytes], int]]:
    """Yield a function (offset, length) -> bytes, and the size of the file."""
    with reading.open_file(path, version) as file:
        if reading.is_url(path):

            def read_at(offset, length):
                file.seek(offset)
                return file.read(length)

            yield read_at, version.size
        elif version.size:  # half the time of reads
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                yield lambda offset, n: content[offset : offset + n], version.size
        else:
            raise ValueError("the file is empty")


def _members(read_at, size):
    """Yield (name, offset, length, None) of files and (name, 0, 0, target) of links.

    `tarfile` takes eight times as long, ends silently at a damaged header, and loops
    forever on a negative size.
    """
    offset, extended = 0, {}
    while offset < size:
        header = read_at(offset, _BLOCK)
        if not header[0] and header.count(0) == _BLOCK:
            return
        adler_32 = zlib.adler32(header) & 0xFFFF
        if len(header) < _BLOCK or adler_32 != _adler_32(header[148:156]):
            if header.startswith(_COMPRESSED) and not offset:
                raise ValueError("is compressed; unpack it, such as with gunzip")
            if not offset and header[257:262] != b"ustar":
                raise ValueError("is not a tar file")
            raise ValueError(f"is damaged at byte {offset:,}, or breaks off")
        name = header[:100].partition(b"\0")[0]
        if header[345] and header[257:263] == b"ustar\0":
            name = header[345:500].partition(b"\0")[0] + b"/" + name
        kind, begin = header[156:157], offset + _BLOCK
        length = 0 if kind in _EMPTY else _number(header[124:136])
        if extended:
            name = extended.get(b"path", name)
            length = int(extended.get(b"size", length))
        if length < 0:
            raise ValueError(f"is damaged at byte {offset:,}: a size is negative")
        offset = begin + length + -length % _BLOCK
        text = name.decode("utf-8", "surrogateescape")
        if offset > size:
            raise ValueError(f"breaks off in {shown(text, 60)}")
        if kind in b"LKxg":
            content = read_at(begin, length)
            if kind == b"x":  # pax
                extended |= _pax_records(content)
            elif kind != b"g":  # GNU tar
                key = b"path" if kind == b"L" else b"linkpath"
                extended[key] = content.partition(b"\0")[0]
            continue
        if kind in _LINKS:
            target = extended.get(b"linkpath", header[157:257].partition(b"\0")[0])
            folder = b"" if kind == b"1" else os.path.dirname(name)
            target = os.path.normpath(os.path.join(folder, target))
            yield text, 0, 0, os.fsdecode(target)
        elif kind not in _EMPTY and not name.endswith(b"/"):
            if kind not in _REGULAR or b"sparse" in extended:
                problem = f"{shown(text, 60)} is sparse, or of a kind that is not read"
                raise ValueError(f"{problem}; pack the files without --sparse")
            yield text, begin, length, None
        extended = {}
    raise ValueError("breaks off: the end of the archive is missing")


@functools.lru_cache
def _adler_32(field):
    """Return the low half of Adler-32 of a header, from its field with a plain sum.

    Python's `sum` of the header takes ten times as long.
    """
    try:
        return (1 + int(field.strip(b"\0 "), 8) + sum(field) - 8 * ord(" ")) % 65521
    except ValueError:
        return None


@functools.lru_cache
def _number(field):
    if field[0] & 0x80:  # binary, of more than 8 GiB
        return int.from_bytes(field[1:]) if field[0] == 0x80 else -1
    return int(field.partition(b"\0")[0] or b"0", 8)


def _pax_records(content):
    records = {}
    while content.strip(b"\0"):
        size = int(content.split(b" ", 1)[0])
        key, _, value = content[:size].partition(b" ")[2].partition(b"=")
        if size <= 0 or not value.endswith(b"\n"):
            raise ValueError("is damaged in a header of pax")
        records[b"sparse" if b"sparse" in key else key] = value[:-1] or b"1"
        content = content[size:]
    return records


def _resolved(members):
    """Return name -> (offset, length), with links resolved."""
    spans, targets = {}, {}
    for full_name, begin, length, target in members:
        name = full_name.removeprefix("./")
        if name in spans:
            text = f"has two members called {shown(name, 60)}; tar would overwrite one"
            raise ValueError(f"{text}: unpack the archive and pack it anew")
        spans[name] = begin, length
        if target is not None:
            targets[name] = target
    for name, target in targets.items():
        if target in spans and target not in targets:
            spans[name] = spans[target]
        elif os.path.splitext(name)[1]:
            why = f"{shown(name, 60)} is a link to {shown(target, 60)}, not in the file"
            raise ValueError(f"{why}; tar --dereference packs the files themselves")
        else:  # to a folder
            spans.pop(name)
    return spans


def _require_one_split(members):
    folders = sorted({name.rpartition("/")[0] for name in members})
    splits = {split_of(folder): folder for folder in folders}
    if None in splits:  # names such as steam_train are not those of splits
        names = {name for folder in folders for name in folder.split("/")}
        splits = {split_of(name): name for name in sorted(names) if is_split(name)}
    if len(splits) > 1:
        both = " and ".join(f"{name}/" for name in list(splits.values())[:2])
        way = "unpack it and give the folder, or pack an archive for each split"
        raise ValueError(f"has the folders {both}; {way}")


def _paired(names, wanted, label_endings):
    """Return image names, label names, used and unused endings, and a note."""
    for cut, with_folder, text in _RULES:
        with contextlib.suppress(ValueError):
            pairs = _pairs(names, wanted, label_endings, cut, with_folder)
            if pairs[0] and None not in pairs[1]:
                return *pairs, [("names", text)] if text else []
    return *_pairs(names, wanted, label_endings, *_RULES[0][:2]), []


def _pairs(names, wanted, label_endings, cut, with_folder):
    members, images = {}, {}  # (stem, ending) -> name, and stem -> ending
    for name in names:
        folder, _, base = name.rpartition("/")
        stem, _, ending = cut(base, ".")
        if stem and ending and base[0] != ".":
            place = f"{folder}/{stem}" if with_folder else stem, ending.lower()
            if (other := members.setdefault(place, name)) is not name:
                both = f"{shown(name, 60)} and {shown(other, 60)}"
                raise ValueError(f"{both} are one member")
    endings = {ending for _, ending in members}
    is_image = {x: x == wanted if wanted else is_image_name(f"x.{x}") for x in endings}
    for (stem, ending), name in members.items():
        if is_image[ending] and (other := images.setdefault(stem, ending)) != ending:
            both = f"{name} has two images, {other} and {ending}"
            raise ValueError(f"{both}; --columns=image:{other} names one")
    labels = [next((x for x in label_endings if (y, x) in members), 0) for y in images]
    label_names = [members.get(x) for x in zip(images, labels, strict=True)]
    used = {*images.values(), *labels} - {0}
    return [members[x] for x in images.items()], label_names, used, endings - used


def _folders(names):
    """Return the class folder of each image, or Nones if there are no class folders."""
    folders = sorted({name.rpartition("/")[0] for name in names})
    by_class = {folder.rpartition("/")[2]: folder for folder in folders}
    if "" in by_class or any(map(is_split, by_class)):
        return [None] * len(names)
    for folder in folders:
        name = folder.rpartition("/")[2]
        if folder != by_class[name]:
            both = f"{shown(folder, 60)} and {shown(by_class[name], 60)}"
            what = f"is {shown(name, 40)} the class, or the folder above?"
            raise ValueError(f"{both}: {what} Unpack it and use --dataset=image_folder")
    return [name.split("/")[-2] for name in names]


def _label(name, key, content):
    try:
        if not name.lower().endswith(".json"):
            return _text(content)
        values = json.loads(content)
        keys = values if isinstance(values, dict) else ()
        if key not in keys:
            why = f"has no key {key}, only {shown(', '.join(keys), 100)}"
            raise ValueError(f"{why}; --columns=label:json:KEY names it")
        return label_text(values[key])
    except RecursionError:
        raise ValueError(f"{shown(name, 60)} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{shown(name, 60)}: {one_line(error, 200)}") from error


@functools.lru_cache
def _text(content):
    return label_text(content.decode())
