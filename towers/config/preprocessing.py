"""Preprocessing of images for trained weights, and the option standardize.

Mean and standard deviation are of pixels divided by 255, as in timm and torchvision;
`DataSet` and `DatasetInfo` have them in units of 0..255.
"""

import contextlib
import dataclasses

from towers.config.synonyms import suggestion
from towers.errors import ConfigError

# Moments of the training images of ImageNet, red first (timm, torchvision).
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

# Filters of Pillow; auto is bilinear unless trained weights need another.
INTERPOLATIONS = ("auto", "bilinear", "bicubic")

# Ways to fit photos into other proportions, see `image.read_image`; auto is crop unless
# the run of --init_from was trained with another.
FITS = ("auto", "crop", "pad", "stretch")

# Ranges of pixel values with a name, see `PixelFormat`.
VALUE_RANGES = ("auto", "dtype")

Moments = tuple[tuple[float, ...], tuple[float, ...]]

STANDARDIZATIONS: dict[str, Moments | None] = {
    "auto": None,
    "data": None,
    "imagenet": (IMAGENET_MEAN, IMAGENET_STD),
    "-1..1": ((0.5,), (0.5,)),
    "0..1": ((0.0,), (1.0,)),
    "none": ((0.0,), (1 / 255,)),
}


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """Preprocessing with which weights were trained, as timm's `default_cfg` has it."""

    # Per channel, red first, of pixels divided by 255.
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    size: int | str = 224  # side of the input, or HEIGHTxWIDTH
    interpolation: str = "bicubic"  # of the resize, or bilinear
    crop: float = 0.875  # of the center, as a fraction of the resized shorter side
    fit: str = "auto"  # into other proportions, as the option fit
    timm: str = ""  # name and tag of the weights in timm
    package: str = ""  # Python package with the weights, if any


def parse_standardization(text: str) -> Moments | None:
    """Return mean and standard deviation of standardize; None for auto, data."""
    if text in STANDARDIZATIONS:
        return STANDARDIZATIONS[text]
    with contextlib.suppress(ValueError):
        mean, std = (tuple(map(float, x.split(","))) for x in text.split(":"))
        if all(-1 <= x <= 1 for x in mean + std) and min(std) > 0:
            return mean, std
    raise ConfigError(
        f"standardize={text!r}: {suggestion(text, STANDARDIZATIONS)}must be one of "
        f"{', '.join(STANDARDIZATIONS)}, or MEAN:STD of pixels divided by 255, such as "
        "0.5:0.25 or 0.485,0.456,0.406:0.229,0.224,0.225"
    )


def parse_value_range(text: str) -> Moments | None:
    """Return the bounds of value_range, of all channels or of each; None for names."""
    if text in VALUE_RANGES:
        return None
    with contextlib.suppress(ValueError):
        low, high = (tuple(map(float, x.split(","))) for x in text.split(":"))
        if all(-1e30 < x < y < 1e30 for x, y in zip(low, high, strict=True)):
            return low, high
    raise ConfigError(
        f"value_range={text!r}: {suggestion(text, VALUE_RANGES)}must be auto, dtype or "
        "LOW:HIGH, such as 0:4095 or -1000:400, or of two bands 0,0:4095,10000"
    )


def in_pixels(moments: Moments, channels: int) -> Moments:
    """Return the moments of each channel in units of 0..255, or a ConfigError."""
    if not all(len(x) in (1, channels) for x in moments):
        counts = f"{len(moments[0])} means and {len(moments[1])} standard deviations"
        why = f"standardize: {counts} for images of {channels} channels"
        raise ConfigError(f"{why}; give one number for all, or --standardize=data")
    mean, std = (tuple(255 * x for x in (y * channels)[:channels]) for y in moments)
    return mean, std
