"""The layout of a folder of images, one folder a class. Imports no TensorFlow."""

import collections
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from towers.data.files.paths import (
    Entry,
    class_name,
    ending,
    is_file,
    is_folder,
    is_image,
    is_image_name,
)
from towers.data.files.reading import is_url, listed
from towers.data.inventory import Inventory
from towers.errors import DataError, did_you_mean
from towers.messages import shown

LAYOUT = (
    "an image folder has train/CLASS/*.jpg|png|... and optionally val/ and test/ with "
    "the same classes, or CLASS/* alone; --data_dir names the folder that contains "
    "train/ or the classes"
)

# What archives, Windows and network storage leave behind.
JUNK = ("__macosx", "thumbs.db", "desktop.ini", "@eadir")

# Folders with these names take precedence over longer ones.
_SHORT = ("train", "val", "valid", "validation", "test")
# Such as Training, val_images or Test-Set.
_NAME = (
    r"(?:(?P<train>train(?:ing)?)|(?P<validation>val(?:id(?:ation)?)?|dev|eval)"
    r"|(?P<test>test(?:ing)?))(?:[ _-]?(?:images?|set|data|labels?))?"
)
_SPLIT = re.compile(_NAME, re.IGNORECASE)
# Also seg_train, 01_test, val2017 or train.v1.
_CONTAINS_SPLIT = re.compile(rf"(?<![a-z]){_NAME}(?![a-z])", re.IGNORECASE)

# Nested folders are ambiguous if this share of their names is repeated, or has digits.
MIN_SHARED = 0.5

# Folders of images next to folders about them, as in segmentation and detection.
_IMAGES = re.compile(r"(?i)(jpe?g)?_?images?|imgs?|jpe?g")
_ABOUT_IMAGES = re.compile(r"(?i)\w*(mask|annotation|label|trimap)s?|segmentation\w*")


def inside(folder: str) -> tuple[list[str], list[str]]:
    """Return the sorted names of folders and of files in a folder."""
    if not is_url(folder) and not os.path.isdir(folder):
        above, name = os.path.split(folder)
        hint = did_you_mean(name, [x.name for x in folders_in(above)])
        raise DataError(f"{folder}: no such folder; {hint}{LAYOUT}")
    files = [x.name for x in entries(folder) if not is_folder(x)]
    return [x.name for x in folders_in(folder)], sorted(files)


def find_folders(
    root: str, inventory: Inventory | None = None, class_level: int = 0
) -> dict[str, str]:
    """Return split -> path of the folders of labeled images; at least the root."""
    inventory = inventory or Inventory()
    names, files = inside(root)
    splits = split_folders(root, names, class_level)
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
        # Without class folders, or with a single one such as images/ or unknown/.
        names, files = inside(folders[split])
        known = map(class_name, inside(folders["train"])[0])
        is_single = len(names) == 1 and class_name(names[0]) not in known
        if is_single or (not names and files):
            name = os.path.basename(folders.pop(split)) + "/"
            if texts := [x for x in files if ending(x) == ".txt"]:
                name += f" (labels in {texts[0]} are not read: make class folders)"
            inventory.leave_out("folders of images without class folders", name)
    return folders


