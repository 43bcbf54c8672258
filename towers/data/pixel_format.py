"""The format of stored pixels, and the range of values that becomes 0..255."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from towers.config.preprocessing import parse_value_range
from towers.errors import ConfigError

# Percentiles of the training images that value_range=auto takes.
PERCENTILES = 0.1, 99.9


@dataclasses.dataclass(frozen=True)
class PixelFormat:
    """Format of the pixels of a data set."""

    dtype: str = "uint8"  # or "uint16", or "float32"
    bands: int = 3  # number of channels; 3 of colors and of gray
    # Values that become 0 and 255, of all channels or of each.
    low: tuple[float, ...] = (0.0,)
    high: tuple[float, ...] = (255.0,)
    windows: bool = True  # whether the windows of DICOM files map gray levels

    @classmethod
    def from_values(cls, values: Any) -> "PixelFormat":
        """Read stored values; TypeError or KeyError if they are invalid."""
        bounds = {name: tuple(values[name]) for name in ("low", "high")}
        return cls(**{**values, **bounds})

    @property
    def is_photo(self) -> bool:
        """Return whether pixels are bytes of gray or colors that need no scaling."""
        return (self.dtype, *self.low, *self.high) == ("uint8", 0, 255)

    def scale(self, images: tf.Tensor) -> tf.Tensor:
        """Return float32 images in 0..255, clipped; those of photos unchanged."""
        if self.is_photo:
            return images
        low, high = np.array(self.low), np.array(self.high)
        # Products, not divisions: see `augmentation.standardize`.
        factors = tf.constant(255 / (high - low), tf.float32)
        images = tf.cast(images, tf.float32) - tf.constant(low, tf.float32)
        return tf.clip_by_value(images * factors, 0.0, 255.0)

    def to_bytes(self, images: np.ndarray) -> np.ndarray:
        """Return uint8 images to look at, of all bands."""
        if self.is_photo:
            return images
        return np.rint(self.scale(images)).astype(np.uint8)

    def with_range(self, value_range: str) -> "PixelFormat":
        """Return the format with the range of an option, except for auto."""
        given = parse_value_range(value_range)
        if given is None and value_range == "dtype" and self.dtype != "float32":
            given = (0.0,), (float(np.iinfo(self.dtype).max),)
        elif value_range == "dtype":
            why = "signed or floating numbers have none; set --value_range=LOW:HIGH"
            raise ConfigError(f"value_range=dtype: {why}")
        if given is None:
            return self
        if len(given[0]) not in (1, self.bands):
            why = f"{len(given[0])} ranges for images of {self.bands} channels"
            way = "give one for all, or one for each"
            raise ConfigError(f"value_range={value_range}: {why}; {way}")
        return dataclasses.replace(self, low=given[0], high=given[1], windows=False)

    def with_percentiles(self, values: np.ndarray) -> "PixelFormat":
        """Return the format with the range of sampled pixels [n, channels].

        Gray and colors have one range, other bands a range each.
        """
        axis = None if self.bands == 3 else 0
        bounds = np.percentile(values, PERCENTILES, axis).reshape(2, -1)
        low, high = bounds.astype(np.float32).astype(float)
        high = np.where(high > low, high, low + 1)  # all pixels are equal
        return dataclasses.replace(self, low=(*low.tolist(),), high=(*high.tolist(),))

    def __str__(self) -> str:
        text = f"{self.dtype}, scaled from {min(self.low):g} to {max(self.high):g}"
        return text if len(self.low) == 1 else f"{text}, each band by its own range"


PHOTO = PixelFormat()
