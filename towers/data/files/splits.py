"""The data set that the labeled images of some splits make."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from towers import console
from towers.config.list_options import height_and_width
from towers.data import sources
from towers.data.classes import similar_names
from towers.data.files import cached, samples
from towers.data.files.image_files import DEFAULT_IMAGE_SIZE, ImageOptions
from towers.data.inventory import Inventory
from towers.data.sources import DataSet, Trained
from towers.errors import DataError
from towers.messages import shown

CHANNELS = 3

# (classes or None, where they come from) -> ImageFiles with `class_names`, in the order
# of the classes, and `labels` if they are known.
OpenSplit = Callable[[tuple[str, ...] | None, str], Any]


def data_set(
    name: str,
    location: str,
    splits: Mapping[str, OpenSplit],
    options: ImageOptions,
    trained: Trained | None = None,
    *,
    names: Mapping[str, str],
    channels: int = CHANNELS,
    inventory: Inventory | None = None,
) -> DataSet:
    """Return the data set of image files in splits.

    Without a validation or test split, a tenth of each class is held out for testing;
    if only one exists, it is used for both. `trained`, a network to evaluate,
    determines classes, image shape and moments; then only the test split is opened, or
    all images if there is none and the network was not trained on them. `names` are
    those of the splits in messages.
    """
    testing = next((x for x in ("test", "validation") if x in splits), None)
    is_known = trained is not None or options.pixels is not None
    cache = cached.ImageCache(options.image_cache_mb)
    inventory = inventory or Inventory()
    is_alone = trained is not None and not testing and "train" in splits
    if is_alone and not _was_trained_on(trained, splits, options, location):
        console.warn(
            f"{shown(location)} is not the data that the run was trained on, so all "
            "images in it are for testing"
        )
        testing = "train"
    files: Any = None
    train: Any = None
    test: Any = None
    validation: Any = None
    if trained is not None and testing:
        classes, where = trained.class_names, "the run"
        options, shape = _trained_size(options, trained)
    else:
        where = names.get("train", "")
        files = splits["train"](None, "")
        classes = files.class_names
        for line in similar_names(classes):
            console.warn(line)
        options, shape = samples.settle_format(files, channels, options, inventory)
        train = cached.CachedSource(files, shape, options, cache)

    def opened(split):
        return cached.CachedSource(splits[split](classes, where), shape, options, cache)

    if testing:
        test = opened(testing)
        if "validation" in splits and train is not None:
            validation = test if testing == "validation" else opened("validation")
        used = {"training": "train", "validation": "validation", "test": testing}
        for split, source in used.items():
            if source in splits and (split == "test" or train is not None):
                inventory.splits[split] = names.get(source, "all images")
    else:
        per_class = " of each class" if hasattr(files, "labels") else ""
        labels = getattr(files, "labels", np.zeros(len(files)))
        train, test = sources.split_off_test(train, labels, location)
        share = f"{sources.TEST_FRACTION:.0%}{per_class}"
        inventory.splits |= {
            "training": names.get("train", "all images"),
            "test": f"{share} of these, held out at random",
        }
    train, validation, test = cached.leave_out_bad_images(
        (train, validation, test), options, inventory
    )
    pixels = samples.settle_range(train, options, is_known, inventory)
    known = trained and (trained.mean, trained.std)
    mean, std = known or samples.sampled_moments(train, options, pixels)
    return DataSet(
        name=name,
        train=train,
        test=test,
        class_names=tuple(classes),
        mean=mean,
        std=std,
        pixels=pixels,
        origin=location,
        validation=validation,
        inventory=inventory,
    )


def _was_trained_on(trained, splits, options, location):
    """Return whether the held-out images are those of the training."""
    if options.bad_images == "skip":
        return True
    try:
        files = splits["train"](None, "")
        options = ImageOptions(image_cache_mb=0)
        source = cached.CachedSource(files, trained.image_shape, options)
        train, _ = sources.split_off_test(source, files.labels, location)
    except DataError:  # such as a class of one image
        return False
    return sources.checksum(train) == trained.checksum


def _trained_size(options, trained):
    size, (*shape, channels) = options.image_size, trained.image_shape
    shape = *shape, CHANNELS if channels == 1 else channels
    options = dataclasses.replace(options, pixels=trained.pixels)
    if size:
        return options, (*height_and_width(size), shape[2])
    if shape[0] == shape[1] and shape[0] in (DEFAULT_IMAGE_SIZE, options.default_size):
        # They were resized, unless all had this size.
        options = dataclasses.replace(options, image_size=shape[0])
    return options, shape