def split_folders(root: str, names: Sequence[str], class_level: int) -> dict[str, str]:
    """Return split -> name of the split folders in a root; empty if they are classes.

    `seg_train` or `val2017` are splits only if they hold class folders, since a class
    may be called `steam_train`.
    """
    exact, alike, deep = (collections.defaultdict(list) for _ in range(3))
    for name in names:
        split = split_of(name) or ""
        if is_split(name):
            exact[split].append(name)
        elif class_level == 0 and split:
            alike[split].append(name)
            if inside(os.path.join(root, name))[0]:
                deep[split].append(name)
    listed = shown(" and ".join(f"{named[0]}/" for named in alike.values()), 60)
    others = {*names}.difference(*alike.values())
    splits: dict[str, list[str]] = {}
    if exact:
        splits = {**deep, **exact}
    elif "train" in alike and len(alike) > 1 and _are_splits(root, names, alike):
        if "train" not in deep:
            why = f"{listed} are named like splits and have no class folders inside"
            way = f"{LAYOUT}; --class_level=1 if they are classes"
            raise DataError(f"{shown(root)}: {why}; {way}")
        splits = alike
    elif alike and "train" not in alike and len(others) == 1:
        path = os.path.join(root, *others)
        folders, files = inside(path)
        if folders and not any(map(is_image_name, files)):  # data_256, val_256
            ways = f"--class_level=1, or splits, --data_dir={path}?"
            raise DataError(f"{shown(root)}: are {listed} classes, {ways}")
    elif "train" in deep:
        if len(deep) > 1:
            way = "Rename them to train/ and test/. Or classes? --class_level=1"
            raise DataError(f"{shown(root)}: are {listed} splits of the images? {way}")
        path = os.path.join(root, deep["train"][0])
        if len(inside(path)[0]) > 1:
            what = "are these the training images, or images of one class?"
            way = f"--data_dir={shown(path)} or --class_level=1"
            raise DataError(f"{shown(path)}: {what} {way}")
    chosen = {}
    for split, named in splits.items():
        short = [x for x in named if x.lower() in _SHORT] or named
        if short[1:]:
            both = f"{os.path.join(root, short[0])} and {short[1]}/"
            raise DataError(f"{both}: two folders for the same split; move one away")
        chosen[split] = short[0]
    return chosen


def _are_splits(root, names, alike):
    """Return whether names differ in the split alone, or no other folder has images."""

    def rest(name):
        return re.sub(r"[\W\d_]|v(?=\d)", "", _CONTAINS_SPLIT.sub("", name, 1)).lower()

    train_names = {rest(name) for name in alike["train"]}
    others = {name for split in alike.keys() - {"train"} for name in alike[split]}
    if train_names & {*map(rest, others)}:
        return True
    rest_of_all = {*names} - {*alike["train"], *others}
    inner = (inside(os.path.join(root, name)) for name in rest_of_all)
    return not any(folders or any(map(is_image_name, x)) for folders, x in inner)


def is_split(name: str) -> bool:
    """Return whether a folder name denotes a split."""
    return _SPLIT.fullmatch(name) is not None


def split_of(name: str) -> str | None:
    """Return the split that a file or folder name contains, or None."""
    match = _CONTAINS_SPLIT.search(name)
    return match and match.lastgroup


def training_folder(root: str, folders: dict[str, str]) -> str:
    """Return the folder of the training images; DataError if there is none."""
    if "train" in folders:
        return folders["train"]
    raise DataError(f"{root} has no folder train/; {suggestion(root)}{LAYOUT}")


def misfit(root: str, folder: str, counts: Mapping[str, int]) -> DataError:
    """Return the error about a folder with fewer than two classes."""
    content = "has no images"
    if counts:
        [(name, count)] = counts.items()
        content = f"{count:,} images in one class folder, {shown(name, 40)}/, and at "
        content += "least two classes are needed"
    elif num_images := sum(is_image(x) for x in entries(folder) if not is_folder(x)):
        content = f"{num_images:,} images, but no class folders"
    files = [x.name for x in entries(root) if not is_folder(x) and not is_image(x)]
    if files:
        content += f"; not read: {shown(', '.join(sorted(files)), 60)}"
    return DataError(f"{shown(folder)}: {content}; {suggestion(root)}{LAYOUT}")


def suggestion(root: str) -> str:
    """Return a hint about the nearest folder with two classes, or ""."""
    below = [x.path for x in folders_in(root) if not is_split(x.name)]
    deeper = [x.path for path in below for x in folders_in(path)]
    above = [] if folders_in(root) else [os.path.dirname(root)]
    path = next(filter(has_classes, (*below, *deeper, *above)), "")
    return f"--data_dir={shown(path)} has class folders; " if path else ""


def has_classes(root: str) -> bool:
    """Return whether two class folders have images among their first files."""
    try:
        folders = folders_in(find_folders(root).get("train", ""))
        files = [itertools.islice(files_below(x.path), 1000) for x in folders]
        return sum(any(map(is_image, some)) for some in files) > 1
    except DataError:
        return False


