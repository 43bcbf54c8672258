"""Folders of image files with a folder for each class, `[train/]CLASS/*`."""

import collections
import dataclasses
import functools
import os
import re
from operator import attrgetter

import numpy as np

from towers.config.choices import MAX_IMAGE_PIXELS
from towers.data.files import class_folders, reading, splits
from towers.data.files.cached import CachedSource
from towers.data.files.class_folders import LAYOUT
from towers.data.files.image_files import ImageOptions, Survey
from towers.data.files.index import Index, Names
from towers.data.files.paths import (
    HEIF_HINT,
    OTHER_IMAGES,
    Entry,
    class_name,
    data_folder,
    ending,
    is_file,
    is_folder,
    is_image,
)
from towers.data.inventory import Inventory
from towers.data.sources import DataSet, Source, Trained, split_off_test
from towers.errors import DataError
from towers.messages import shown

# Names such as 1_mask.png next to 1.png.
_MASKS = re.compile(rb"(?i)[^a-z\0](?:masks?|segmentation|thumb(?:nail)?)\.\w+\0")


@dataclasses.dataclass
class Listing:
    """Lister of the images in class folders."""

    survey: Survey | None
    inventory: Inventory = dataclasses.field(default_factory=Inventory)
    class_level: int = 0  # as in `load`
    depth: int = 0  # number of folders that name a class; 0 until the first listing
    num_nested: int = 0  # number of images in folders inside class folders

    def skip(self, entry: Entry) -> None:
        """Record an entry that is not used."""
        kind = "folders without images" if is_folder(entry) else "other files"
        self.inventory.leave_out(kind, entry.path)

    def refuse(self, path: str, message: str) -> None:
        """Raise DataError about a path, or add it to the survey."""
        if self.survey is None:
            raise DataError(f"{shown(path)}: {message}")
        self.survey.misplaced[path] = message

    def index(self, folder: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Index:
        """Return the images of a folder, sorted by class and file name."""
        # Bytes take a quarter of the memory of texts.
        by_class: dict[str, bytes] = {}
        loose = []
        for entry in sorted(class_folders.entries(folder), key=attrgetter("name")):
            if not is_folder(entry) and is_image(entry):
                loose.append(entry.path)
            elif not is_folder(entry) or class_folders.is_without_images(entry):
                self.skip(entry)
            elif images := sorted(self._images(entry)):
                by_class[entry.name] = b"".join(os.fsencode(f"{x}\0") for x in images)
            else:
                self.skip(entry)
        for path in loose if by_class else ():
            self.refuse(path, f"is an image outside of class folders; {LAYOUT}")
        if not self.depth:
            self.depth = 1
            if not self.class_level:
                class_folders.refuse_annotations(by_class, folder)
                if self.num_nested:
                    self.depth = class_folders.class_depth(_paths(by_class), folder)
        if self.depth > 1 or self.class_level > 1:
            by_class = self._regrouped(by_class, folder)
        if masks := sum(len(_MASKS.findall(x)) for x in by_class.values()):
            what = "images named like masks or thumbnails are images of classes"
            self.inventory.infer("masks", f"{masks:,} {what}")
        classes = tuple(map(class_name, by_class))
        for name, count in collections.Counter(classes).items():
            if count > 1:
                why = "two folders of this name, but for spaces or Unicode; join them"
                raise DataError(f"{shown(os.path.join(folder, name))}: {why}")
        counts = [paths.count(0) for paths in by_class.values()]
        labels = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        names = Names(b"".join(by_class.values()), folder)
        numbers = np.arange(len(labels), dtype=np.int32)
        return Index(names, numbers, labels, classes, max_pixels=max_pixels)

    def _regrouped(self, by_class, folder):
        grouped: dict[str, list[bytes]] = {}
        level = self.class_level
        begin, end = (level - 1, level) if level else (0, self.depth)
        self.num_nested = 0
        for path in _paths(by_class):
            self.num_nested += path.count("/") > end
            if name := "/".join(path.split("/")[:-1][begin:end]):
                grouped.setdefault(name, []).append(os.fsencode(f"{path}\0"))
            else:
                text = f"class_level={level}: is in fewer folders"
                self.refuse(os.path.join(folder, path), text)
        order = sorted(grouped, key=lambda name: name.split("/"))
        return {name: b"".join(grouped[name]) for name in order}

    def _images(self, folder):
        begin, paths = len(folder.path) - len(folder.name), []
        for entry in class_folders.files_below(folder.path):
            # The listing has the kind of each entry; few files are opened.
            kind = ending(entry.name)
            if is_file(entry) and kind not in OTHER_IMAGES and is_image(entry):
                paths.append(entry.path[begin:])
            elif is_folder(entry):
                if class_folders.is_without_images(entry):
                    self.skip(entry)
                else:
                    self.refuse(entry.path, "is a symbolic link to a parent folder")
            elif kind in OTHER_IMAGES:
                message = "is of a format that is not read; convert it, or move it away"
                is_heic = kind in (".heic", ".heif", ".hif")
                self.refuse(entry.path, HEIF_HINT if is_heic else message)
            elif os.path.islink(entry.path) and not os.path.exists(entry.path):
                self.refuse(entry.path, "is a broken symbolic link")
            else:
                self.skip(entry)
        num_nested = sum(path.count("/") > 1 for path in paths)
        if num_nested and not self.class_level and _has_splits(folder.path):
            hint = class_folders.suggestion(os.path.dirname(folder.path))
            why = "contains folders for training or testing, and not one class"
            way = f"{hint}{LAYOUT}; --class_level=1 if it is a class folder"
            raise DataError(f"{shown(folder.path)}: {why}; {way}")
        self.num_nested += num_nested
        return paths


def _has_splits(folder):
    names, _ = class_folders.inside(folder)
    splits = {split for split in map(class_folders.split_of, names) if split}
    inner = (os.path.join(folder, x) for x in names if class_folders.is_split(x))
    return len(splits) > 1 or any(class_folders.inside(path)[0] for path in inner)


def _paths(by_folder):
    return [os.fsdecode(x) for x in b"".join(by_folder.values()).split(b"\0")[:-1]]


def load(
    data_dir: str = "",
    image_options: ImageOptions | None = None,
    trained: Trained | None = None,
    class_level: int = 0,
) -> DataSet:
    """Load an image folder or its URL, by default `data`.

    Classes are the folders in `train/`, or in `data_dir` without split folders, or
    folders inside these, see `class_folders.class_depth`; `class_level` chooses their
    level, counted from 1. Classes and files are sorted by name. Splits and `trained` as
    in `splits.data_set`.
    """
    options, inventory = (image_options or ImageOptions()).with_survey(), Inventory()
    if reading.is_url(data_dir):
        root = data_dir.rstrip("/")
        reading.list_folders(root)
    else:
        root = data_folder(data_dir)
    listing = Listing(options.survey, inventory, class_level)
    if trained is not None:
        listing.depth = class_folders.depth_of(trained.class_names)
    folders = class_folders.find_folders(root, inventory, class_level)

    @functools.cache
    def listed(folder):
        return listing.index(folder, options.max_image_pixels)

    def open_split(folder, classes, where):
        index = listed(folder)
        if len(index.class_names) < (2 if classes is None else 1):
            counts = dict.fromkeys(index.class_names, len(index))
            text = str(class_folders.misfit(root, folder, counts))
            if options.survey and options.survey.misplaced:
                path, problem = next(iter(options.survey.misplaced.items()))
                text += f"; {shown(path)} {problem}"
            raise DataError(text)
        return index if classes is None else index.with_classes(classes, where)

    if trained is None:
        class_folders.training_folder(root, folders)
    data = splits.data_set(
        "image_folder",
        root,
        {x: functools.partial(open_split, path) for x, path in folders.items()},
        options,
        trained,
        names={x: f"{os.path.basename(path)}/" for x, path in folders.items()},
        inventory=inventory,
    )
    texts = []
    if listing.depth > 1 and not class_level:
        texts.append(f"{listing.depth} nested folders name each class")
    if listing.num_nested:
        texts.append(f"{listing.num_nested:,} images in folders inside class folders")
    if texts:
        inventory.infer("folders", "; ".join(texts))
    return data


def training_images(
    data_dir: str, image_shape: tuple[int, int, int], class_level: int = 0
) -> Source:
    """Return the training images that `load` gives if all can be read; reads none."""
    root = data_folder(data_dir)
    folders = class_folders.find_folders(root, None, class_level)
    folder = class_folders.training_folder(root, folders)
    files = Listing(None, class_level=class_level).index(folder)
    train = CachedSource(files, image_shape, ImageOptions(image_cache_mb=0.0))
    if folders.keys() - {"train"}:
        return train
    return split_off_test(train, files.labels, folder)[0]
