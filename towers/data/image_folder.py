"""A folder of image files, one folder a class: `train/CLASS/*` or `CLASS/*`.

Names are read at the start, contents when they are needed.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator

from towers.data.decoding import AS_STORED, DEFAULT_IMAGE_SIZE, Decoding, Survey
from towers.data.encoded import EncodedSource, sampled_moments, settle_size
from towers.data.image_files import ImageFiles
from towers.data.paths import (
    ENDINGS,
    ENDINGS_TEXT,
    OTHER_IMAGES,
    is_file,
    is_folder,
)
from towers.data.sources import (
    TEST_FRACTION,
    DataSet,
    Trained,
    data_folder,
    shown,
    split_off_test,
)
from towers.errors import DataError

TEST_FOLDERS = ("test", "val", "validation")
CHANNELS = 3

LAYOUT = (
    "an image folder has train/CLASS/*.png|jpg|webp|bmp and, if it has images for "
    "testing, test/, val/ or validation/ alike, or CLASS/* alone; --data_dir names the "
    "folder that train/ or the classes are in"
)


@dataclasses.dataclass
class Skipped:
    """Files that are no images: their number and the first path."""

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
        return f"; {self.count} other file(s), as {shown(self.first)}, skipped"


# (path, words): what to do about an entry that is not as it should be.
Refuse = Callable[[str, str], None]


def load(
    data_dir: str = "",
    decoding: Decoding = AS_STORED,
    trained: Trained | None = None,
) -> DataSet:
    """Lists an image folder; its files are decoded when they are read.

    The classes are the folders in `train/`, or without one, and without a folder for
    testing, those in `data_dir`. Their order is that of the names, and so is the order
    of the files. Names that begin with a dot are skipped, as are files that are no
    images; `origin` counts those. Without a folder for testing a tenth of each class is
    held out, drawn at random, the same in every run.

    Args:
        data_dir: the folder; empty means `data`.
        decoding: size of the images, and their cache. With a survey, images of other
            kinds and the like are recorded and left out.
        trained: of a network that is only to be evaluated, whose moments are taken.
            With a folder for testing, that alone is read, and `train/` may be missing:
            classes, their order and the shape of the images are those of the network.

    Returns:
        Sources of uint8 [n, height, width, 3]; moments of a sample, `encoded.SAMPLE`.

    Raises:
        DataError: the folder is not laid out like that; it has fewer than two classes,
            one without images, or for testing one that is not trained; there are image
            files of other kinds, or an image of the sample cannot be read.
    """
    root = data_folder(data_dir)
    test_folders = [x for x in TEST_FOLDERS if os.path.isdir(os.path.join(root, x))]
    if trained is not None and test_folders:
        return _load_test_only(root, test_folders, decoding, trained)
    folder = _training_folder(root)
    skipped, refuse = Skipped(), _create_refuse(decoding.survey)
    names = _list_classes(folder, skipped, refuse)
    if len(names) < 2:
        raise DataError(
            f"{folder}: {len(names)} folder(s), and at least two classes are needed; "
            f"{LAYOUT}"
        )
    for class_name, files in names.items():
        if not files:
            raise DataError(
                f"{shown(os.path.join(folder, class_name))}: holds no {ENDINGS_TEXT} "
                "file; remove the folder, or put the images of the class there"
            )
    files = ImageFiles(folder, names, decoding)
    decoding, image_shape, note = settle_size(files, CHANNELS, decoding)
    train = EncodedSource(files, image_shape, decoding)
    if test_folders:
        test_folder = os.path.join(root, test_folders[0])
        test_names = _list_classes(test_folder, skipped, refuse)
        test_files = _test_files(test_folder, test_names, names, "train/", decoding)
        # They are kept in memory where there is room left.
        left = dataclasses.replace(
            decoding, cache_mb=decoding.cache_mb - train.cache_mb
        )
        test = EncodedSource(test_files, image_shape, left)
        split = _words_of(test_folders)
    else:
        train, test = split_off_test(train, files.labels, folder)
        split = f"{TEST_FRACTION:.0%} of each class held out for testing"
    if note:
        split += f"; {note}"
    known = trained and (trained.mean, trained.deviation)
    mean, deviation = known or sampled_moments(train)
    return DataSet(
        name="image_folder",
        train=train,
        test=test,
        class_names=tuple(map(shown, names)),
        mean=mean,
        deviation=deviation,
        origin=f"{root} ({split}{skipped.words})",
    )


def _load_test_only(
    root: str, folders: list[str], decoding: Decoding, trained: Trained
) -> DataSet:
    """The images for testing alone, as those of the network's data set.

    Args:
        root: the folder.
        folders: those for testing in it; the first is read.
    """
    skipped, refuse = Skipped(), _create_refuse(decoding.survey)
    folder = os.path.join(root, folders[0])
    names = _list_classes(folder, skipped, refuse)
    folder_of = {shown(name): name for name in names}
    class_folders = [folder_of.get(name, name) for name in trained.class_names]
    files = _test_files(folder, names, class_folders, "the run", decoding)
    size, image_shape = decoding.image_size, (*trained.image_shape[:2], CHANNELS)
    if size:
        image_shape = (size, size, CHANNELS)
    elif image_shape[:2] == (DEFAULT_IMAGE_SIZE, DEFAULT_IMAGE_SIZE):
        # As the images of the training were, unless all had this size.
        decoding = dataclasses.replace(decoding, image_size=DEFAULT_IMAGE_SIZE)
    return DataSet(
        name="image_folder",
        train=None,
        test=EncodedSource(files, image_shape, decoding),
        class_names=tuple(map(shown, dict.fromkeys(class_folders))),
        mean=trained.mean,
        deviation=trained.deviation,
        origin=f"{root} ({_words_of(folders)}{skipped.words})",
    )


def _words_of(test_folders):
    unused = f", {test_folders[1]}/ unused" if test_folders[1:] else ""
    return f"{test_folders[0]}/ for testing{unused}"


def _training_folder(root):
    """`train/`, or the root where it has the classes."""
    folder = os.path.join(root, "train")
    if os.path.isdir(folder):
        return folder
    if not os.path.isdir(root):
        raise DataError(f"{root}: there is no such folder; {LAYOUT}")
    if any(os.path.isdir(os.path.join(root, name)) for name in TEST_FOLDERS):
        raise DataError(f"{root} has no folder train/; {LAYOUT}")
    return root


def _test_files(folder, names, classes, place, decoding):
    """The images for testing, with the labels of `classes`, those of a place."""
    unknown = sorted(set(names) - set(classes))
    if unknown:
        raise DataError(
            f"{shown(os.path.join(folder, unknown[0]))}: there is no such class in "
            f"{place}; that has {shown(', '.join(list(classes)[:20]), 100)}"
        )
    names = {name: names.get(name, b"") for name in classes}
    files = ImageFiles(folder, names, decoding)
    if not len(files):
        raise DataError(f"{folder}: holds no images; {LAYOUT}")
    return files


def _create_refuse(survey: Survey | None) -> Refuse:
    """Records in a survey what cannot be used; without one the first is an error."""

    def refuse(path, words):
        if survey is None:
            raise DataError(f"{shown(path)}: {words}")
        survey.misplaced[shown(path)] = words

    return refuse


def _list_classes(folder: str, skipped: Skipped, refuse: Refuse) -> dict[str, bytes]:
    """Class -> its image files, as `ImageFiles` takes them; both in the order of the
    names."""
    names = {}
    for entry in _entries(folder):
        if is_folder(entry):
            images = sorted(_list_images(entry.path, skipped, refuse))
            names[entry.name] = b"".join(os.fsencode(f"{name}\0") for name in images)
        elif entry.name.lower().endswith((*ENDINGS, *OTHER_IMAGES)):
            refuse(entry.path, f"is an image of no class; {LAYOUT}")
        else:
            skipped.add(entry.path)
    return dict(sorted(names.items()))


def _list_images(folder: str, skipped: Skipped, refuse: Refuse) -> Iterator[str]:
    for entry in _entries(folder):
        # The listing has the kind of each entry; no file is inspected.
        if entry.name.lower().endswith(ENDINGS) and is_file(entry):
            yield entry.name
        elif is_folder(entry):
            refuse(
                entry.path,
                "is a folder in the folder of a class, which holds images only; move "
                "them up, or the folder away",
            )
        elif entry.name.lower().endswith(OTHER_IMAGES):
            refuse(
                entry.path,
                f"only {ENDINGS_TEXT} files are read; convert it, or move it away",
            )
        elif entry.is_symlink() and not os.path.exists(entry.path):
            refuse(entry.path, "is a link that leads nowhere")
        else:
            skipped.add(entry.path)


def _entries(folder: str) -> Iterator[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    yield entry
    except OSError as error:
        raise DataError(f"{shown(folder)}: cannot be read: {error.strerror}") from error
