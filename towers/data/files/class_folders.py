"""The layout of a folder of images, one folder a class. Imports no TensorFlow."""

import collections
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from towers.data.files.paths import (
    class_name,
    ending,
    is_file,
    is_folder,
    is_image,
    is_image_name,
)
from towers.data.files.reading import is_url
from towers.data.inventory import Inventory
from towers.errors import DataError, nearest
from towers.messages import shown

LAYOUT = (
    "an image folder has train/CLASS/*.jpg|png|... and optionally val/ and test/ with "
    "the same classes, or CLASS/* alone; --data_dir names the folder that contains "
    "train/ or the classes"
)

# What archives, Windows and network storage leave behind.
JUNK = ("__macosx", "thumbs.db", "desktop.ini", "@eadir")

# A folder with one of these names is taken before one with a longer name.
_SHORT = ("train", "val", "valid", "validation", "test")
# Such as Training, val_images or Test-Set.
_NAME = (
    r"(?:(?P<train>train(?:ing)?)|(?P<validation>val(?:id(?:ation)?)?|dev|eval)"
    r"|(?P<test>test(?:ing)?))(?:[ _-]?(?:images?|set|data|labels?))?"
)
_SPLIT = re.compile(_NAME, re.IGNORECASE)
# Also seg_train, 01_test, val2017 or train.v1.
_CONTAINS_SPLIT = re.compile(rf"(?<![a-z]){_NAME}(?![a-z])", re.IGNORECASE)

# Folders inside folders have two readings if this share of their names is repeated.
MIN_SHARED = 0.5

# Folder -> the names of the folders and of the files in it, without hidden ones.
Inside = Callable[[str], tuple[list[str], list[str]]]


