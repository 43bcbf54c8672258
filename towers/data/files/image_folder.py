"""A folder of image files with a folder for each class, `train/CLASS/*` or `CLASS/*`,
which is read recursively.

Names are read at the start, contents when they are needed.
"""

import bisect
import collections
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np

from towers.config.choices import MAX_IMAGE_PIXELS
from towers.data.files import class_folders, reading, splits
from towers.data.files.cached import CachedSource
from towers.data.files.image_files import ImageOptions, Survey
from towers.data.files.index import Index, Names
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
)
from towers.data.inventory import Inventory
from towers.data.sources import DataSet, Source, Trained, split_off_test
from towers.errors import DataError
from towers.messages import shown


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
    inside = staticmethod(class_folders.inside)

    def skip(self, path: str) -> None:
        kind = "folders without images" if os.path.isdir(path) else "other files"
        self.inventory.leave_out(kind, path)

    def refuse(self, path: str, message: str) -> None:
        if self.survey is None:
            raise DataError(f"{shown(path)}: {message}")
        self.survey.misplaced[path] = message

    def index(self, folder: str, max_pixels: int = MAX_IMAGE_PIXELS) -> Index:
        """Return the images of a folder, in the order of the names of classes and
        files.
        """
        by_folder, loose = {}, []
        for name, images in self.by_folder(folder):
            if not name:
                loose = images
                continue
            num_nested = sum("/" in image for image in images)
            if num_nested and self._is_data_set(os.path.join(folder, name)):
                raise DataError(
                    f"{shown(os.path.join(folder, name))}: is no class, as there are "
                    "folders for training or testing in it; "
                    f"{class_folders.suggestion(folder)}{class_folders.LAYOUT}"
                )
            self.num_nested += num_nested
            paths = (f"{name}/{image}\0" for image in images)
            by_folder[name] = b"".join(map(os.fsencode, paths))
        for path in loose if by_folder else ():
            place = os.path.join(folder, path)
            self.refuse(place, f"is an image of no class; {class_folders.LAYOUT}")
        if not self.depth:
            self.depth = 1
            if self.num_nested and not self.class_level:
                self.depth = class_folders.class_depth(_paths(by_folder), folder)
        if self.depth > 1 or self.class_level > 1:
            regrouped, self.num_nested = {}, 0
            for path in _paths(by_folder):
                self.num_nested += path.count("/") > (self.class_level or self.depth)
                name = class_folders.class_folder(path, self.depth, self.class_level)
                if not name:
                    why = f"class_level={self.class_level}: is not in so many folders"
                    self.refuse(os.path.join(folder, path), why)
                regrouped.setdefault(name, []).append(os.fsencode(f"{path}\0"))
            regrouped.pop("", None)
            order = sorted(regrouped, key=lambda name: name.split("/"))
            by_folder = {name: b"".join(regrouped[name]) for name in order}
        classes = tuple(map(class_name, by_folder))
        for name, count in collections.Counter(classes).items():
            if count > 1:
                raise DataError(
                    f"{shown(os.path.join(folder, name))}: there are two folders of "
                    "this name, which differ in spaces or in composed letters "
                    "(Unicode's NFC and NFD); move their images to one of them"
                )
        counts = [paths.count(0) for paths in by_folder.values()]
        labels = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        names = Names(b"".join(by_folder.values()), folder)
        numbers = np.arange(len(labels), dtype=np.int32)
        return Index(names, numbers, labels, classes, max_pixels=max_pixels)

    def by_folder(self, folder: str) -> Iterator[tuple[str, list[str]]]:
        """Yield the name of each folder in a folder, and the sorted paths of the images
        in and below it, then "" and the images next to these.
        """
        loose = []
        for entry in sorted(class_folders.entries(folder), key=attrgetter("name")):
            if is_folder(entry) and not class_folders.is_without_images(entry):
                if images := sorted(self._images(entry.path)):
                    yield entry.name, images
                else:
                    self.skip(entry.path)
            elif is_image(entry) and not is_folder(entry):
                loose.append(entry.name)
            else:
                self.skip(entry.path)
        yield "", loose

    def _is_data_set(self, folder):
        """True if it has folders for training and testing, or train/CLASS."""
        names, _ = self.inside(folder)
        splits = class_folders.split_folders(folder, names, lambda path: ([], []))
        paths = [os.path.join(folder, name) for name in splits.values()]
        return len(paths) > 1 or any(self.inside(path)[0] for path in paths)

    def _images(self, folder):
        """Paths of the images in and below a folder, from there."""
        begin = len(os.path.join(folder, ""))
        for entry in class_folders.files_below(folder):
            # The listing has the kind of each entry; few files are opened.
            kind = ending(entry.name)
            if is_file(entry) and kind not in OTHER_IMAGES and is_image(entry):
                yield entry.path[begin:]
            elif is_folder(entry):
                if class_folders.is_without_images(entry):
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


