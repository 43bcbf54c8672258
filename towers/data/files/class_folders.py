"""The layout of a folder of images, one folder a class. Imports no TensorFlow."""

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from towers.data.files.paths import is_folder, is_image, shown
from towers.errors import DataError, nearest

LAYOUT = (
    "an image folder has train/CLASS/*.jpg|png|... and optionally val/ and test/ with "
    "the same classes, or CLASS/* alone; --data_dir names the folder that contains "
    "train/ or the classes"
)

# What archives leave behind.
JUNK = ("__macosx", "thumbs.db", "desktop.ini")

# A folder with one of these names is taken before one with a longer name.
_SHORT = ("train", "val", "valid", "validation", "test")
# Such as Training, val_images, Test-Set or seg_train.
_NAME = (
    r"(?:(?P<train>train(?:ing)?)|(?P<validation>val(?:id(?:ation)?)?|dev|eval)"
    r"|(?P<test>test(?:ing)?))(?:[ _-]?(?:images?|set|data|labels?))?"
)
_SPLIT = re.compile(rf"(?P<prefix>.+[ _-])??{_NAME}", re.IGNORECASE)


def find_folders(root: str) -> tuple[dict[str, str], list[str]]:
    """The folders for training, validation and testing that have labels: "train",
    "validation" and "test" -> path, the root where there are none of them; and the
    names of folders for validation or testing without class folders.

    DataError where there is no such folder, or two for the same split.
    """
    if not os.path.isdir(root):
        above, name = os.path.split(root)
        others = [x.name for x in folders_in(above)] if os.path.isdir(above) else []
        raise DataError(
            f"{root}: there is no such folder; {nearest(name, others)}{LAYOUT}"
        )
    names = split_folders(root, [entry.name for entry in folders_in(root)])
    folders = {x: _innermost(os.path.join(root, name)) for x, name in names.items()}
    unlabeled = []
    for split in ("validation", "test"):
        if folders.keys() >= {"train", split} and _is_unlabeled(folders[split]):
            unlabeled.append(os.path.basename(folders.pop(split)) + "/")
    return folders or {"train": root}, unlabeled


def split_folders(root: str, names: Iterable[str]) -> dict[str, str]:
    """The split -> its name, of the names of the folders in a root; DataError where two
    are for the same split."""
    by_prefix = {}
    for name in names:
        if match := _SPLIT.fullmatch(name):
            splits = by_prefix.setdefault((match["prefix"] or "").lower(), {})
            splits.setdefault(match.lastgroup, []).append(name)
    splits = by_prefix.pop("", {})
    if "train" not in splits:  # a prefix needs two, as a class may be steam_train
        pairs = (x for x in by_prefix.values() if "train" in x and len(x) > 1)
        splits = next(pairs, splits)
    for split, named in splits.items():
        named = [x for x in named if x.lower() in _SHORT] or named
        if named[1:]:
            raise DataError(
                f"{os.path.join(root, named[0])} and {named[1]}/: two folders for the "
                "same; move one of them away"
            )
        splits[split] = named[0]
    return splits


def is_split(name: str) -> bool:
    """True if a folder of this name is for training, validation or testing."""
    return _SPLIT.fullmatch(name) is not None


def split_of(name: str) -> str | None:
    """ "train", "validation" or "test" where the name of a file has the name of a split
    in it, such as set-train-00000.tar, else None."""
    match = re.search(rf"(?<![a-z]){_NAME}(?![a-z])", name, re.IGNORECASE)
    return match and match.lastgroup


def _innermost(folder):
    """test/test/ in place of test/ where nothing else is in it, as in archives."""
    names = [entry.name for entry in itertools.islice(entries(folder), 2)]
    inner = os.path.join(folder, os.path.basename(folder))
    is_alone = names == [os.path.basename(folder)] and os.path.isdir(inner)
    return _innermost(inner) if is_alone else folder


def _is_unlabeled(folder):
    return not folders_in(folder) and any(map(is_image, entries(folder)))


def training_folder(root: str, folders: dict[str, str]) -> str:
    """The folder of the classes; DataError where there is none."""
    if "train" in folders:
        return folders["train"]
    raise DataError(f"{root} has no folder train/; {suggestion(root)}{LAYOUT}")


