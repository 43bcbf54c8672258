"""Tar files with an image and its label as neighbors, as `webdataset` writes them."""

import contextlib
import functools
import json
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from towers.data.files import containers, reading
from towers.data.files.image_files import ImageOptions
from towers.data.files.index import Shard, read_shards
from towers.data.files.paths import is_image_name, shown
from towers.data.sources import DataSet, Trained

ROLES = ("image", "label")
_LABELS = ("cls", "json", "txt")
_BLOCK = 512
_REGULAR = (b"0", b"\0", b"7")


def load(
    data_dir: str = "",
    columns: str = "",
    image_options: ImageOptions | None = None,
    trained: Trained | None = None,
) -> DataSet:
    """Tar files with images; arguments and errors as of `containers.load`."""
    read_files = functools.partial(read_shards, read=read)
    return containers.load(
        "webdataset", ROLES, read_files, data_dir, columns, image_options, trained
    )


def read(path: str, columns: Mapping[str, str]) -> Shard:
    """The index of the images in a tar file; headers and labels are read.

    Neighbors whose names are equal up to the first dot of their last part are of one
    example: the image, and its label in `.cls`, `.txt` or the key `label` of `.json`.
    `columns` are "image" and "label" -> other endings, or "json:KEY". ValueError where
    the file breaks off, is no tar file, or one of several images has no label.
    """
    offsets, lengths, labels, names = [], [], [], []
    with _reader(path) as (read_at, size):
        for members in _examples(_members(read_at, size)):
            images = [x for x in members if _is_image(x, columns.get("image"))]
            if images[1:]:
                both = " and ".join(ending for ending in images[:2])
                raise ValueError(
                    f"{members[images[0]][0]} has two images, {both}; "
                    f"--columns=image:{images[0]} names one"
                )
            if images:
                name, begin, length = members[images[0]]
                offsets.append(begin)
                lengths.append(length)
                names.append(name)
                labels.append(_label(members, columns.get("label"), read_at))
    missing = [name for name, x in zip(names, labels, strict=True) if x is None]
    if missing and len(missing) < len(names):
        raise ValueError(f"{shown(missing[0])} has no label in {' or '.join(_LABELS)}")
    return Shard(np.array(offsets), np.array(lengths), labels, names)


@contextlib.contextmanager
def _reader(path: str) -> Iterator[tuple[Callable[[int, int], bytes], int]]:
    """A function (offset, length) -> bytes, and the size of the file."""
    with reading.open_file(path) as file:
        if reading.is_url(path):

            def read_at(offset, length):
                file.seek(offset)
                return file.read(length)

            yield read_at, reading.size(path)
        elif size := os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                yield lambda offset, n: content[offset : offset + n], size
        else:
            raise ValueError("the file is empty")


def _members(read_at, size):
    """(name, first byte, number of bytes) of each regular file: of the formats of POSIX
    (ustar, pax) and of GNU tar."""
    offset, extended = 0, {}
    while offset < size:
        header = read_at(offset, _BLOCK)
        if header.count(0) == _BLOCK:
            return
        name = header[:100].split(b"\0", 1)[0]
        if len(header) < _BLOCK or header[257:262] != b"ustar":
            fault = f"breaks off at byte {offset:,}" if offset else "is no tar file"
            raise ValueError(fault)
        if header[257:263] == b"ustar\0" and header[345]:
            name = header[345:500].split(b"\0", 1)[0] + b"/" + name
        kind, begin = header[156:157], offset + _BLOCK
        length = int(extended.get(b"size") or _number(header[124:136]))
        offset = begin + length + -length % _BLOCK
        if offset > size:
            raise ValueError(f"breaks off in {shown(os.fsdecode(name), 60)}")
        if kind == b"L":  # a long name, of GNU tar
            extended[b"path"] = read_at(begin, length).rstrip(b"\0")
        elif kind == b"x":  # long names and others, of pax
            records = read_at(begin, length)
            extended.update(re.findall(rb"\d+ ([^=\n]+)=([^\n]*)\n", records))
        elif kind != b"g":
            if kind in _REGULAR:
                yield os.fsdecode(extended.get(b"path", name)), begin, length
            extended = {}
    raise ValueError("breaks off: the end of the archive is missing")


def _number(field):
    if field[0] & 0x80:  # binary, of more than 8 GiB
        return int.from_bytes(field[1:])
    return int(field.rstrip(b" \0") or b"0", 8)


def _examples(members):
    """Ending -> member, of each example."""
    last, example = None, {}
    for name, begin, length in members:
        folder, _, base = name.rpartition("/")
        stem, _, ending = base.partition(".")
        if not stem or not ending:
            continue
        if (folder, stem) != last:
            if example:
                yield example
            last, example = (folder, stem), {}
        example[ending.lower()] = name, begin, length
    if example:
        yield example


@functools.lru_cache(100)
def _is_image(ending, wanted):
    return ending == wanted if wanted else is_image_name(f"x.{ending}")


def _label(members, wanted, read_at):
    """The text of a label; None without one."""
    kind, _, key = (wanted or "").partition(":")
    for ending in (kind,) if kind else _LABELS:
        if ending not in members:
            continue
        name, *span = members[ending]
        content = read_at(*span).decode()
        if ending != "json" and not ending.endswith(".json"):
            return content.strip()
        values = json.loads(content)
        if not isinstance(values, dict):
            raise ValueError(f"{shown(name, 60)} is no object {{...}}")
        value = values.get(key or "label")
        if value is not None:
            return str(value)
    return None