@dataclasses.dataclass
class RemoteListing(Listing):
    """Lists folders of classes below a URL, from the sorted URLs of all files."""

    files: Sequence[str] = ()

    def inside(self, folder: str) -> tuple[list[str], list[str]]:
        paths = self._below(folder)
        names = {path.split("/")[0] for path in paths if "/" in path}
        return sorted(names), [path for path in paths if "/" not in path]

    def by_folder(self, folder: str) -> Iterator[tuple[str, list[str]]]:
        found = {}
        for path in self._below(folder):
            name, slash, rest = path.partition("/")
            if is_image_name(path):
                found.setdefault(name if slash else "", []).append(rest or name)
            else:
                self.skip(f"{folder}/{path}")
        return ((name, sorted(found[name])) for name in sorted(found))

    def _below(self, folder):
        """The paths from a folder of the files in and below it."""
        begin = bisect.bisect(self.files, f"{folder}/")
        end = bisect.bisect(self.files, f"{folder}0")  # follows "/"
        paths = [x.removeprefix(f"{folder}/") for x in self.files[begin:end]]
        return [x for x in paths if not any(map(_is_left_out, x.split("/")))]


def _is_left_out(name):
    return name.startswith(".") or name.lower() in class_folders.JUNK


def _paths(by_folder):
    return [os.fsdecode(x) for x in b"".join(by_folder.values()).split(b"\0")[:-1]]


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
    options, inventory = (image_options or ImageOptions()).with_survey(), Inventory()
    if reading.is_url(data_dir):
        root, files = data_dir.rstrip("/"), reading.matches(data_dir)
        listing = RemoteListing(options.survey, inventory, files=files)
    else:
        root, listing = data_folder(data_dir), Listing(options.survey, inventory)
    listing.class_level = class_level
    if trained is not None:
        listing.depth = class_folders.depth_of(trained.class_names)
    folders = class_folders.find_folders(root, inventory, class_level, listing.inside)

    @functools.cache
    def listed(folder):
        return listing.index(folder, options.max_image_pixels)

    def open_split(folder, classes, where):
        index = listed(folder)
        if len(index.class_names) < (2 if classes is None else 1):
            counts = dict.fromkeys(index.class_names, len(index))
            misplaced = options.survey.misplaced if options.survey else {}
            first = [f"; {shown(x)} {text}" for x, text in misplaced.items()][:1]
            error = class_folders.misfit(root, folder, counts)
            raise DataError(f"{error}{''.join(first)}")
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
    """The training images that `load` gives where all can be read; reads none.
    DataError where the folder is missing or laid out otherwise.
    """
    root = data_folder(data_dir)
    folders = class_folders.find_folders(root, None, class_level)
    folder = class_folders.training_folder(root, folders)
    files = Listing(None, class_level=class_level).index(folder)
    train = CachedSource(files, image_shape, ImageOptions(image_cache_mb=0.0))
    if folders.keys() - {"train"}:
        return train
    return split_off_test(train, files.labels, folder)[0]