def misfit(root: str, folder: str, counts: Mapping[str, int]) -> DataError:
    """The error of fewer than two classes in a folder, from its images per class: the
    folder's content, the nearest folder that fits, and the layout."""
    num_images = sum(is_image(x) for x in entries(folder) if not is_folder(x))
    content, hint = "has no images", suggestion(root)
    if counts:
        [(name, count)] = counts.items()
        content = f"{count:,} images in one class folder, {shown(name, 40)}/, and at "
        content += "least two classes are needed"
    elif num_images:
        content = f"{num_images:,} images, but no class folders"
        if folder != root and not hint:
            name = os.path.basename(folder)
            hint = f"if {name} is a class, move all classes to a new folder train/; "
    elif files := [os.path.relpath(x.path, folder) for x in files_below(folder)]:
        content += f", only {len(files):,} other files, such as {shown(min(files), 40)}"
    return DataError(f"{shown(folder)}: {content}; {hint}{LAYOUT}")


def suggestion(root: str) -> str:
    """Names the nearest folder with two classes, up to two levels below or one above;
    empty if there is none."""
    below = [x.path for x in folders_in(root) if not is_split(x.name)]
    deeper = [x.path for path in below for x in folders_in(path)]
    above = [os.path.dirname(root)] if _is_unlabeled(root) else []
    for path in (*below, *deeper, *above):
        if has_classes(path):
            return f"--data_dir={shown(path)} has class folders; "
    return ""


def has_classes(root: str) -> bool:
    """True if two class folders, or more, have images; of large folders the first files
    are inspected."""
    try:
        folders = folders_in(find_folders(root)[0].get("train", ""))
        files = [itertools.islice(files_below(x.path), 1000) for x in folders]
        return sum(any(map(is_image, some)) for some in files) > 1
    except DataError:
        return False


def class_depth(paths: Iterable[str]) -> int:
    """The number of folders that name the class of an image, from the paths of all
    below the folder of the classes.

    It is 1 where a folder has images itself. Where all have folders instead,
    `animals/cats/1.jpg` is of the class `animals/cats`, unless all have the same ones,
    such as `CLASS/images/`.
    """
    folders, depth = {tuple(path.split("/")[:-1]) for path in paths}, 1
    while all(len(folder) > depth for folder in folders):
        inside = {}
        for folder in folders:
            inside.setdefault(folder[:depth], set()).add(folder[depth])
        if all(names == min(inside.values(), key=len) for names in inside.values()):
            break
        depth += 1
    return depth


def class_folder(path: str, depth: int) -> str:
    """The part of a path that names the class, see `class_depth`."""
    return "/".join(path.split("/")[:-1][:depth])


def depth_of(class_names: Iterable[str]) -> int:
    """The number of folders in the names of classes."""
    return 1 + max(name.count("/") for name in class_names)


def folders_in(folder: str) -> list[os.DirEntry]:
    """The folders in a folder, in the order of their names; none where it cannot be
    read."""
    try:
        children = sorted(entries(folder), key=attrgetter("name"))
    except DataError:
        return []
    return [x for x in children if is_folder(x) and x.name.lower() not in JUNK]


def files_below(folder: str, above: tuple[str, ...] = ()) -> Iterator[os.DirEntry]:
    """The files in a folder and below it, in no order. Folders without files, and links
    to a folder that they are in, are given themselves."""
    above = (*above, os.path.realpath(folder))
    for entry in entries(folder):
        if not is_folder(entry) or is_without_images(entry):
            yield entry
        elif os.path.realpath(entry.path) in above:
            yield entry
        else:
            yield from files_below(entry.path, above)


def is_without_images(entry: os.DirEntry) -> bool:
    """True if a folder is empty, or left behind by an archive."""
    return entry.name.lower() in JUNK or next(entries(entry.path), None) is None


def entries(folder: str) -> Iterator[os.DirEntry]:
    """Entries of a folder, without names that begin with a dot; DataError where it
    cannot be read."""
    try:
        with os.scandir(folder) as children:
            for entry in children:
                if not entry.name.startswith("."):
                    yield entry
    except OSError as error:
        raise DataError(f"{shown(folder)}: cannot be read: {error.strerror}") from error
