"""Images for an export: to compare its logits on, and to calibrate it with."""

import os
import pathlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from towers import data
from towers.data.decoding import Decoding
from towers.data.pixels import resize_image
from towers.data.sources import Source, shown
from towers.errors import ConfigError, DataError, data_errors_of_tensorflow, one_line
from towers.evaluation import RestoredRun

NUM_COMPARED, NUM_CALIBRATION = 64, 256


def images_of(
    run: RestoredRun, *, data_dir: str = "", paths: Sequence[str] = ()
) -> tuple[np.ndarray, np.ndarray | None, str]:
    """Images to compare with and to calibrate with, uint8 [n, *run.image_shape].

    Those of the files, else test and training images of the run's data set, at equal
    distances. Where the data set cannot be read, images are drawn, and there are none
    to calibrate with.

    Args:
        data_dir: of the data set, if it is not where it was.
        paths: image files, and folders of them.

    Returns:
        Both arrays, and what they are, in words.

    Raises:
        DataError: the data set is not in `data_dir`, or a file is no image.
        ConfigError: the data set has images of another shape.
    """
    if paths:
        images = read_files(run, paths)
        return images[:NUM_COMPARED], images[:NUM_CALIBRATION], "of the given images"
    config = run.config
    try:
        data_set = data.load(
            config.dataset,
            data_dir or config.data_dir,
            image_size=config.image_size,
            image_cache_mb=0.0,
            max_image_pixels=config.max_image_pixels,
        )
        for source in (data_set.test, data_set.train):
            if tuple(source.image_shape) != run.image_shape:
                raise ConfigError(
                    f"the images of {data_set.origin} are not those of the run: "
                    f"{source.image_shape} instead of {run.image_shape}; give "
                    "--data_dir or --images"
                )
        compared = _some(data_set.test, NUM_COMPARED)
        return compared, _some(data_set.train, NUM_CALIBRATION), "test images"
    except DataError as error:
        if data_dir:
            raise
        words = f"drawn images, as the data set cannot be read ({one_line(error, 120)})"
        return drawn(run.image_shape, NUM_COMPARED), None, words


def _some(source: Source, most: int) -> np.ndarray:
    count = min(most, source.num_examples)
    indices = np.linspace(0, source.num_examples - 1, count).astype(np.int64)
    with data_errors_of_tensorflow():
        return source.read(tf.constant(indices))[0].numpy()


def drawn(image_shape: tuple[int, int, int], count: int) -> np.ndarray:
    """Images of colored squares under noise, uint8 [count, *image_shape]."""
    rng = np.random.default_rng(0)
    height, width, channels = image_shape
    rows, columns = -(-height // 4), -(-width // 4)
    squares = rng.integers(0, 224, (count, rows, columns, channels))
    images = squares.repeat(4, 1).repeat(4, 2)[:, :height, :width]
    return (images + rng.integers(0, 32, images.shape)).astype(np.uint8)


def read_files(run: RestoredRun, paths: Sequence[str]) -> np.ndarray:
    """The middle of image files, resized to the run's, uint8 [n, *run.image_shape].

    Args:
        paths: files, and folders all of whose files are read; at most NUM_CALIBRATION.

    Raises:
        DataError: one is no image, or there is none.
    """
    options = Decoding(max_pixels=run.config.max_image_pixels)
    images = []
    for path in _files(paths)[:NUM_CALIBRATION]:
        try:
            images.append(resize_image(path.read_bytes(), run.image_shape, options))
        except (OSError, ValueError) as error:
            words = getattr(error, "strerror", None) or one_line(error)
            raise DataError(f"images: {shown(str(path))}: {words}") from None
    if not images:
        raise DataError(f"images={shown(','.join(paths))}: there is no file")
    return np.stack(images)


def _files(paths):
    found = []
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            found += sorted(
                pathlib.Path(folder, name)
                for folder, _, names in os.walk(path)
                for name in names
                if not name.startswith(".")
            )
        else:
            found.append(path)
    return found
