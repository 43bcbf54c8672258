"""Data sets of images in containers: tables, Parquet files, tar files and TFRecord
files, on this machine, on web servers and in buckets."""

import functools
import os
import re

from towers.data.files import parquet, reading, splits, tables, tar_shards, tf_records
from towers.data.files.class_folders import (
    LAYOUT,
    class_depth,
    class_folder,
    depth_of,
    is_split,
    split_of,
)
from towers.data.files.image_files import ImageOptions
from towers.data.files.index import Index, read_shards
from towers.data.files.paths import (
    CONTAINER_ENDINGS,
    is_container,
    is_image_name,
    shown,
)
from towers.data.sources import DataSet, Trained
from towers.errors import ConfigError, DataError, with_nearest

# --dataset -> module with ROLES, of --columns, and `read`: (path of one file, columns)
# -> `index.Shard`; those of table and parquet differ, see `load`. A container also has
# a row in `choices.DATASETS`, and is in CONTAINER_ENDINGS and `recipes.PHOTO_SETS`.
CONTAINERS = {
    "table": tables,
    "parquet": parquet,
    "webdataset": tar_shards,
    "tfrecord": tf_records,
}


def load(
    container: str,
    data_dir: str = "",
    columns: str = "",
    image_dir: str = "",
    fold: int = -1,
    image_options: ImageOptions | None = None,
    trained: Trained | None = None,
) -> DataSet:
    """Indexes a data set; its images are read and decoded when they are needed.

    `container` is a key of CONTAINERS, `data_dir` as in `find_files`, `columns` as in
    `parse_columns`; `image_dir` and `fold` are for tables, see `tables.read`. DataError
    where a file is missing or invalid, or as of `splits.data_set`; ConfigError as of
    `parse_columns`.
    """
    options = (image_options or ImageOptions()).with_survey()
    named = parse_columns(columns, container)
    place, paths = find_files(data_dir, container)
    if container == "table":
        more = image_dir, fold, options.max_image_pixels
        indexes = {x: tables.read(files, named, *more) for x, files in paths.items()}
        if indexes.keys() == {"train"}:  # by a column
            [indexes] = indexes.values()
        else:
            indexes = {x: by_split["train"] for x, by_split in indexes.items()}
        if any(index.labels.ndim == 2 for index in indexes.values()):
            indexes = {
                split: index if (index.labels < 0).all() else index.as_label_sets()
                for split, index in indexes.items()
            }
        openers = {x: lambda index=index: index for x, index in indexes.items()}
    else:
        if container == "parquet":
            cache = parquet.RowGroups(1.25 * options.shuffle_buffer_mb)
            read = functools.partial(parquet.read, columns=named, cache=cache)
        else:
            read_file = CONTAINERS[container].read
            read = functools.partial(read_shards, columns=named, read=read_file)
        openers = {x: functools.partial(read, files) for x, files in paths.items()}
    return _data_set(container, place, openers, options, trained)


def load_folders(
    url: str, options: ImageOptions, trained: Trained | None = None
) -> DataSet:
    """The images below a URL, with a folder for each class, in folders for the splits
    or without; DataError as of `load`."""
    place, files = url.rstrip("/"), {}
    for file in filter(is_image_name, reading.matches(place)):
        path = file[len(place) :].strip("/")
        first, _, rest = path.partition("/")
        split = split_of(first) if "/" in rest and is_split(first) else None
        path = rest if split else path
        if "/" not in path:
            raise DataError(f"{shown(file)}: is an image of no class; {LAYOUT}")
        files.setdefault(split or "train", []).append((file, path))
    if trained is not None:
        depth = depth_of(trained.class_names)
    else:
        depth = class_depth(path for _, path in files.get("train", ()))
    openers = {
        split: functools.partial(
            tables.index_of,
            [file for file, _ in pairs],
            [class_folder(path, depth) for _, path in pairs],
        )
        for split, pairs in files.items()
    }
    return _data_set("image_folder", place, openers, options, trained)


