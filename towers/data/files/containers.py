"""Data sets in containers: tables, Parquet, tar and TFRecord files."""

import functools
import os
import re
from collections.abc import Callable, Collection, Mapping

from towers.config.choices import CONTAINERS
from towers.data.files import reading, splits
from towers.data.files.class_folders import split_of
from towers.data.files.image_files import ImageOptions
from towers.data.files.index import Index
from towers.data.files.paths import advice
from towers.data.files.rows import OF_IMAGES, SUBMISSION
from towers.data.inventory import Inventory
from towers.data.sources import DataSet, Trained
from towers.errors import ConfigError, DataError, with_nearest
from towers.messages import shown


def load(
    container: str,
    roles: Collection[str],
    read: Callable[..., Index],
    data_dir: str = "",
    columns: str = "",
    image_options: ImageOptions | None = None,
    trained: Trained | None = None,
) -> DataSet:
    """Index a data set of a container; its images are decoded when they are read.

    `read` is (paths of files, columns=role -> name, inventory=) -> Index; `roles` are
    of columns that can be named. For other arguments see `data.load`.
    """
    inventory = Inventory()
    named = parse_columns(columns, container, roles)
    read = functools.partial(read, columns=named, inventory=inventory)
    location, paths = find_files(data_dir, container, inventory)
    openers = {x: functools.partial(read, files) for x, files in paths.items()}
    names = {split: _described(files, location) for split, files in paths.items()}
    options = image_options or ImageOptions()
    return data_set(container, location, openers, options, trained, inventory, names)


def _described(files, location):
    below = f"{location.rstrip('/')}/"
    first, last = (
        shown(x.removeprefix(below) if x.startswith(below) else os.path.basename(x), 60)
        for x in (files[0], files[-1])
    )
    return f"{len(files):,} files, {first} to {last}" if files[1:] else first


def data_set(
    name: str,
    location: str,
    openers: Mapping[str, Callable[[], Index]],
    options: ImageOptions,
    trained: Trained | None,
    inventory: Inventory,
    names: Mapping[str, str],
) -> DataSet:
    """Return the data set of split -> function that gives its Index."""
    options = options.with_survey()
    openers = {split: functools.cache(opener) for split, opener in openers.items()}
    if "train" in openers and trained is None:
        openers["train"]()  # its errors come first
    held_out = [x for x in ("validation", "test") if openers.keys() > {x}]
    unlabeled = [x for x in held_out if (openers[x]().labels < 0).all()]
    if "train" not in openers and (trained is None or unlabeled):
        way = "the names of files, such as train.csv, say their split: rename one"
        raise DataError(f"{shown(location)}: has no images for training; {way}")
    inventory.leave_out("splits without labels", *unlabeled)
    return splits.data_set(
        name,
        location,
        {
            split: functools.partial(_with_classes, opener, location, inventory)
            for split, opener in openers.items()
            if split not in unlabeled
        },
        options,
        trained,
        names=names,
        inventory=inventory,
    )


def _with_classes(opener, location, inventory, class_names, where) -> Index:
    index = opener()
    is_unlabeled = index.labels < 0
    if is_unlabeled.any():
        text = f"{shown(index.location(is_unlabeled.argmax()))}: has no label"
        for kind in (x for x in ("columns", "features") if x in inventory.names):
            names = shown(", ".join(inventory.names[kind]), 100)
            text += f"; not used are the {kind} {names}: --columns=label:NAME names one"
            text += ", text:NAME a text" if kind == "features" else ""
        raise DataError(text)
    if class_names is not None:
        return index.with_classes(class_names, where)
    if len(index.class_names) < 2:
        names = shown(", ".join(index.class_names), 60)
        raise DataError(f"{shown(location)}: has one class, {names}; two are needed")
    return index


def parse_columns(text: str, container: str, roles: Collection[str]) -> dict[str, str]:
    """Return role -> column name from ROLE:NAME,...; ConfigError if it is invalid."""
    columns = {}
    for item in filter(None, text.split(",")):
        role, colon, name = item.partition(":")
        if role not in roles or not colon or not name or role in columns:
            known = f"the roles of {container} are {', '.join(roles)}"
            message = f"columns={text}: expected ROLE:NAME by commas, and {known}"
            raise ConfigError(with_nearest(message, role, roles))
        columns[role] = name
    return columns


def find_files(
    data_dir: str, container: str, inventory: Inventory
) -> tuple[str, dict[str, list[str]]]:
    """Return the location for messages, and split -> files.

    `data_dir` is a file, a folder, or a pattern such as `train-{000..146}.tar`, local
    or a URL. File or folder names may contain a split; if some do, the others are not
    used.
    """
    location, matches = data_dir or "data", CONTAINERS[container].matches
    if not reading.is_url(location):
        location = os.path.abspath(os.path.expanduser(location))
    is_folder, is_table = os.path.isdir(location), container == "table"
    if reading.is_url(location):
        is_file = CONTAINERS[container].reads(location)
        is_folder = not (is_file or re.search(r"[*?{]", location))
    if not is_folder and not matches(location) and (text := advice(location)):
        raise DataError(f"{shown(location)}: {text}")
    begin = len(location)
    if is_folder:
        # Tables only next to the images, which may be a million.
        patterns = ("*", *(f"*/{x}*" for x in OF_IMAGES)) if is_table else ("**",)
        paths = [x for p in patterns for x in reading.matches(location, p)]
        paths = list(filter(matches, paths))
        named = [x for x in paths if os.path.basename(x).startswith(OF_IMAGES)]
        if is_table and named:
            inventory.leave_out("other tables", *(x for x in paths if x not in named))
            paths = named
        answers = [x for x in paths if is_table and SUBMISSION.search(x)]
        inventory.leave_out("files of no split", *answers)
        paths = [x for x in paths if x not in answers]
        if not paths:
            endings = ", ".join(CONTAINERS[container].endings)
            way = "--data_dir names a file, a folder, or a pattern: train-{00..99}.tar"
            raise DataError(f"{shown(location)}: no {endings} file; {way}")
    else:  # the names of splits may be in the pattern
        paths = reading.expand(location)
        fixed = location if paths == [location] else re.split(r"[*?\[{]", location)[0]
        begin = len(os.path.dirname(reading.without_query(fixed)))
    by_split: dict[str, list[str]] = {}
    for path in paths:
        parts = reading.without_query(path)[begin:].strip("/").split("/")[::-1]
        split = next(filter(None, map(split_of, parts)), "")
        by_split.setdefault(split, []).append(path)
    rest = by_split.pop("", [])
    if not by_split:
        if is_table and rest[1:]:
            way = f"name one, such as --data_dir={shown(rest[0])}"
            raise DataError(f"{shown(location)}: has several tables; {way}")
        return location, {"train": rest}
    inventory.leave_out("files of no split", *rest)
    folders: dict[str, str] = {}
    for folder, name in map(os.path.split, paths):
        first = folders.setdefault(name, folder)
        if is_folder and split_of(name) and first != folder:
            each = ",".join(os.path.relpath(x, location) for x in (first, folder))
            ways = f"--data_dir={first}, or both, '--data_dir={location}/{{{each}}}/*'"
            raise DataError(f"{shown(name, 60)} is in two folders; take one, {ways}")
    return location, by_split
