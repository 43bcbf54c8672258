"""Preprocessing that trained weights bring: resize filter, crop, mean and std."""

import dataclasses
import os

import keras
import numpy as np

from towers import console
from towers.config import FIELDS, Config, factories, from_values
from towers.config.preprocessing import (
    STANDARDIZATIONS,
    in_pixels,
    parse_standardization,
)
from towers.config.pretrained import IMAGENET, published_weights
from towers.data.sources import DataSet
from towers.models.create import pixel_moments, rescales_images
from towers.pretrained import hub
from towers.run.checkpoint import Checkpoint
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.stored_config import (
    config_to_continue,
    stored_config,
    stored_dataset_info,
)


def with_options_of_weights(config: Config, checkpoint: Checkpoint | None) -> Config:
    """Fill in the options of preprocessing from the checkpoint or the weights.

    Weights with a name, see `hub`, also bring the network and the size of the images.
    """
    path = os.path.expanduser(config.init_from)
    weights = published_weights(config.model, config.init_from)
    names, source = ["interpolation", "fit"], dataclasses.asdict(config)
    if is_named := hub.is_named(config.init_from):
        names = ["model", "image_size", *names] if _reads_files(config) else ["model"]
        if not config.choice_of("augment").standardizes_images:
            names.append("standardize")
    if checkpoint is not None:
        source = dataclasses.asdict(from_values(checkpoint.run_state["config"]))
    elif is_named:
        model = config.model if config.model != FIELDS["model"].default else ""
        source |= hub.options_of_weights(config.init_from, model)
    elif os.path.isdir(path) and config_to_continue(path):
        source = dataclasses.asdict(stored_config(RunFolder(path), "best"))
    elif weights is not None and _reads_files(config):
        source |= {"center_crop": weights.crop, "interpolation": weights.interpolation}
    else:
        return config
    is_cut = source["center_crop"] not in (0, 1)
    size = config.image_size or ("image_size" in names and source["image_size"])
    if "fit" in names and (not is_cut or (size and config.fit in ("auto", "crop"))):
        names.append("center_crop")
    unset = [x for x in names if getattr(config, x) == FIELDS[x].default]
    return dataclasses.replace(config, **{x: source[x] for x in unset})


def _reads_files(config):
    names = factories.argument_names(factories.resolve("dataset", config.dataset))
    return names is None or "image_options" in names


def standardize(
    config: Config,
    data_set: DataSet,
    model: keras.Model,
    continued: DatasetInfo | None = None,
) -> DataSet:
    """Return the data set with the moments that standardize selects."""
    moments, origin = _moments(config, data_set.image_shape[-1], model, continued)
    if moments is None:
        return data_set
    mean, std = (
        ", ".join(f"{x:g}" for x in (values[:1] if len({*values}) == 1 else values))
        for values in np.round(moments, 2).tolist()
    )
    console.line(f"images are standardized by mean {mean} and std {std} ({origin})")
    return dataclasses.replace(data_set, mean=moments[0], std=moments[1])


def _moments(config, channels, model, continued):
    """Return moments and their origin; None for those of the training images."""
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
            return (info.mean, info.std), f"as init_from={config.init_from}"
        trained = published_weights(config.model, config.init_from)
        if trained and len(trained.mean) == channels:
            moments = in_pixels((trained.mean, trained.std), channels)
            return moments, f"as {config.model} was trained"
    if (choice.is_given or choice.is_in_a_file) and rescales_images(model):
        moments = in_pixels(STANDARDIZATIONS["none"], channels)
        return moments, "the network begins with a layer that rescales them"
    return None, ""