def _data_set(container, place, openers, options, trained):
    """The data set of `openers`, split -> function that gives its Index."""
    openers = {split: functools.cache(opener) for split, opener in openers.items()}
    unlabeled = [
        split
        for split in openers.keys() & {"validation", "test"}
        if openers.keys() > {split} and (openers[split]().labels < 0).all()
    ]
    if "train" not in openers and (trained is None or unlabeled):
        raise DataError(f"{shown(place)}: has no images for training")
    return splits.data_set(
        container,
        place,
        {
            split: functools.partial(_with_classes, opener, place)
            for split, opener in openers.items()
            if split not in unlabeled
        },
        options,
        trained,
        names={split: f"split {split}" for split in openers},
        note=lambda: "".join(
            f"; split {split} has no labels and is not used" for split in unlabeled
        ),
    )


def _with_classes(opener, place, class_names, where) -> Index:
    index = opener()
    for unlabeled in (index.labels < 0).nonzero()[0][:1]:
        raise DataError(f"{shown(index.place(unlabeled))}: has no label")
    if class_names is not None:
        return index.with_classes(class_names, where)
    if len(index.class_names) < 2:
        names = shown(", ".join(index.class_names), 60)
        raise DataError(f"{shown(place)}: has one class, {names}; two are needed")
    return index


def parse_columns(text: str, container: str) -> dict[str, str]:
    """Role -> name of a column, from ROLE:NAME by commas; ConfigError where it is
    written otherwise, or the container has no such role."""
    roles, columns = CONTAINERS[container].ROLES, {}
    for item in filter(None, text.split(",")):
        role, colon, name = item.partition(":")
        if role not in roles or not colon or not name or role in columns:
            message = (
                f"columns={text}: expected ROLE:NAME by commas, and the roles of "
                f"{container} are {', '.join(roles)}"
            )
            raise ConfigError(with_nearest(message, role, roles))
        columns[role] = name
    return columns


def find_files(data_dir: str, container: str) -> tuple[str, dict[str, list[str]]]:
    """The place for messages, and split -> files of a file, a folder, or a pattern such
    as `train-{000..146}.tar`, on this machine or a URL; "" is `data`.

    The names of files, or of the folders that they are in, may have names of splits;
    others are not used where some do, and where none do all are for training. DataError
    where there are no such files, or a folder has two tables.
    """
    place = data_dir or "data"
    if not reading.is_url(place):
        place = os.path.abspath(os.path.expanduser(place))
    is_file = is_container(place, container) or re.search(r"[*?{]", place)
    is_folder = not is_file if reading.is_url(place) else os.path.isdir(place)
    if is_folder:
        paths = [x for x in _in_folder(place, container) if is_container(x, container)]
        if not paths:
            endings = ", ".join(CONTAINER_ENDINGS[container])
            raise DataError(
                f"{shown(place)}: no {endings} file; --data_dir names a file, a folder "
                "of them, or a pattern such as train-{00..99}.tar"
            )
    else:
        paths = reading.expand(place)
    by_split = {}
    for path in paths:
        begin = len(place) if is_folder else len(os.path.dirname(path))
        parts = path[begin:].strip("/").split("/")[::-1]
        split = next(filter(None, map(split_of, parts)), "")
        by_split.setdefault(split, []).append(path)
    rest = by_split.pop("", [])
    if not by_split:
        if container == "table" and rest[1:]:
            raise DataError(
                f"{shown(place)}: has several tables; name one, such as "
                f"--data_dir={shown(rest[0])}"
            )
        return place, {"train": rest}
    return place, by_split


def _in_folder(folder, container):
    """Container files in a folder; tables only next to the images, which may be a
    million."""
    if container != "table":
        return reading.matches(folder)
    paths = reading.matches(folder, "*") + reading.matches(folder, "*/metadata.*")
    named = [x for x in paths if os.path.basename(x).startswith("metadata.")]
    return named or paths