def refuse_annotations(names: Collection[str], location: str) -> None:
    """Raise DataError about a folder such as images/ next to one such as masks/."""
    patterns = _IMAGES, _ABOUT_IMAGES
    images, about = (next(filter(x.fullmatch, names), "") for x in patterns)
    if images and about:
        what = f"are {images}/ and {shown(about, 40)}/ classes, --class_level=1?"
        way = "Otherwise make a folder for each class, or a table"
        raise DataError(f"{shown(location)}: {what} {way}")


def class_depth(paths: Iterable[str], location: str = "") -> int:
    """Return the number of folders that name the class, from the paths of all images.

    If no class folder holds images itself, `animals/cats/1.jpg` has the class
    `animals/cats`, except for a single common name as in `CLASS/images/`.
    """
    images = collections.Counter(tuple(path.split("/")[:-1]) for path in paths)
    outermost = {folder[0] for folder in images}
    for first, *rest in images:
        if {*rest} & outermost - {first}:  # a copy, unpacked into the original
            what = f"{shown(first, 40)}/ holds folders named like the ones next to it"
            way = "move it away, or is it a class, --class_level=1?"
            raise DataError(f"{shown(location)}: {what}; {way}")
    depth = inner = 1
    while True:
        inside: dict[tuple[str, ...], set[str]] = {}
        num_inside = 0
        for folder, count in images.items():
            if len(folder) > inner:
                inside.setdefault(folder[:depth], set()).add(folder[inner])
                num_inside += count
        names = collections.Counter(itertools.chain(*inside.values()))
        if len(names) == 1 and min(map(len, images)) > inner + 1:  # amazon/images/bike
            inner += 1
            continue
        if len(names) < 2 or 2 * num_inside <= images.total():
            break
        shared = [name for name, count in names.items() if count > 1]
        if len(shared) < MIN_SHARED * len(names) and 1 < len(inside) < len(names):
            shared = [name for name in names if re.search(r"\d", name)]  # patients
        if len(shared) >= MIN_SHARED * len(names):
            outer = sorted("/".join(folder) for folder in inside)
            raise DataError(
                f"{shown(location)}: which folders are the classes, the {len(outer):,} "
                f"outer ones ({shown(', '.join(outer[:3]), 60)}), "
                f"--class_level={depth}, or the {len(names):,} inside them "
                f"({shown(', '.join(sorted(shared)[:3]), 60)}), "
                f"--class_level={inner + 1}? Or one of the outer ones alone, "
                f"--data_dir={shown(os.path.join(location, outer[0]))}"
            )
        if inner > depth or any(len(folder) <= depth for folder in images):
            break
        depth = inner = depth + 1
    return depth


def depth_of(class_names: Iterable[str]) -> int:
    """Return the number of folders in class names."""
    return 1 + max(name.count("/") for name in class_names)


def folders_in(folder: str) -> list[Entry]:
    """Return the folders in a folder, sorted by name; none if it cannot be read."""
    try:
        children = sorted(entries(folder), key=attrgetter("name"))
    except DataError:
        return []
    return [x for x in children if is_folder(x) and x.name.lower() not in JUNK]


def files_below(folder: str, above: tuple[str, ...] = ()) -> Iterator[Entry]:
    """Yield the files below a folder, and folders that are empty or link upwards."""
    above = (*above, os.path.realpath(folder))
    for entry in entries(folder):
        is_leaf = not is_folder(entry) or is_without_images(entry)
        if is_leaf or os.path.realpath(entry.path) in above:
            yield entry
        else:
            yield from files_below(entry.path, above)


def images_below(folder: str) -> Iterator[str]:
    """Yield the paths of all images below a folder."""
    return (x.path for x in files_below(folder) if is_file(x) and is_image(x))


def is_without_images(entry: Entry) -> bool:
    """Return whether a folder is empty or left behind by an archive."""
    return entry.name.lower() in JUNK or next(entries(entry.path), None) is None


def entries(folder: str) -> Iterator[Entry]:
    """Yield the visible entries of a folder, or of a URL that was listed."""
    if is_url(folder):
        yield from (x for x in listed.get(folder, {}).values() if x.name[0] != ".")
        return
    try:
        with os.scandir(folder) as children:
            for entry in children:
                if not entry.name.startswith("."):
                    yield entry
    except OSError as error:
        raise DataError(f"{shown(folder)}: cannot be read: {error.strerror}") from error
