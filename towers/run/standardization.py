"""Mean and standard deviation by which the images of a new run are standardized."""

import dataclasses
import os

import keras
import numpy as np

from towers import console
from towers.config import Config
from towers.config.preprocessing import (
    STANDARDIZATIONS,
    in_pixels,
    parse_standardization,
)
from towers.config.pretrained import IMAGENET
from towers.data.sources import DataSet
from towers.models.create import pixel_moments, rescales_images
from towers.run import torch_files
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.stored_config import stored_dataset_info

# Endings of files of weights that timm and torchvision publish.
OF_PYTORCH = (".safetensors", *torch_files.SUFFIXES)


def standardize(
    config: Config,
    data_set: DataSet,
    model: keras.Model,
    continued: DatasetInfo | None = None,
) -> DataSet:
    """The data set with the moments that the option standardize means, reported in a
    line where they are not those of its training images.

    Args:
        data_set: with the moments of its training images.
        model: the network.
        continued: of the checkpoint from which a run goes on, which may have started
            from weights that are gone.

    Raises:
        ConfigError: there are moments of another number of channels.
    """
    moments, origin = _moments(config, data_set.image_shape[-1], model, continued)
    if moments is None:
        return data_set
    numbers = np.round(moments, 2).tolist()
    console.line(f"images are standardized by {numbers} ({origin})")
    return dataclasses.replace(data_set, mean=moments[0], deviation=moments[1])


def _moments(config, channels, model, continued):
    """The moments, and where they are from; None for those of the training images."""
    choice, path = config.choice_of("model"), os.path.expanduser(config.init_from)
    if moments := parse_standardization(config.standardize):
        return in_pixels(moments, channels), f"standardize={config.standardize}"
    if config.standardize == "data" or config.choice_of("augment").standardizes_images:
        return None, ""
    if moments := pixel_moments(config.model):
        return moments, f"as {config.model} was trained"
    if path:
        info = continued
        if info is None and path != IMAGENET and os.path.isdir(path):
            info = stored_dataset_info(RunFolder(path), "best")
        if info is not None and len(info.mean) == channels:
            return (info.mean, info.deviation), f"as init_from={config.init_from}"
        trained = choice.pretrained
        is_published = path == IMAGENET or path.endswith(OF_PYTORCH)
        if trained and len(trained.mean) == channels and is_published:
            moments = in_pixels((trained.mean, trained.std), channels)
            return moments, f"as {config.model} was trained"
    if (choice.is_given or choice.is_in_a_file) and rescales_images(model):
        moments = in_pixels(STANDARDIZATIONS["none"], channels)
        return moments, "the network begins with a layer that rescales them"
    return None, ""