def inside(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of the folders and of the files in a folder, sorted; DataError
    if it is missing.
    """
    if not os.path.isdir(folder):
        above, name = os.path.split(folder)
        hint = nearest(name, [x.name for x in folders_in(above)])
        raise DataError(f"{folder}: there is no such folder; {hint}{LAYOUT}")
    files = [x.name for x in entries(folder) if not is_folder(x)]
    return [x.name for x in folders_in(folder)], sorted(files)


def find_folders(
    root: str,
    inventory: Inventory | None = None,
    class_level: int = 0,
    inside: Inside = inside,
) -> dict[str, str]:
    """Return the folders for training, validation and testing that have labels.

    They are "train", "validation" and "test" -> path; the root itself is for training
    if there is no such folder. The inventory names what is left out: other folders and
    files next to these, and folders of images without labels.

    DataError if the folders have two readings, see `split_folders`.
    """
    inventory = inventory or Inventory()
    names, files = inside(root)
    splits = split_folders(root, names, inside, class_level)
    if not splits:
        return {"train": root}
    others = [f"{name}/" for name in names if name not in splits.values()]
    near = splits.get("train") or next(iter(splits.values()))
    inventory.leave_out(f"folders next to {near}/", *others)
    inventory.leave_out("files next to the folders of the splits", *files)
    folders = {}
    for split, name in splits.items():
        folders[split] = os.path.join(root, name)
        while inside(folders[split]) == ([name], []):  # test/test/, as in archives
            folders[split] = os.path.join(folders[split], name)
    for split in ("validation", "test"):
        if not folders.keys() >= {"train", split}:
            continue
        # None of its folders names a class: there is none, or images/ or unknown/.
        names, files = inside(folders[split])
        known = map(class_name, inside(folders["train"])[0])
        is_single = len(names) == 1 and class_name(names[0]) not in known
        if is_single or (not names and files):
            name = os.path.basename(folders.pop(split)) + "/"
            for text in [x for x in files if ending(x) == ".txt"][:1]:
                name += f" (labels in {text} are not read: make class folders)"
            inventory.leave_out("folders of images without class folders", name)
    return folders


def split_folders(
    root: str, names: Sequence[str], inside: Inside, class_level: int = 0
) -> dict[str, str]:
    """Return split -> name, of the folders in a root; none if they are classes.

    A name such as `train` is a split; one that contains it, such as `seg_train` or
    `val2017`, is a split if it has class folders inside, because a class may be called
    `steam_train`, and if `class_level` is not given. DataError if there are two folders
    for a split, or two readings.
    """
    splits, alike, deep = {}, {}, {}
    for name in names:
        split = split_of(name)
        if is_split(name):
            splits.setdefault(split, []).append(name)
        elif class_level == 0 and split:
            alike.setdefault(split, []).append(name)
            if inside(os.path.join(root, name))[0]:
                deep.setdefault(split, []).append(name)
    if splits:
        splits = deep | splits
    elif "train" in alike and len(alike) > 1:
        listed = " and ".join(f"{named[0]}/" for named in alike.values())
        if not _are_splits(root, names, alike, inside):
            if "train" in deep and len(deep) > 1:
                raise DataError(
                    f"{shown(root)}: are {shown(listed, 60)} splits of the images? "
                    "Rename them to train/ and test/. Or classes? --class_level=1"
                )
        elif "train" not in deep:
            raise DataError(
                f"{shown(root)}: {shown(listed, 60)} are named like splits and have no "
                f"class folders inside; {LAYOUT}; --class_level=1 if they are classes"
            )
        else:
            splits = alike
    if not splits and "train" in deep:
        path = os.path.join(root, deep["train"][0])
        classes = inside(path)[0]
        if len(classes) > 1:
            raise DataError(
                f"{shown(path)}: are these the training images, in class folders such "
                f"as {shown(', '.join(classes[:3]), 60)}, or images of one class? "
                f"--data_dir={shown(path)} or --class_level=1"
            )
    for split, named in splits.items():
        named = [x for x in named if x.lower() in _SHORT] or named
        if named[1:]:
            raise DataError(
                f"{os.path.join(root, named[0])} and {named[1]}/: two folders for the "
                "same; move one of them away"
            )
        splits[split] = named[0]
    return splits


def _are_splits(root, names, alike, inside):
    """True if folders for training and testing are called the same but for the split
    and numbers, such as train2017 and val2017, or no other folder has images.
    """

    def rest(name):
        return re.sub(r"[\W\d_]|v(?=\d)", "", _CONTAINS_SPLIT.sub("", name, 1)).lower()

    of_train = {rest(name) for name in alike["train"]}
    others = {name for split in alike.keys() - {"train"} for name in alike[split]}
    if of_train & {*map(rest, others)}:
        return True
    rest_of_all = {*names} - {*alike["train"], *others}
    inner = (inside(os.path.join(root, name)) for name in rest_of_all)
    return not any(folders or any(map(is_image_name, x)) for folders, x in inner)


def is_split(name: str) -> bool:
    """Return whether a folder of this name is for training, validation or testing."""
    return _SPLIT.fullmatch(name) is not None


def split_of(name: str) -> str | None:
    """Return "train", "validation" or "test" if the name of a file or folder contains
    the name of a split, such as set-train-00000.tar, else None.
    """
    match = _CONTAINS_SPLIT.search(name)
    return match and match.lastgroup


def training_folder(root: str, folders: dict[str, str]) -> str:
    """The folder of the classes; DataError where there is none."""
    if "train" in folders:
        return folders["train"]
    raise DataError(f"{root} has no folder train/; {suggestion(root)}{LAYOUT}")


def misfit(root: str, folder: str, counts: Mapping[str, int]) -> DataError:
    """The error of fewer than two classes in a folder, from its images per class: the
    folder's content, the nearest folder that fits, and the layout.
    """
    content = "has no images"
    if counts:
        [(name, count)] = counts.items()
        content = f"{count:,} images in one class folder, {shown(name, 40)}/, and at "
        content += "least two classes are needed"
    elif num_images := sum(is_image(x) for x in entries(folder) if not is_folder(x)):
        content = f"{num_images:,} images, but no class folders"
    elif files := [os.path.relpath(x.path, folder) for x in files_below(folder)]:
        content += f", only {len(files):,} other files, such as {shown(min(files), 40)}"
    return DataError(f"{shown(folder)}: {content}; {suggestion(root)}{LAYOUT}")


def suggestion(root: str) -> str:
    """Names the nearest folder with two classes, up to two levels below or one above;
    empty if there is none.
    """
    below = [x.path for x in folders_in(root) if not is_split(x.name)]
    deeper = [x.path for path in below for x in folders_in(path)]
    above = [] if folders_in(root) else [os.path.dirname(root)]
    for path in filter(has_classes, (*below, *deeper, *above)):
        return f"--data_dir={shown(path)} has class folders; "
    return ""


def has_classes(root: str) -> bool:
    """True if two class folders, or more, have images; of large folders the first files
    are inspected.
    """
    try:
        folders = folders_in(find_folders(root).get("train", ""))
        files = [itertools.islice(files_below(x.path), 1000) for x in folders]
        return sum(any(map(is_image, some)) for some in files) > 1
    except DataError:
        return False


def class_depth(paths: Iterable[str], location: str = "") -> int:
    """Return the number of folders that name the class of an image, from the paths of
    all below the folder of the classes.

    It is 1 if a folder has images itself. If all have folders instead,
    `animals/cats/1.jpg` is of the class `animals/cats`, unless all have a single one of
    the same name, as in `CLASS/images/`.

    DataError, with the location, if most folders inside have a name that is also in
    another folder, as in `color/cat` and `gray/cat`: either may be the class.
    """
    images = collections.Counter(tuple(path.split("/")[:-1]) for path in paths)
    for depth in itertools.count(1):
        inside, num_inside = {}, 0
        for folder, count in images.items():
            if len(folder) > depth:
                inside.setdefault(folder[:depth], set()).add(folder[depth])
                num_inside += count
        names = collections.Counter(itertools.chain(*inside.values()))
        if len(names) < 2 or 2 * num_inside <= images.total():
            return depth
        shared = [name for name, count in names.items() if count > 1]
        if len(shared) >= MIN_SHARED * len(names):
            outer = sorted("/".join(folder) for folder in inside)
            raise DataError(
                f"{shown(location)}: which folders are the classes, the {len(outer):,} "
                f"outer ones ({shown(', '.join(outer[:3]), 60)}), "
                f"--class_level={depth}, or the {len(names):,} inside them "
                f"({shown(', '.join(sorted(shared)[:3]), 60)}), "
                f"--class_level={depth + 1}? Or one of the outer ones alone, "
                f"--data_dir={shown(os.path.join(location, outer[0]))}"
            )
        if any(len(folder) <= depth for folder in images):
            return depth


def class_folder(path: str, depth: int, class_level: int = 0) -> str:
    """Return the part of a path that names the class: `depth` folders, see
    `class_depth`, or the one at a level, counted from 1; "" if there is none.
    """
    folders = path.split("/")[:-1]
    return "/".join(folders[class_level - 1 :][:1] if class_level else folders[:depth])


def depth_of(class_names: Iterable[str]) -> int:
    """The number of folders in the names of classes."""
    return 1 + max(name.count("/") for name in class_names)


def folders_in(folder: str) -> list[os.DirEntry]:
    """The folders in a folder, in the order of their names; none where it cannot be
    read.
    """
    try:
        children = sorted(entries(folder), key=attrgetter("name"))
    except DataError:
        return []
    return [x for x in children if is_folder(x) and x.name.lower() not in JUNK]


def files_below(folder: str, above: tuple[str, ...] = ()) -> Iterator[os.DirEntry]:
    """The files in a folder and below it, in no order. Folders without files, and links
    to a folder that they are in, are given themselves.
    """
    above = (*above, os.path.realpath(folder))
    for entry in entries(folder):
        if (
            not is_folder(entry)
            or is_without_images(entry)
            or os.path.realpath(entry.path) in above
        ):
            yield entry
        else:
            yield from files_below(entry.path, above)


def images_below(folder: str) -> Iterator[str]:
    """The paths of the images in a folder and below it, in no order."""
    return (x.path for x in files_below(folder) if is_file(x) and is_image(x))


def is_without_images(entry: os.DirEntry) -> bool:
    """True if a folder is empty, or left behind by an archive."""
    return entry.name.lower() in JUNK or next(entries(entry.path), None) is None


def entries(folder: str) -> Iterator[os.DirEntry]:
    """Entries of a folder, without names that begin with a dot; none of a URL.
    DataError where it cannot be read.
    """
    if is_url(folder):
        return
    try:
        with os.scandir(folder) as children:
            for entry in children:
                if not entry.name.startswith("."):
                    yield entry
    except OSError as error:
        raise DataError(f"{shown(folder)}: cannot be read: {error.strerror}") from error
