"""Images for an export: to compare its logits on, and to calibrate it with."""

import contextlib
import dataclasses

import numpy as np
import tensorflow as tf

from towers.build import load_data_set
from towers.data import unlabeled
from towers.data.decoding import Decoding
from towers.data.paths import ENDINGS_TEXT, Paths, check_paths, walk
from towers.data.sources import Source, shown
from towers.errors import ConfigError, DataError, data_errors_of_tensorflow, one_line
from towers.evaluation import RestoredRun
from towers.run.dataset_info import DatasetInfo

NUM_COMPARED, NUM_CALIBRATION = 64, 256


def images_of(
    run: RestoredRun,
    *,
    data_dir: str = "",
    paths: Paths = (),
    calibrate: bool = False,
) -> tuple[np.ndarray, np.ndarray | None, str]:
    """Images to compare with and to calibrate with, uint8 [n, *run.image_shape].

    Those of the files, else test and training images of the run's data set, both at
    equal distances. Where the data set cannot be read, or is another one, images are
    drawn, and there are none to calibrate with.

    Args:
        data_dir: of the data set, if it is not where it was.
        paths: image files, and folders of them; none for the data set.
        calibrate: whether training images of the data set are read.

    Returns:
        Both arrays, and what they are, in words.

    Raises:
        DataError: the run's data set is not in `data_dir`, or a file is no image.
    """
    if paths:
        images = read_files(run, paths)
        compared = images[_equally_spaced(len(images), NUM_COMPARED)]
        return compared, images, "of the given images"
    try:
        data_set = _load(run, data_dir, test_only=not calibrate)
        compared = _some(data_set.test, NUM_COMPARED)
        calibration = _some(data_set.train, NUM_CALIBRATION) if calibrate else None
        return compared, calibration, "test images"
    except DataError as error:
        if data_dir:
            raise
        words = f"drawn images, as the data set cannot be read ({one_line(error, 120)})"
        return drawn(run.image_shape, NUM_COMPARED), None, words


def _load(run, data_dir, test_only):
    data_dir = data_dir or run.config.data_dir
    config = dataclasses.replace(run.config, data_dir=data_dir, image_cache_mb=0.0)
    info = DatasetInfo(
        config.dataset, run.class_names, run.image_shape, run.mean, run.deviation
    )
    try:
        return load_data_set(config, info, test_only=test_only)
    except ConfigError as error:  # such as one in a file that is not here
        raise DataError(str(error)) from None


def _some(source: Source, most: int) -> np.ndarray:
    indices = _equally_spaced(source.num_examples, most)
    with data_errors_of_tensorflow():
        return source.read(tf.constant(indices))[0].numpy()


def _equally_spaced(length: int, most: int) -> np.ndarray:
    """int64: indices at equal distances, from the first to the last; all of few."""
    return np.linspace(0, length - 1, min(most, length)).astype(np.int64)


def drawn(image_shape: tuple[int, int, int], count: int) -> np.ndarray:
    """Images of colored squares under noise, uint8 [count, *image_shape]."""
    rng = np.random.default_rng(0)
    height, width, channels = image_shape
    rows, columns = -(-height // 4), -(-width // 4)
    squares = rng.integers(0, 224, (count, rows, columns, channels))
    images = squares.repeat(4, 1).repeat(4, 2)[:, :height, :width]
    return (images + rng.integers(0, 32, images.shape)).astype(np.uint8)


def read_files(run: RestoredRun, paths: Paths) -> np.ndarray:
    """The middle of image files, resized to the run's, uint8 [n, *run.image_shape].

    Args:
        paths: files, and folders, see `walk`; of all images NUM_CALIBRATION are read,
            at equal distances.

    Raises:
        DataError: one of these cannot be read, or there is none.
    """

    def fail(path, reason):
        raise DataError(f"images: {shown(path)}: {reason}")

    paths = check_paths(paths)
    # Two walks, since the paths of a million files are not to be in memory.
    num_files = sum(1 for _ in walk(paths, fail))
    chosen = set(_equally_spaced(num_files, NUM_CALIBRATION).tolist())
    spaced = (path for i, path in enumerate(walk(paths, fail)) if i in chosen)
    decoding = Decoding(max_pixels=run.config.max_image_pixels)
    files = unlabeled.read_files(spaced, run.image_shape, decoding)
    images = []
    with contextlib.closing(files):
        for file in files:
            if file.image is None:
                fail(file.path, file.fault)
            images.append(file.image)
    if not images:
        raise DataError(
            f"images={shown(','.join(paths))}: no image; of a folder the "
            f"{ENDINGS_TEXT} files are taken"
        )
    return np.stack(images)
