"""Mean and standard deviation by which the images of a new run are standardized."""

import dataclasses
import os

import keras
import numpy as np

from towers import console, models
from towers.config import Config
from towers.config.preprocessing import Moments, in_pixels, parse_standardization
from towers.data.sources import DataSet
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder

# Endings of files of weights that timm and torchvision publish.
OF_PYTORCH = (".safetensors", ".pth", ".pt", ".bin")


def standardize(
    config: Config,
    data_set: DataSet,
    model: keras.Model,
    continued: DatasetInfo | None = None,
) -> DataSet:
    """The data set with the moments that the option standardize means, said in a line
    where they are not those of its training images.

    Args:
        data_set: with the moments of its training images.
        model: the network.
        continued: of the checkpoint from which a run goes on; what the run started from
            is not needed any more.

    Raises:
        ConfigError: they are of another number of channels.
    """
    per_image = config.choice_of("augment").standardizes_images
    if config.standardize == "data" or per_image:
        return data_set
    channels = data_set.image_shape[-1]
    if config.standardize != "auto":
        name = f"standardize={config.standardize}"
        moments = in_pixels(parse_standardization(config.standardize), channels, name)
    elif moments := models.pixel_moments(config.model):
        name = ""
    else:
        moments, name = _of_weights(config, channels, continued)
    choice = config.choice_of("model")
    is_users = choice.is_given or choice.is_in_a_file
    if not moments and is_users and models.rescales_images(model):
        moments = (0.0,) * channels, (1.0,) * channels
        name = "none, as the network begins with a layer that rescales them"
    if not moments:
        return data_set
    mean, deviation = moments
    if name:
        numbers = np.round(moments, 2).tolist()
        console.line(f"images are standardized by {numbers} ({name})")
    return dataclasses.replace(data_set, mean=mean, deviation=deviation)


def _of_weights(
    config: Config, channels: int, continued: DatasetInfo | None
) -> tuple[Moments | None, str]:
    """The moments with which the weights of `init_from` were trained, where they are
    known and of as many channels, and where they are from."""
    if not config.init_from:
        return None, ""
    path = os.path.expanduser(config.init_from)
    info = continued
    if info is None and os.path.isdir(path):
        info = RunFolder(path).stored_dataset_info("best")
    if info is not None and len(info.mean) == channels:
        return (info.mean, info.deviation), f"those of {config.init_from}"
    pretrained = config.choice_of("model").pretrained
    if pretrained and channels == 3 and path.endswith(OF_PYTORCH):
        moments = pretrained.mean, pretrained.std
        return in_pixels(moments, channels, ""), f"the weights of {config.model}"
    return None, ""
