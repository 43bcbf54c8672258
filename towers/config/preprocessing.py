"""Preprocessing of images: that of trained weights, and the option standardize.

Mean and standard deviation are here of pixels divided by 255, as elsewhere in the
field; `DataSet` and `DatasetInfo` have them in units of 0..255.
"""

import dataclasses
import math

from towers.config.synonyms import suggestion
from towers.errors import ConfigError

# Of the training images of ImageNet, red first (timm, torchvision).
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

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
    """Preprocessing with which weights were trained, as timm's `default_cfg` has it.

    Attributes:
        mean, std: mean and standard deviation by which images are standardized, per
            channel, red first, of pixels divided by 255.
        size: height and width of the input.
        interpolation: bilinear or bicubic, of the resize.
        crop: size of the center crop, as a fraction of the resized shorter side.
    """

    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    size: int = 224
    interpolation: str = "bicubic"
    crop: float = 0.875


def parse_standardization(text: str) -> Moments | None:
    """Mean and standard deviation, one number or one per channel, of the value of the
    option standardize; None for auto and data.

    Raises:
        ConfigError: it is no such value.
    """
    if text in STANDARDIZATIONS:
        return STANDARDIZATIONS[text]
    try:
        mean, std = (tuple(map(float, x.split(","))) for x in text.split(":"))
    except ValueError:
        raise ConfigError(
            f"standardize={text!r}: {suggestion(text, STANDARDIZATIONS)}must be one of "
            f"{', '.join(STANDARDIZATIONS)}, or MEAN:STD such as 0.5:0.25 or "
            "0.485,0.456,0.406:0.229,0.224,0.225"
        ) from None
    if not all(math.isfinite(x) and abs(x) <= 1 for x in mean + std) or min(std) <= 0:
        raise ConfigError(
            f"standardize={text!r}: a mean must be from -1 to 1, a standard deviation "
            "above 0 and at most 1; they are of pixels divided by 255"
        )
    return mean, std


def in_pixels(moments: Moments, channels: int, source: str) -> Moments:
    """Mean and standard deviation of each channel, in units of 0..255.

    Raises:
        ConfigError: there is neither one number nor one per channel; `source` begins
            the message.
    """
    if not all(len(x) in (1, channels) for x in moments):
        raise ConfigError(
            f"{source}: has {len(moments[0])} means and {len(moments[1])} standard "
            f"deviations, and the images have {channels} channels; set "
            "--standardize=data, or give one number for all channels"
        )
    mean, deviation = (
        tuple(255 * x for x in (values * channels)[:channels]) for values in moments
    )
    return mean, deviation
