"""Options for decoding image files, and what is recorded of their faults."""

import collections
import dataclasses
import threading
from typing import Protocol

from towers.config.choices import MAX_IMAGE_PIXELS
from towers.data.paths import reason
from towers.data.sources import shown
from towers.errors import DataError

# Height and width of images that are stored in different sizes, where none is asked
# for; the recipe `image_folder_resnet18` has the same.
DEFAULT_IMAGE_SIZE = 64

# Images whose stored sizes are compared at the start.
NUM_COMPARED = 256


class Encoded(Protocol):
    """Encoded images with their labels, by index."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[bytes, int]:
        """The file of one image, and its label.

        Raises:
            OSError, ValueError: it cannot be read; the words say why.
        """
        ...

    def place(self, index: int) -> str:
        """Its location, for messages."""
        ...


@dataclasses.dataclass
class Survey:
    """Faults and sizes of all images of a data set; see `Decoding`.

    Attributes:
        faults: place -> what is wrong with the image there.
        misplaced: path -> why a file or folder is none of the images.
        sizes: (height, width) of an upright image -> how often it was decoded.
        lock: held by the thread that records something.
    """

    faults: dict[str, str] = dataclasses.field(default_factory=dict)
    misplaced: dict[str, str] = dataclasses.field(default_factory=dict)
    sizes: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def add_fault(self, place: str, words: str) -> None:
        with self.lock:
            self.faults[place] = words

    def add_size(self, height: int, width: int) -> None:
        with self.lock:
            self.sizes[height, width] += 1


@dataclasses.dataclass(frozen=True)
class Decoding:
    """Options for decoding images to arrays.

    Attributes:
        image_size: height and width to which images are resized and cropped; 0 takes
            them as they are, where those of a sample are alike, see `settle_size`.
        cache_mb: megabytes of decoded images that are kept in memory.
        max_pixels: of an image file, all frames of an animation together; a larger one
            is not decoded, and a file of many more bytes than its pixels take not read.
        survey: records faults and sizes; an image with a fault is then black and its
            label -1. Every file is decoded whole. Without one the first fault is
            raised.
    """

    image_size: int = 0
    cache_mb: float = 2000.0
    max_pixels: int = MAX_IMAGE_PIXELS
    survey: Survey | None = None


AS_STORED = Decoding()


def refuse(
    encoded: Encoded, index: int, error: Exception, survey: Survey | None
) -> None:
    """Records a fault where there is a survey, else raises it as a DataError."""
    place = shown(encoded.place(index))
    words = reason(error)
    if survey is None:
        raise DataError(f"{place}: {words}; `python -m towers.data` finds all such")
    survey.add_fault(place, words)
