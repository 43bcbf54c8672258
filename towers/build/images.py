"""The data set, its augmentation and its split, from a Config."""

import dataclasses

from towers import data, models
from towers.config import Config
from towers.data.augment import Augment, create_augment
from towers.data.batches import hold_out
from towers.data.distortions import extend
from towers.data.sources import DataSet, Source
from towers.errors import ConfigError
from towers.run.dataset_info import DatasetInfo


def load_data_set(
    config: Config,
    dataset_info: DatasetInfo | None = None,
    *,
    test_only: bool = False,
) -> DataSet:
    """The data set, with the moments by which its images are standardized: of a run
    that is evaluated, of a pretrained network, or its own.

    Args:
        config: of the run.
        dataset_info: of a run whose checkpoint is evaluated.
        test_only: whether its test images alone are needed. Its training images are
            then not loaded, `train` being None, where the data set can do without.

    Raises:
        DataError: it is missing or invalid.
    """
    data_set = data.load(
        config.dataset,
        config.data_dir,
        image_size=config.image_size,
        image_cache_mb=config.image_cache_mb,
        max_image_pixels=config.max_image_pixels,
        trained=dataset_info if test_only else None,
    )
    if dataset_info is not None:
        return dataset_info.preprocessing_of_run(data_set)
    if moments := models.pixel_moments(config.model):
        mean, deviation = moments
        return dataclasses.replace(data_set, mean=mean, deviation=deviation)
    return data_set


def create_augmentation(config: Config, data_set: DataSet) -> Augment:
    """The augmentation of the images.

    Raises:
        ConfigError: it does not fit the images.
    """
    try:
        augment = create_augment(
            config.augment,
            data_set.image_shape,
            data_set.mean,
            data_set.deviation,
        )
        return extend(
            augment,
            color_jitter=config.color_jitter,
            random_erasing=config.random_erasing,
            cutout_size=config.cutout_size,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def split_for_evaluation(
    config: Config, data_set: DataSet
) -> tuple[Source | None, tuple[str, Source]]:
    """The images that are trained on, None where they were not loaded; name and source
    of those that evaluations during training use, see `Parts.eval_split`.

    Raises:
        ConfigError: the fraction to hold out leaves one of the two without images.
    """
    if not config.validation_fraction or data_set.train is None:
        return data_set.train, ("test", data_set.test)
    try:
        train, held_out = hold_out(
            data_set.train, config.validation_fraction, config.seed
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return train, ("validation", held_out)
