"""Image files by number, and options for reading them."""

import collections
import dataclasses
import errno
import re
import threading
from typing import Protocol

from towers.config.choices import MAX_IMAGE_PIXELS
from towers.data.files.paths import reason
from towers.errors import DataError, TowersError
from towers.messages import shown

# Height and width of images that are stored in different sizes, where none is asked
# for; the recipe `image_folder_resnet18` has the same.
DEFAULT_IMAGE_SIZE = 64

# What is at a path is missing, or not a file.
CONTENT_ERRORS = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL),
    *(errno.ELOOP, errno.ENAMETOOLONG),
)
# Kinds of faults in a line.
MAX_KINDS = 3


class ImageFiles(Protocol):
    """Image files with their labels. They may have `labels`, `class_names`,
    `sample_weights`, `blocks`, `block_bytes` and `checksum`, see `index.Index`.
    """

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[bytes, int]:
        """The content of one file, and its label, 0 where `labels` are sets; OSError or
        ValueError with the reason.
        """
        ...

    def location(self, index: int) -> str:
        """Its location, for messages."""
        ...


@dataclasses.dataclass
class Survey:
    """Faults and sizes of all images of a data set: `faults`, location -> what is wrong
    there; `misplaced`, path -> why it is none of the images; `sizes`, (height, width)
    -> how often it was decoded. If it `skips`, images with faults are left out.
    """

    faults: dict[str, str] = dataclasses.field(default_factory=dict)
    misplaced: dict[str, str] = dataclasses.field(default_factory=dict)
    sizes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    is_closed: bool = False
    skips: bool = False

    @property
    def bad_images(self) -> dict[str, str]:
        """Location -> what is wrong there, of all, in the order of the locations."""
        return dict(sorted((self.misplaced | self.faults).items()))

    def summary(self) -> str:
        """Return the kinds of faults, each with its number and an example. Faults are
        of one kind if they differ in numbers alone.
        """
        kinds = {}
        for location, text in self.bad_images.items():
            kinds.setdefault(re.sub(r"\d+", "0", text), []).append((location, text))
        most = sorted(kinds.values(), key=len, reverse=True)[:MAX_KINDS]
        return "; ".join(f"{len(x)} like {shown(x[0][0], 60)}: {x[0][1]}" for x in most)

    def close(self) -> None:
        """Ends the survey: from now on faults are raised."""
        self.is_closed = True

    def add_fault(self, location: str, message: str) -> None:
        with self.lock:
            self.faults[location] = message

    def add_size(self, height: int, width: int) -> None:
        with self.lock:
            self.sizes[height, width] += 1


@dataclasses.dataclass(frozen=True)
class ImageOptions:
    """Options for reading image files.

    Attributes:
        image_size: pixels of height and width to which images are resized and cropped,
            or HEIGHTxWIDTH; 0 keeps the stored size, if a sample has one size, see
            `cached.settle_size`.
        image_cache_mb: megabytes of decoded images that are kept in memory.
        max_image_pixels: of an image; a larger one is not decoded, and a file of many
            more bytes than its pixels take not read.
        survey: records faults and sizes; an image with a fault is then black and its
            label -1. Without one the first fault is raised.
        bad_images: "stop" raises the first fault; "skip" reads every image when the
            data set is loaded, and leaves those with faults out.
        center_crop: part of height and width of the middle that is resized; 0 is 1.
        interpolation: of the resize, see `image.FILTERS`.
        default_size: pixels of height and width where `image_size` is 0 and sizes
            differ.
        shuffle_buffer_mb: megabytes of the row groups of Parquet files, or of blocks of
            remote files, that are kept for an order of an epoch.
    """

    image_size: int | str = 0
    image_cache_mb: float = 2000.0
    max_image_pixels: int = MAX_IMAGE_PIXELS
    survey: Survey | None = None
    bad_images: str = "stop"
    center_crop: float = 0.0
    interpolation: str = "auto"
    default_size: int = DEFAULT_IMAGE_SIZE
    shuffle_buffer_mb: float = 1000.0

    def with_survey(self) -> "ImageOptions":
        """The options, with a survey where bad images are to be skipped."""
        if self.survey is not None or self.bad_images == "stop":
            return self
        return dataclasses.replace(self, survey=Survey(skips=True))


def refuse(
    files: ImageFiles, index: int, error: Exception, survey: Survey | None
) -> None:
    """Record a fault of an image in an open survey, else raise it as a DataError, as
    one that is not of its content is if bad images are left out.
    """
    if isinstance(error, TowersError):
        raise error
    location, message = files.location(index), reason(error)
    is_content = isinstance(error, ValueError) or (
        isinstance(error, OSError) and error.errno in CONTENT_ERRORS
    )
    if survey is not None and not survey.is_closed and (is_content or not survey.skips):
        survey.add_fault(location, message)
        return
    hint = ""
    if is_content:
        hint = (
            "; --bad_images=skip leaves bad images out, `python -m towers.data` finds "
            "them all"
        )
    raise DataError(f"{shown(location)}: {message}{hint}")
