"""A folder of image files with a folder for each class, `train/CLASS/*` or `CLASS/*`,
which is read recursively.

Names are read at the start, contents when they are needed.
"""

import dataclasses
import functools
import os
from operator import attrgetter

import numpy as np

from towers.config.choices import MAX_IMAGE_PIXELS
from towers.data.files import containers, reading, splits
from towers.data.files.cached import CachedSource
from towers.data.files.class_folders import (
    JUNK,
    LAYOUT,
    are_unlabeled,
    class_depth,
    class_folder,
    depth_of,
    entries,
    files_below,
    find_folders,
    folders_in,
    is_without_images,
    leave_out_neighbors,
    misfit,
    split_folders,
    suggestion,
    training_folder,
)
from towers.data.files.image_files import ImageOptions, Survey
from towers.data.files.index import Index, Names, index_of
from towers.data.files.paths import (
    HEIF_HINT,
    OTHER_IMAGES,
    class_name,
    data_folder,
    ending,
    is_file,
    is_folder,
    is_image,
    is_image_name,
    shown,
)
from towers.data.inventory import Inventory
from towers.data.sources import DataSet, Source, Trained, split_off_test
from towers.errors import DataError


@dataclasses.dataclass
class Listing:
    """Lists folders of classes.

    What cannot be used is an error, or goes to the survey or the inventory.
    `num_nested` counts images in folders inside the folders of classes. `depth` is the
    number of folders that name a class, 0 until one is listed; `class_level` as of
    `load`.
    """

    survey: Survey | None
    inventory: Inventory = dataclasses.field(default_factory=Inventory)
    num_nested: int = 0
    depth: int = 0
    class_level: int = 0

    def skip(self, path: str) -> None:
        kind = "folders without images" if os.path.isdir(path) else "other files"
        self.inventory.leave_out(kind, path)

    def refuse(self, path: str, message: str) -> None:
        if self.survey is None:
            raise DataError(f"{shown(path)}: {message}")
        self.survey.misplaced[path] = message

    def index(self, folder: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Index:
        """The images of a folder, in the order of the names of classes and files."""
        by_class = self.classes(folder)
        counts = [names.count(0) for names in by_class.values()]
        labels = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        names = Names(b"".join(by_class.values()), folder)
        numbers = np.arange(len(labels), dtype=np.int32)
        return Index(names, numbers, labels, tuple(by_class), max_pixels=max_pixels)

    def classes(self, folder: str) -> dict[str, bytes]:
        """Class -> the paths of its images from the folder, each followed by a zero
        byte."""
        by_folder, loose, num_own = {}, [], 0
        for entry in sorted(entries(folder), key=attrgetter("name")):
            if is_folder(entry) and not is_without_images(entry):
                num_nested = self.num_nested
                images = sorted(self._images(entry.path))
                if not images:
                    self.skip(entry.path)
                    continue
                if self.num_nested > num_nested and _is_data_set(entry.path):
                    raise DataError(
                        f"{shown(entry.path)}: is no class, as there are folders for "
                        f"training or testing in it; {suggestion(folder)}{LAYOUT}"
                    )
                num_own += len(images) - (self.num_nested - num_nested)
                paths = (f"{entry.name}/{image}\0" for image in images)
                by_folder[entry.name] = b"".join(map(os.fsencode, paths))
            elif is_image(entry) and not is_folder(entry):
                loose.append(entry.path)
            else:
                self.skip(entry.path)
        for path in loose if by_folder else ():
            self.refuse(path, f"is an image of no class; {LAYOUT}")
        if not self.depth and not self.class_level:
            is_flat = num_own >= self.num_nested
            self.depth = 1 if is_flat else class_depth(_paths(by_folder), folder)
        if self.depth > 1 or self.class_level > 1:
            regrouped = {}
            for path in _paths(by_folder):
                name = class_folder(path, self.depth, self.class_level)
                if not name:
                    why = f"class_level={self.class_level}: is not in so many folders"
                    self.refuse(os.path.join(folder, path), why)
                regrouped.setdefault(name, []).append(os.fsencode(f"{path}\0"))
            regrouped.pop("", None)
            order = sorted(regrouped, key=lambda name: name.split("/"))
            by_folder = {name: b"".join(regrouped[name]) for name in order}
        by_class = {}
        for name, paths in by_folder.items():
            if class_name(name) in by_class:
                raise DataError(
                    f"{shown(os.path.join(folder, name))}: there are two folders of "
                    "this name, which differ in spaces or in composed letters "
                    "(Unicode's NFC and NFD); move their images to one of them"
                )
            by_class[class_name(name)] = paths
        return by_class

    def _images(self, folder):
        """Paths of the images in and below a folder, from there."""
        begin = len(os.path.join(folder, ""))
        for entry in files_below(folder):
            # The listing has the kind of each entry; few files are opened.
            kind = ending(entry.name)
            if is_file(entry) and kind not in OTHER_IMAGES and is_image(entry):
                path = entry.path[begin:]
                self.num_nested += path != entry.name
                yield path
            elif is_folder(entry):
                if is_without_images(entry):
                    self.skip(entry.path)
                else:
                    self.refuse(entry.path, "is a link to a folder that it is in")
            elif kind in OTHER_IMAGES:
                message = "is of a format that is not read; convert it, or move it away"
                is_heic = kind in (".heic", ".heif", ".hif")
                self.refuse(entry.path, HEIF_HINT if is_heic else message)
            elif entry.is_symlink() and not os.path.exists(entry.path):
                self.refuse(entry.path, "is a link that leads nowhere")
            else:
                self.skip(entry.path)


def _paths(by_folder):
    return [os.fsdecode(x) for x in b"".join(by_folder.values()).split(b"\0")[:-1]]


def _is_data_set(folder):
    """True if it has folders for training and testing, or train/CLASS."""
    splits = split_folders(folder, (x.name for x in folders_in(folder)), lambda x: ())
    return len(splits) > 1 or any(
        folders_in(os.path.join(folder, name)) for name in splits.values()
    )


def load(
    data_dir: str = "",
    image_options: ImageOptions | None = None,
    trained: Trained | None = None,
    class_level: int = 0,
) -> DataSet:
    """Lists an image folder, or its URL, by default `data`; its files are decoded when
    they are read, to uint8 [n, height, width, 3].

    The classes are the folders in `train/`, or in `data_dir` where there is no folder
    for a split, or folders inside these, see `class_depth`; all images in and below the
    folder of a class are of that class. With `class_level` the classes are the folders
    of that level, counted from 1, below the folder of the classes. Classes and files
    are in the order of their names. Names that begin with a dot are skipped, as are
    other files and folders without images, which the inventory counts. Missing splits
    and `trained` are as in `splits.data_set`.

    DataError if the folder is not laid out like that; it has fewer than two classes, or
    for testing one that is not trained; there are image files of other kinds, or an
    image of the sample cannot be read.
    """
    options = (image_options or ImageOptions()).with_survey()
    if reading.is_url(data_dir):
        return _load_url(data_dir, class_level, options, trained)
    inventory, root = Inventory(), data_folder(data_dir)
    listing = Listing(options.survey, inventory, class_level=class_level)
    if trained is not None:
        listing.depth = depth_of(trained.class_names)
    folders = find_folders(root, inventory, class_level)

    @functools.cache
    def listed(folder):
        return listing.index(folder, options.max_image_pixels)

    def open_split(folder, classes, where):
        index = listed(folder)
        if classes is not None and len(index):
            return index.with_classes(classes, where)
        if classes is not None:
            raise misfit(root, folder, {})
        if len(index.class_names) < 2:
            counts = dict.fromkeys(index.class_names, len(index))
            misplaced = options.survey.misplaced if options.survey else {}
            first = [f"; {shown(x)} {text}" for x, text in misplaced.items()][:1]
            raise DataError(f"{misfit(root, folder, counts)}{''.join(first)}")
        return index

    if trained is None:
        training_folder(root, folders)
    data = splits.data_set(
        "image_folder",
        root,
        {x: functools.partial(open_split, path) for x, path in folders.items()},
        options,
        trained,
        names={x: f"{os.path.basename(path)}/" for x, path in folders.items()},
        inventory=inventory,
    )
    if class_level:
        inventory.infer("folders", f"folders of level {class_level} name the classes")
    elif listing.depth > 1:
        inventory.infer("folders", f"{listing.depth} nested folders name each class")
    elif listing.num_nested:
        nested = f"{listing.num_nested:,} images in folders inside class folders"
        inventory.infer("folders", nested)
    return data


def _load_url(url, class_level, options, trained) -> DataSet:
    """Load the images below a URL, in the classes and the order that the same folder
    has on the disk."""
    location, openers, inventory = url.rstrip("/"), {}, Inventory()
    found = [x[len(location) :].strip("/") for x in reading.matches(location)]
    found = [x for x in found if not _is_left_out(x)]
    paths = list(filter(is_image_name, found))
    inventory.leave_out("other files", *(x for x in found if not is_image_name(x)))

    def names_in(name, folder=""):
        inside = (x.removeprefix(folder) for x in paths if x.startswith(folder))
        return sorted({x.split("/")[0] for x in inside if "/" in x})

    names = names_in("")
    splits = split_folders(
        location, names, lambda name: names_in(name, f"{name}/"), class_level
    )
    folders = {}
    for split, name in splits.items():
        folders[split] = f"{name}/"
        inside = [x for x in paths if x.startswith(f"{name}/")]
        while all(x.startswith(f"{folders[split]}{name}/") for x in inside):
            folders[split] += f"{name}/"  # as in archives
    if splits:
        leave_out_neighbors(inventory, splits, names)
    elif paths:
        folders = {"train": ""}
    files = {
        split: sorted(
            (x.removeprefix(folder) for x in paths if x.startswith(folder)),
            key=lambda x: x.split("/", 1),
        )
        for split, folder in folders.items()
    }
    train = folders.get("train", "")
    depth = depth_of(trained.class_names) if trained else 0
    if not depth:
        place = f"{location}/{train}".rstrip("/")
        depth = class_depth(files.get("train", ()), place) if not class_level else 1
    for split, folder in folders.items():
        inside = files[split]
        if class_level > 1:
            inside.sort(key=lambda path: class_folder(path, depth, class_level))
        classes = [class_folder(path, depth, class_level) or None for path in inside]
        is_unlabeled = split != "train" and "train" in files
        is_unlabeled &= are_unlabeled(names_in("", folder), names_in("", train))
        if is_unlabeled:
            classes = [None] * len(inside)
        elif None in classes:
            path = f"{location}/{folder}{inside[classes.index(None)]}"
            raise DataError(f"{shown(path)}: is an image of no class; {LAYOUT}")
        openers[split] = functools.partial(
            index_of,
            [f"{location}/{folder}{path}" for path in inside],
            classes,
            max_pixels=options.max_image_pixels,
            settle=_in_their_order,
        )
    return containers.data_set(
        "image_folder", location, openers, options, trained, inventory
    )


def _is_left_out(path):
    names = path.split("/")
    return any(name.startswith(".") or name.lower() in JUNK for name in names)


def _in_their_order(labels, names):
    """As `settle_classes`; classes keep their order."""
    classes = tuple(map(class_name, names))
    return {"labels": labels.astype(np.int32), "class_names": classes}


def training_images(
    data_dir: str, image_shape: tuple[int, int, int], class_level: int = 0
) -> Source:
    """The training images that `load` gives where all can be read; reads none.
    DataError where the folder is missing or laid out otherwise."""
    root = data_folder(data_dir)
    folders = find_folders(root, None, class_level)
    folder = training_folder(root, folders)
    files = Listing(None, class_level=class_level).index(folder)
    train = CachedSource(files, image_shape, ImageOptions(image_cache_mb=0.0))
    if folders.keys() - {"train"}:
        return train
    return split_off_test(train, files.labels, folder)[0]
