"""Heat maps of predicted images, and their pictures in a folder."""

import io
import os
import pathlib
from collections.abc import Callable, Sequence

import keras
import numpy as np
from PIL import Image

from towers import store
from towers.build.restored import RestoredRun
from towers.data.files.image import source_box
from towers.data.files.reading import is_url
from towers.data.files.unlabeled import ImageFile, read_upright
from towers.errors import ConfigError
from towers.evaluation.tables import errors_of_output
from towers.metrics.predictions import top_class
from towers.models.grad_cam import class_maps, enlarged, overlay

# Takes the path of an image, the image upright, uint8 [height, width, channels], and
# its heat map, float32 [height, width].
Take = Callable[[str, np.ndarray, np.ndarray], None]
# Suffixes of images whose pictures have the same format; the others are PNG files.
FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG"}


def give_heatmaps(
    run: RestoredRun,
    model: keras.Model,
    files: Sequence[ImageFile],
    logits: np.ndarray,
    max_pixels: int,
    take: Take,
) -> None:
    """Call `take` for each image with the heat map of its predicted classes.

    Of label sets these are the classes above their thresholds, or else the most
    probable one. ConfigError if the network has no place for a map.
    """
    classes = top_class(logits)[:, None] == np.arange(logits.shape[1])
    if run.thresholds is not None:
        is_present = run.to_probabilities(logits) >= run.thresholds
        classes = np.where(is_present.any(1, keepdims=True), is_present, classes)
    inputs = run.preprocess(np.array([file.image for file in files]))
    maps = class_maps(model, inputs, classes)
    if maps is None:
        why = "no layer of the network has a height and a width"
        raise ConfigError(f"heatmaps: {why}; drop heatmaps")
    options, (*size, channels) = run.config.resize_options, run.image_shape
    if run.input_shape != run.image_shape:  # the augmentation crops
        maps = np.array([enlarged(heat, size, run.input_box) for heat in maps])
    for file, heat in zip(files, maps, strict=True):
        pixels = read_upright(file.source, channels, max_pixels, run.pixels)
        box = source_box(pixels.shape[:2], size, **options)
        take(file.path, pixels, enlarged(heat, pixels.shape, box))


class Pictures:
    """Function that writes images with their heat maps to a folder; see `Take`.

    A picture has the name of its image, below the folder that all images have in
    common. ConfigError if the folder has files, or images would be looked for in it.
    """

    def __init__(self, folder: str | os.PathLike, paths: Sequence[str]):
        self._name = f"heatmaps={folder}"
        self._folder = pathlib.Path(folder).expanduser().resolve()
        with errors_of_output(self._name):
            if self._folder.exists() and any(self._folder.iterdir()):
                raise ConfigError(f"{self._name}: is not empty; choose a new folder")
        for path in map(os.path.realpath, paths):
            if self._folder.is_relative_to(path):
                raise ConfigError(f"{self._name}: is in {path}; choose another folder")
        tops = [_absolute(x if os.path.isdir(x) else os.path.dirname(x)) for x in paths]
        self._top = os.path.commonpath(tops) if tops else os.getcwd()

    def __call__(self, path: str, pixels: np.ndarray, heat: np.ndarray) -> None:
        """Write a picture; ConfigError if the folder cannot be written."""
        name = os.path.relpath(_absolute(path), self._top)
        stem, suffix = os.path.splitext(name)
        if suffix.lower() not in FORMATS:
            stem, suffix = name, ".png"
        file = io.BytesIO()
        picture = Image.fromarray(overlay(pixels, heat))
        picture.save(file, FORMATS[suffix.lower()], quality=90)
        with errors_of_output(self._name):
            store.make_folders((self._folder / name).parent)
            target = store.free_name(self._folder / stem, suffix)
            store.write_aside(target, file.getvalue())


def _absolute(path):
    """Return an absolute path, for a URL from its host and path."""
    if is_url(path):
        path = "/" + path.partition("://")[2].partition("?")[0]
    return os.path.abspath(path)
