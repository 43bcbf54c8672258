"""Data sets, augmentation, and batches that are functions of (seed, step).

Importing the package does not import TensorFlow; loading a data set does.
"""

from typing import TYPE_CHECKING

from towers.config import factories
from towers.config.choices import MAX_IMAGE_PIXELS
from towers.errors import ConfigError

if TYPE_CHECKING:
    from towers.data.image_files import Survey
    from towers.data.sources import DataSet, Trained


def load(
    name: str,
    data_dir: str = "",
    *,
    image_size: int = 0,
    center_crop: float = 1.0,
    image_cache_mb: float = 2000.0,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    bad_images: str = "stop",
    survey: "Survey | None" = None,
    trained: "Trained | None" = None,
) -> "DataSet":
    """Loads a data set by its name.

    Args:
        name: in `towers.config.choices.DATASETS`, or FILE.py:FUNCTION, a function with
            some of the keyword arguments data_dir, image_size, center_crop,
            image_cache_mb, max_image_pixels, bad_images, and image_options, which holds
            the last five.
        data_dir: where the user keeps it; empty for the usual places.
        image_size, center_crop, image_cache_mb, max_image_pixels, bad_images, survey:
            of images that are decoded when they are read; see
            `image_files.ImageOptions`.
        trained: of a network that is only to be evaluated; a data set may then have no
            training images, `train` being None.

    Raises:
        DataError: it is not there, or not what it should be, such as a label outside of
            the classes; with a survey the labels are not compared.
        ConfigError: a function in a file gives no DataSet.
    """
    from towers.data.image_files import ImageOptions
    from towers.data.sources import DataSet, validate_labels

    data_set = factories.create(
        "dataset",
        name,
        data_dir=data_dir,
        image_size=image_size,
        center_crop=center_crop,
        image_cache_mb=image_cache_mb,
        max_image_pixels=max_image_pixels,
        bad_images=bad_images,
        image_options=ImageOptions(
            image_size,
            image_cache_mb,
            max_image_pixels,
            survey,
            bad_images,
            center_crop,
        ),
        trained=trained,
    )
    if not isinstance(data_set, DataSet):
        raise ConfigError(
            f"dataset={name}: gave {type(data_set).__name__}; return a "
            "towers.data.sources.DataSet"
        )
    if survey is None:
        validate_labels(data_set)
    return data_set
