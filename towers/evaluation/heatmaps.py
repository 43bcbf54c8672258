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
from towers.data.files.paths import reason
from towers.data.files.reading import is_url
from towers.data.files.unlabeled import ImageFile, read_upright
from towers.errors import ConfigError
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

    Of label sets these are the classes above their thresholds; if there are none, the
    most probable one. ConfigError if the network has no place for a map.
    """
    classes = top_class(logits)[:, None] == np.arange(logits.shape[1])
    if run.thresholds is not None:
        is_present = run.to_probabilities(logits) >= run.thresholds
        classes = np.where(is_present.any(1, keepdims=True), is_present, classes)
    inputs = run.preprocess(np.stack([file.image for file in files]))
    maps = class_maps(model, inputs, classes)
    if maps is None:
        raise ConfigError(
            "heatmaps: no layer of the network has a height and a width; drop heatmaps"
        )
    options, (height, width, channels) = run.config.resize_options, run.image_shape
    first, *size = run.input_box[:2], *run.input_box[2:]
    for file, heat in zip(files, maps, strict=True):
        pixels = read_upright(file.source, channels, max_pixels)
        box = source_box(pixels.shape[:2], (height, width), **options)
        scale = box[2] / height, box[3] / width
        begin = [box[i] + first[i] * scale[i] for i in (0, 1)]
        box = begin + [size[i] * scale[i] for i in (0, 1)]
        take(file.path, pixels, enlarged(heat, pixels.shape, box))


class Pictures:
    """Function that writes images with their heat maps to a folder.

    A picture has the name of its image, below the folder that all images have in
    common. ConfigError if the folder has files, or images would be looked for in it.
    """

    def __init__(self, folder: str | os.PathLike, paths: Sequence[str]):
        self._name = f"heatmaps={folder}"
        self._folder = pathlib.Path(folder).expanduser().resolve()
        try:
            if any(self._folder.iterdir()):
                raise ConfigError(f"{self._name}: is not empty; choose a new folder")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigError(f"{self._name}: {reason(error)}") from None
        for path in map(os.path.realpath, paths):
            if self._folder.is_relative_to(path):
                raise ConfigError(f"{self._name}: is in {path}; choose another folder")
        places = [_absolute(x) for x in paths]
        tops = [x if os.path.isdir(x) else os.path.dirname(x) for x in places]
        self._top = os.path.commonpath(tops) if tops else ""

    def __call__(self, path: str, pixels: np.ndarray, heat: np.ndarray) -> None:
        """Write a picture; see `Take`."""
        place = pathlib.Path(path)
        if self._top:
            place = pathlib.Path(os.path.relpath(_absolute(path), self._top))
        if place.suffix.lower() not in FORMATS:
            place = place.with_name(f"{place.name}.png")
        target, file = self._folder / place, io.BytesIO()
        picture = Image.fromarray(overlay(pixels, heat))
        picture.save(file, FORMATS[place.suffix.lower()], quality=90)
        try:
            store.make_folders(target.parent)
            target = store.free_name(target.with_suffix(""), target.suffix)
            store.write_aside(target, file.getvalue())
        except OSError as error:
            raise ConfigError(f"{self._name}: {reason(error)}") from None


def _absolute(path):
    """Return an absolute path; of a URL that of its host and path."""
    if is_url(path):
        path = "/" + path.partition("://")[2].partition("?")[0]
    return os.path.abspath(path)
