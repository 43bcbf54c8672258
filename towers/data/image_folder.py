"""A folder of image files, one folder a class: `train/CLASS/*` or `CLASS/*`.

Names are read at the start, contents when they are needed.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator

from towers.data.cached import (
    DEFAULT_IMAGE_SIZE,
    CachedSource,
    ImageCache,
    leave_out_bad_images,
    sampled_moments,
    settle_size,
)
from towers.data.class_folders import LAYOUT, entries, find_folders, training_folder
from towers.data.image_files import FolderFiles, ImageOptions, Survey
from towers.data.paths import (
    ENDINGS,
    FORMATS_TEXT,
    OTHER_IMAGES,
    data_folder,
    is_file,
    is_folder,
    shown,
)
from towers.data.sources import TEST_FRACTION, DataSet, Trained, split_off_test
from towers.errors import DataError

CHANNELS = 3

# What archives leave behind.
JUNK = ("__macosx", "thumbs.db", "desktop.ini")


@dataclasses.dataclass
class Skipped:
    """Files that are no images, and folders without images: their number and the first
    path."""

    count: int = 0
    first: str = ""

    def add(self, path: str) -> None:
        self.count += 1
        self.first = self.first or path

    @property
    def words(self) -> str:
        """Follow the origin of the data set; empty where there are none."""
        if not self.count:
            return ""
        words = f"{self.count} other file(s) or empty folder(s)"
        return f"; {words}, as {shown(self.first)}, skipped"


# (path, words): what to do about an entry that is not as it should be.
Refuse = Callable[[str, str], None]


def load(
    data_dir: str = "",
    image_options: ImageOptions | None = None,
    trained: Trained | None = None,
) -> DataSet:
    """Lists an image folder; its files are decoded when they are read.

    The classes are the folders in `train/`, or where there is no folder for training,
    validation or testing, those in `data_dir`. Their order is that of the names, and so
    is the order of the files. Names that begin with a dot are skipped, as are files
    that are no images, and folders without images; `origin` counts the latter two.
    Without a folder for validation or testing a tenth of each class is held out for
    testing, drawn at random, the same in every run; with one alone it is for both.

    Args:
        data_dir: the folder; empty means `data`.
        image_options: size of the images, and their cache. With a survey, images of
            other kinds and the like are recorded and left out.
        trained: of a network that is only to be evaluated, whose moments are taken.
            With a folder for testing, that alone is read, and `train/` may be missing:
            classes, their order and the shape of the images are those of the network.

    Returns:
        Sources of uint8 [n, height, width, 3]; moments of a sample, `cached.SAMPLE`.

    Raises:
        DataError: the folder is not laid out like that; it has fewer than two classes,
            or for testing one that is not trained; there are image files of other
            kinds, or an image of the sample cannot be read.
    """
    options = (image_options or ImageOptions()).with_survey()
    skipped, refuse = Skipped(), _create_refuse(options.survey)
    root = data_folder(data_dir)
    folders = find_folders(root)
    validation_folder, test_folder = folders.get("validation"), folders.get("test")
    test_folder = test_folder or validation_folder
    cache = ImageCache(options.cache_mb)

    # Training images and classes, unless those of a network are known.
    train = None
    if trained is not None and test_folder:
        validation_folder, classes_in, note = None, "the run", ""
        listed = _list_classes(test_folder, Skipped(), refuse)
        folder_of = {shown(name): name for name in listed}
        classes = [folder_of.get(name, name) for name in trained.class_names]
        options, image_shape = _trained_size(options, trained)
    else:
        classes_in = "train/"
        folder = training_folder(root, folders)
        names = _list_classes(folder, skipped, refuse)
        if len(names) < 2:
            raise DataError(
                f"{folder}: {len(names)} folder(s) with {FORMATS_TEXT} files, and at "
                f"least two classes are needed; {LAYOUT}"
            )
        classes = list(names)
        files = FolderFiles(folder, names, options.max_pixels)
        options, image_shape, note = settle_size(files, CHANNELS, options)
        train = CachedSource(files, image_shape, options, cache)

    # Images for testing and validation.
    def open_folder(folder):
        names = _list_classes(folder, skipped, refuse)
        unknown = sorted(set(names) - set(classes))
        if unknown:
            raise DataError(
                f"{shown(os.path.join(folder, unknown[0]))}: there is no such class in "
                f"{classes_in}; that has {shown(', '.join(classes[:20]), 100)}"
            )
        names = {name: names.get(name, b"") for name in classes}
        files = FolderFiles(folder, names, options.max_pixels)
        if not len(files):
            raise DataError(f"{folder}: holds no images; {LAYOUT}")
        return CachedSource(files, image_shape, options, cache)

    validation = None
    if test_folder:
        test = open_folder(test_folder)
        if validation_folder:
            is_both = validation_folder == test_folder
            validation = test if is_both else open_folder(validation_folder)
        split = _words_of(folders)
    else:
        train, test = split_off_test(train, files.labels, folder)
        split = f"{TEST_FRACTION:.0%} of each class held out for testing"
    split += f"; {note}" if note else ""

    sources = train, validation, test
    (train, validation, test), bad_images = leave_out_bad_images(sources, options)
    known = trained and (trained.mean, trained.deviation)
    mean, deviation = known or sampled_moments(train)
    return DataSet(
        name="image_folder",
        train=train,
        test=test,
        class_names=tuple(map(shown, dict.fromkeys(classes))),
        mean=mean,
        deviation=deviation,
        origin=f"{root} ({split}{skipped.words}{bad_images})",
        validation=validation,
    )


def _words_of(folders):
    named = {use: os.path.basename(path) for use, path in folders.items()}
    if "test" not in named:
        return f"{named['validation']}/ for validation and testing"
    words = f"{named['test']}/ for testing"
    return (
        f"{named['validation']}/ for validation, {words}"
        if "validation" in named
        else words
    )


def _trained_size(options, trained):
    """The options and the shape to read images in as those of the training were."""
    size, shape = options.image_size, (*trained.image_shape[:2], CHANNELS)
    if size:
        return options, (size, size, CHANNELS)
    if shape[:2] == (DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE):
        # They were resized, unless all had this size.
        options = dataclasses.replace(options, image_size=DEFAULT_IMAGE_SIZE)
    return options, shape


def _create_refuse(survey: Survey | None) -> Refuse:
    """Records in a survey what cannot be used; without one the first is an error."""

    def refuse(path, words):
        if survey is None:
            raise DataError(f"{shown(path)}: {words}")
        survey.misplaced[shown(path)] = words

    return refuse


def _list_classes(folder: str, skipped: Skipped, refuse: Refuse) -> dict[str, bytes]:
    """Class -> its image files, as `FolderFiles` takes them; both in the order of the
    names."""
    names = {}
    for entry in entries(folder):
        if entry.name.lower() in JUNK:
            skipped.add(entry.path)
        elif is_folder(entry):
            images = sorted(_list_images(entry.path, skipped, refuse))
            if images:
                files = (os.fsencode(f"{name}\0") for name in images)
                names[entry.name] = b"".join(files)
            else:
                skipped.add(entry.path)
        elif entry.name.lower().endswith((*ENDINGS, *OTHER_IMAGES)):
            refuse(entry.path, f"is an image of no class; {LAYOUT}")
        else:
            skipped.add(entry.path)
    return dict(sorted(names.items()))


def _list_images(folder: str, skipped: Skipped, refuse: Refuse) -> Iterator[str]:
    for entry in entries(folder):
        # The listing has the kind of each entry; no file is inspected.
        if entry.name.lower().endswith(ENDINGS) and is_file(entry):
            yield entry.name
        elif entry.name.lower() in JUNK or _is_empty_folder(entry):
            skipped.add(entry.path)
        elif is_folder(entry):
            refuse(
                entry.path,
                "is a folder in the folder of a class, which holds images only; move "
                "them up, or the folder away",
            )
        elif entry.name.lower().endswith(OTHER_IMAGES):
            refuse(
                entry.path,
                f"only {FORMATS_TEXT} files are read; convert it, or move it away",
            )
        elif entry.is_symlink() and not os.path.exists(entry.path):
            refuse(entry.path, "is a link that leads nowhere")
        else:
            skipped.add(entry.path)


def _is_empty_folder(entry):
    return is_folder(entry) and next(entries(entry.path), None) is None
