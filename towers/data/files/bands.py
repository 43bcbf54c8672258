"""Images of more than 8 bits, of signed or floating numbers, or of other bands.

Pillow has no modes for most of them, so that they are arrays.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import ExifTags, Image

GRAY = 0.299, 0.587, 0.114  # gray of colors (ITU-R BT.601)


class Refused(ValueError):
    """An image that is not read; the message follows its name."""


def differs(kind: str, dtype: str, channels: int) -> str:
    """Return the message about an image of another kind than its data set."""
    kinds = f"has {kind}, and the images are read as {channels} band(s) of {dtype}"
    return f"{kinds}; convert all to one kind"


class Bands:
    """An image of any number of bands, with the methods of Pillow's that are used.

    `decode`, called once, returns an array of `dtype` and `shape`, height, width and
    bands without alpha; `bits` are those of an unsigned integer, as 12 in files of 16.
    """

    def __init__(
        self,
        dtype: np.dtype,
        shape: tuple[int, ...],
        decode: Callable[[], np.ndarray],
        bits: int = 0,
        orientation: int = 1,
    ):
        if dtype.kind not in "biuf":
            raise Refused(f"has numbers of type {dtype}; real ones are read")
        if len(shape) != 3 or min(shape) < 1:
            raise Refused(f"is an array {list(shape)}, not [height, width, bands]")
        self.height, self.width, self.num_bands = shape
        itemsize = min(dtype.itemsize, 4)
        self.dtype = "float32"
        if dtype.kind in ("b", "u") and itemsize < 3:
            self.dtype = f"uint{8 * itemsize}"
        self.num_bytes = self.height * self.width * self.num_bands * (itemsize + 4)
        self.bits, self._orientation = bits or 8 * itemsize, orientation
        self._decode = decode

    @functools.cached_property
    def array(self) -> np.ndarray:
        """The pixels [height, width, bands]; Refused if some are not finite."""
        array = self._decode().reshape(self.height, self.width, self.num_bands)
        if array.dtype == bool:
            array = array * np.uint8(255)
        with np.errstate(over="ignore"):
            array = array.astype(self.dtype, copy=False)
        if not np.isfinite(array).all():
            raise Refused("has pixels that are not finite; replace them by numbers")
        return array

    def getexif(self) -> dict[int, int]:
        """Return the orientation as Pillow does."""
        return {ExifTags.Base.Orientation: self._orientation}

    def photo(self) -> Image.Image:
        """Return the upper 8 bits as gray or colors of Pillow; Refused for others."""
        if self.dtype == "float32" or self.num_bands not in (1, 3):
            raise Refused(differs(str(self), "uint8", 3))
        shifted = (self.array >> self.bits - 8).astype(np.uint8)
        return Image.fromarray(shifted[..., 0] if self.num_bands == 1 else shifted)

    def converted(self, dtype: str, channels: int) -> "Bands":
        """Return the image in the format of a data set, or raise Refused."""
        array = self.array
        if (self.num_bands, channels) == (1, 3):
            array = array.repeat(3, 2)
        elif (self.num_bands, channels) == (3, 1):
            array = (array @ np.array(GRAY))[..., None]
            array = (array if dtype == "float32" else np.rint(array)).astype(dtype)
        if self.dtype != dtype or array.shape[-1] != channels:
            raise Refused(differs(str(self), dtype, channels))
        return self._with(array)

    def crop(self, box: tuple[int, int, int, int]) -> "Bands":
        """Return a part of the image."""
        left, top, right, bottom = box
        return self._with(self.array[top:bottom, left:right])

    def resize(self, size: tuple[int, int], resample: int, box: Any) -> "Bands":
        """Resize each band by Pillow, in float32."""
        bands = np.moveaxis(self.array.astype(np.float32), -1, 0)
        resized = [Image.fromarray(x).resize(size, resample, box) for x in bands]
        array = np.stack([np.asarray(x) for x in resized], -1)
        if self.dtype != "float32":
            array = np.clip(np.rint(array), 0, np.iinfo(self.dtype).max)
        return self._with(array.astype(self.dtype))

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.array, dtype)

    def __str__(self) -> str:
        return f"{self.num_bands} band(s) of {self.dtype}"

    def _with(self, array):
        return Bands(array.dtype, array.shape, lambda: array, self.bits)
