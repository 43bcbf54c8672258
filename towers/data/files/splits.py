"""The data set that the labeled images of some splits make."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from towers import console
from towers.config.list_options import height_and_width
from towers.data.classes import similar_names
from towers.data.files.cached import (
    CachedSource,
    ImageCache,
    leave_out_bad_images,
    sampled_moments,
    settle_size,
)
from towers.data.files.image_files import DEFAULT_IMAGE_SIZE, ImageFiles, ImageOptions
from towers.data.inventory import Inventory
from towers.data.sources import (
    TEST_FRACTION,
    DataSet,
    Trained,
    checksum,
    split_off_test,
)
from towers.errors import DataError
from towers.messages import shown

CHANNELS = 3


# Takes classes, or None, and a text about their origin, and gives files with
# `class_names`, in the order of these, and `labels`, int32 [n] or of label sets uint8
# [n, classes], where they are known.
OpenSplit = Callable[[tuple[str, ...] | None, str], ImageFiles]


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
    """A data set of image files.

    Without a split for validation or testing a tenth of each class is held out for
    testing, drawn at random, the same in every run; one alone is used for both. With
    `trained`, a network to be evaluated, its classes, image shape and moments are used
    and only the split for testing is opened; without one all images are for testing,
    unless the network was trained on these.

    `names` are those of the splits in messages; `inventory` is completed. Sources are
    uint8 [n, height, width, channels]; moments are of a sample, see `cached.SAMPLE`.
    DataError where a split cannot be opened, has no images or other classes than those
    for training, or an image of the sample cannot be read.
    """
    testing = next((x for x in ("test", "validation") if x in splits), None)
    cache = ImageCache(options.image_cache_mb)
    inventory = inventory or Inventory()
    if not testing and "train" in splits and trained:
        if not _was_trained_on(trained, splits, options, location):
            console.warn(
                f"{shown(location)} is not the data that the run was trained on, so "
                "all images in it are for testing"
            )
            testing = "train"
    train = validation = None
    if trained is not None and testing:
        classes, where = trained.class_names, "the run"
        options, shape = _trained_size(options, trained)
    else:
        where = names.get("train", "")
        files = splits["train"](None, "")
        classes = files.class_names
        for line in similar_names(classes):
            console.warn(line)
        options, shape, sizes = settle_size(files, channels, options)
        if sizes:
            inventory.infer("sizes", sizes)
        train = CachedSource(files, shape, options, cache)

    def opened(split):
        return CachedSource(splits[split](classes, where), shape, options, cache)

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
        train, test = split_off_test(train, labels, location)
        inventory.splits |= {
            "training": names.get("train", "all images"),
            "test": f"{TEST_FRACTION:.0%}{per_class} of these, held out at random",
        }
    train, validation, test = leave_out_bad_images(
        (train, validation, test), options, inventory
    )
    known = trained and (trained.mean, trained.std)
    mean, std = known or sampled_moments(train, options, files)
    return DataSet(
        name=name,
        train=train,
        test=test,
        class_names=tuple(classes),
        mean=mean,
        std=std,
        origin=location,
        validation=validation,
        inventory=inventory,
    )


def _was_trained_on(trained, splits, options, location):
    """True if a network was trained on the images of a data set without images for
    testing; True with bad_images=skip, as the images left out are not known.
    """
    if options.bad_images == "skip":
        return True
    try:
        files = splits["train"](None, "")
        source = CachedSource(
            files, trained.image_shape, ImageOptions(image_cache_mb=0)
        )
        train, _ = split_off_test(source, files.labels, location)
    except DataError:  # such as a class of one image
        return False
    return checksum(train) == trained.checksum


def _trained_size(options, trained):
    """The options and the image shape of the training."""
    size, shape = options.image_size, (*trained.image_shape[:2], CHANNELS)
    if size:
        return options, (*height_and_width(size), CHANNELS)
    if shape[0] == shape[1] and shape[0] in (DEFAULT_IMAGE_SIZE, options.default_size):
        # They were resized, unless all had this size.
        options = dataclasses.replace(options, image_size=shape[0])
    return options, shape
