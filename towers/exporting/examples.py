"""Images for an export: to compare its logits on, and to calibrate it with."""

import dataclasses

import numpy as np
import tensorflow as tf

from towers.build import load_data_set
from towers.data.files.paths import FORMATS_TEXT, Paths, check_paths, shown, walk
from towers.data.files.unlabeled import read_files
from towers.data.sources import Source
from towers.errors import ConfigError, DataError, data_errors_of_tensorflow, one_line
from towers.evaluation.restored import RestoredRun

NUM_COMPARED, NUM_CALIBRATION = 64, 256


def images_of(
    run: RestoredRun, *, data_dir: str = "", paths: Paths = (), calibrate: bool = False
) -> tuple[np.ndarray, np.ndarray | None, str]:
    """Images to compare with, images to calibrate with, uint8 [n, *run.image_shape],
    and a description: from image files, or else test and training images of the run's
    data set, at equal distances. Where the data set cannot be read, or is another one,
    images are drawn, and there are none to calibrate with.

    DataError where the data set is not in the `data_dir` that is named, or a file is no
    image.
    """
    if paths:
        images = _read_files(run, paths)
        compared = images[_equally_spaced(len(images), NUM_COMPARED)]
        return compared, images, "of the given images"
    options = {"image_cache_mb": 0.0, "data_dir": data_dir or run.config.data_dir}
    config = dataclasses.replace(run.config, **options)
    try:
        data_set = load_data_set(config, run.dataset_info, test_only=not calibrate)
        compared = _some(data_set.test, NUM_COMPARED)
        calibration = _some(data_set.train, NUM_CALIBRATION) if calibrate else None
        return compared, calibration, "test images"
    except (ConfigError, DataError) as error:  # such as a file that is not here
        if data_dir:
            raise DataError(str(error)) from None
        origin = (
            f"drawn images, as the data set cannot be read ({one_line(error, 120)})"
        )
        size = NUM_COMPARED, *run.image_shape
        return np.random.default_rng(0).integers(0, 256, size, np.uint8), None, origin


def _some(source: Source, most: int) -> np.ndarray:
    indices = _equally_spaced(source.num_examples, most)
    with data_errors_of_tensorflow():
        return source.read(tf.constant(indices))[0].numpy()


def _equally_spaced(length: int, most: int) -> np.ndarray:
    """int64: indices at equal distances, from the first to the last; all of few."""
    return np.linspace(0, length - 1, min(most, length)).astype(np.int64)


def _read_files(run, paths):
    """The middle of at most NUM_CALIBRATION of the image files, at equal distances,
    resized to the run's size."""

    def fail(path, reason):
        raise DataError(f"images: {shown(path)}: {reason}")

    paths = check_paths(paths)
    names = list(walk(paths, fail))
    if not names:
        raise DataError(
            f"images={shown(','.join(paths))}: no image; of a folder the "
            f"{FORMATS_TEXT} files are taken"
        )
    spaced = [names[i] for i in _equally_spaced(len(names), NUM_CALIBRATION)]
    config, images = run.config, []
    options = config.max_image_pixels, config.center_crop, config.interpolation
    for path, image, fault in read_files(spaced, run.image_shape, *options):
        if image is None:
            fail(path, fault)
        images.append(image)
    return np.stack(images)
