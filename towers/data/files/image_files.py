"""Image files by number, and options for reading them."""

import collections
import dataclasses
import errno
import re
import threading
from typing import Protocol

from towers.config.choices import MAX_IMAGE_PIXELS
from towers.data.files.paths import reason
from towers.data.pixel_format import PixelFormat
from towers.errors import DataError, TowersError
from towers.messages import shown

# Default height and width if stored sizes differ, as in `image_folder_resnet18`.
DEFAULT_IMAGE_SIZE = 64

# Errors of a path that is missing or not a file.
CONTENT_ERRORS = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL),
    *(errno.ELOOP, errno.ENAMETOOLONG),
)
MAX_KINDS = 3  # maximum number of kinds of faults in a message


class ImageFiles(Protocol):
    """Image files with labels; for optional attributes see `index.Index`."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[bytes, int]:
        """Return content and label (0 for label sets); OSError or ValueError."""
        ...

    def location(self, index: int) -> str:
        """Return where a file is stored, for messages."""
        ...


@dataclasses.dataclass
class Survey:
    """Faults and sizes of all images of a data set.

    `faults` and `misplaced` are location -> problem, of images and of other entries. If
    it `skips`, images with faults are left out; once it `is_closed`, faults are raised.
    """

    faults: dict[str, str] = dataclasses.field(default_factory=dict)
    misplaced: dict[str, str] = dataclasses.field(default_factory=dict)
    sizes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    is_closed: bool = False
    skips: bool = False

    @property
    def bad_images(self) -> dict[str, str]:
        """Location -> problem, sorted."""
        return dict(sorted((self.misplaced | self.faults).items()))

    def summary(self) -> str:
        """Return kinds of faults, equal but for numbers, with counts and examples."""
        kinds: dict[str, list[tuple[str, str]]] = {}
        for location, text in self.bad_images.items():
            kinds.setdefault(re.sub(r"\d+", "0", text), []).append((location, text))
        most = sorted(kinds.values(), key=len, reverse=True)[:MAX_KINDS]
        return "; ".join(f"{len(x)} like {shown(x[0][0], 60)}: {x[0][1]}" for x in most)

    def add_size(self, height: int, width: int) -> None:
        """Count an image size; thread-safe."""
        with self.lock:
            self.sizes[height, width] += 1


@dataclasses.dataclass(frozen=True)
class ImageOptions:
    """Options for reading image files."""

    image_size: int | str = 0  # pixels, or HEIGHTxWIDTH; 0 keeps a common stored size
    image_cache_mb: float = 2000.0  # megabytes of decoded images in memory
    max_image_pixels: int = MAX_IMAGE_PIXELS
    # Records faults and sizes; a faulty image is black with label -1. Without a survey
    # the first fault is raised.
    survey: Survey | None = None
    bad_images: str = "stop"  # "skip" reads all images first, and drops faulty ones
    center_crop: float = 0.0  # fraction of the middle part that is resized; 0 is 1
    interpolation: str = "auto"  # filter of the resize, see `image.FILTERS`
    fit: str = "auto"  # "crop", "pad" or "stretch", see `image.read_image`
    value_range: str = "auto"  # or "dtype", or LOW:HIGH, see `PixelFormat`
    pixels: PixelFormat | None = None  # None infers it, see `samples.settle_format`
    default_size: int = DEFAULT_IMAGE_SIZE  # if image_size is 0 and sizes differ
    # Megabytes of Parquet row groups, or of remote blocks, kept for shuffling.
    shuffle_buffer_mb: float = 1000.0

    def with_survey(self) -> "ImageOptions":
        """Return the options with a survey if bad images are skipped."""
        if self.survey is not None or self.bad_images == "stop":
            return self
        return dataclasses.replace(self, survey=Survey(skips=True))


def refuse(
    files: ImageFiles, index: int, error: Exception, survey: Survey | None
) -> None:
    """Record a fault in an open survey, or raise it as a DataError."""
    if isinstance(error, TowersError):
        raise error
    location, message = files.location(index), reason(error)
    number = getattr(error, "errno", None)
    is_content = isinstance(error, ValueError) or number in CONTENT_ERRORS
    if survey is not None and not survey.is_closed and (is_content or not survey.skips):
        survey.faults[location] = message
        return
    hint = ""
    if is_content:
        hint = "; --bad_images=skip leaves bad images out, `python -m towers.check` "
        hint += "finds them all"
    raise DataError(f"{shown(location)}: {message}{hint}")
