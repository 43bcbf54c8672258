"""A folder of image files, one folder a class: `train/CLASS/*` or `CLASS/*`.

Names are read at the start, contents when they are needed.
"""

import dataclasses
import os

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
    FORMATS_TEXT,
    HEIF_HINT,
    OTHER_IMAGES,
    data_folder,
    is_file,
    is_folder,
    is_image,
    shown,
)
from towers.data.sources import TEST_FRACTION, DataSet, Source, Trained, split_off_test
from towers.errors import DataError

CHANNELS = 3

# What archives leave behind.
JUNK = ("__macosx", "thumbs.db", "desktop.ini")


@dataclasses.dataclass
class Listing:
    """Lists folders of classes.

    Attributes:
        survey: records what cannot be used; without one the first is an error.
        num_skipped: files that are no images, and folders without images.
        first_skipped: path of the first.
    """

    survey: Survey | None
    num_skipped: int = 0
    first_skipped: str = ""

    def skip(self, path: str) -> None:
        self.num_skipped += 1
        self.first_skipped = self.first_skipped or path

    def refuse(self, path: str, words: str) -> None:
        if self.survey is None:
            raise DataError(f"{shown(path)}: {words}")
        self.survey.misplaced[shown(path)] = words

    @property
    def words(self) -> str:
        """Follow the origin of the data set; empty where nothing is skipped."""
        if not self.num_skipped:
            return ""
        words = f"{self.num_skipped} other file(s) or empty folder(s)"
        return f"; {words}, as {shown(self.first_skipped)}, skipped"

    def classes(self, folder: str) -> dict[str, bytes]:
        """Class -> its image files, as `FolderFiles` takes them; both in the order of
        the names."""
        names = {}
        for entry in entries(folder):
            if is_folder(entry) and entry.name.lower() not in JUNK:
                images = sorted(self._images(entry.path))
                if images:
                    files = (os.fsencode(f"{name}\0") for name in images)
                    names[entry.name] = b"".join(files)
                else:
                    self.skip(entry.path)
            elif is_image(entry):
                self.refuse(entry.path, f"is an image of no class; {LAYOUT}")
            else:
                self.skip(entry.path)
        return dict(sorted(names.items()))

    def _images(self, folder):
        for entry in entries(folder):
            # The listing has the kind of each entry; few files are opened.
            name = entry.name.lower()
            is_read = is_file(entry) and not name.endswith(OTHER_IMAGES)
            if is_read and is_image(entry):
                yield entry.name
            elif name in JUNK or _is_empty_folder(entry):
                self.skip(entry.path)
            elif is_folder(entry):
                self.refuse(
                    entry.path,
                    "is a folder in the folder of a class, which holds images only; "
                    "move them up, or the folder away",
                )
            elif name.endswith(OTHER_IMAGES):
                words = "is of a format that is not read; convert it, or move it away"
                is_heic = name.endswith((".heic", ".heif", ".hif"))
                self.refuse(entry.path, HEIF_HINT if is_heic else words)
            elif entry.is_symlink() and not os.path.exists(entry.path):
                self.refuse(entry.path, "is a link that leads nowhere")
            else:
                self.skip(entry.path)


def _is_empty_folder(entry):
    return is_folder(entry) and next(entries(entry.path), None) is None


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
    listing, root = Listing(options.survey), data_folder(data_dir)
    folders = find_folders(root)
    validation_folder, test_folder = folders.get("validation"), folders.get("test")
    test_folder = test_folder or validation_folder
    cache = ImageCache(options.image_cache_mb)

    # Training images and classes, unless those of a network are known.
    train = None
    if trained is not None and test_folder:
        validation_folder, classes_in, note = None, "the run", ""
        listed = Listing(options.survey).classes(test_folder)
        folder_of = {shown(name): name for name in listed}
        classes = [folder_of.get(name, name) for name in trained.class_names]
        options, image_shape = _trained_size(options, trained)
    else:
        classes_in = "train/"
        folder = training_folder(root, folders)
        names = listing.classes(folder)
        if len(names) < 2:
            misplaced = options.survey.misplaced if options.survey else {}
            first = [f"; {path} {words}" for path, words in misplaced.items()][:1]
            raise DataError(
                f"{folder}: {len(names)} folder(s) with {FORMATS_TEXT} files, and at "
                f"least two classes are needed; {LAYOUT}{''.join(first)}"
            )
        classes = list(names)
        files = FolderFiles(folder, names, options.max_image_pixels)
        options, image_shape, note = settle_size(files, CHANNELS, options)
        train = CachedSource(files, image_shape, options, cache)

    # Images for testing and validation.
    def open_folder(folder):
        names = listing.classes(folder)
        unknown = sorted(set(names) - set(classes))
        if unknown:
            raise DataError(
                f"{shown(os.path.join(folder, unknown[0]))}: there is no such class in "
                f"{classes_in}; that has {shown(', '.join(classes[:20]), 100)}"
            )
        names = {name: names.get(name, b"") for name in classes}
        files = FolderFiles(folder, names, options.max_image_pixels)
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
        origin=f"{root} ({split}{listing.words}{bad_images})",
        validation=validation,
    )


def training_images(data_dir: str, image_shape: tuple[int, int, int]) -> Source:
    """The training images that `load` gives where all can be read; reads none.
    DataError where the folder is missing or laid out otherwise."""
    root = data_folder(data_dir)
    folders = find_folders(root)
    folder = training_folder(root, folders)
    files = FolderFiles(folder, Listing(None).classes(folder))
    train = CachedSource(files, image_shape, ImageOptions(image_cache_mb=0.0))
    if folders.keys() - {"train"}:
        return train
    return split_off_test(train, files.labels, folder)[0]


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
