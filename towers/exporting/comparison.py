"""Images, and the logits of an export and of the trainer's network for them."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

from towers.build import load_data_set, match_parameters
from towers.data.files.paths import FORMATS_TEXT, Paths, check_paths, shown, walk
from towers.data.files.unlabeled import read_files
from towers.data.sources import Source
from towers.errors import (
    ConfigError,
    DataError,
    ExportError,
    data_errors_of_tensorflow,
    one_line,
    printable,
)
from towers.evaluation.restored import RestoredRun, reported_weights
from towers.models.create import without_noise
from towers.run.initial import read_variables

NUM_COMPARED, NUM_CALIBRATION = 64, 256
BATCH_SIZE = 32
SMALLEST_SCALE = 0.01
PROGRAM = pathlib.Path(__file__).with_name("load_in_new_process.py")


def trained_network(run: RestoredRun) -> keras.Model:
    """`RestoredRun.network` in float32, whatever precision it was trained in, with the
    moving averages of the parameters where the run keeps them. Layers whose parameters
    are all frozen are not `trainable`."""
    config = dataclasses.replace(run.config, precision="float32")
    in_float32 = dataclasses.replace(run, config=config)
    network = in_float32.network(reported_weights(config))
    _, frozen = match_parameters(config, network)
    for layer in network.layers:
        names = {variable.path for variable in layer.trainable_variables}
        if names and names <= frozen:
            layer.trainable = False
    return network


def logits_of(run: RestoredRun, trained: keras.Model, images: np.ndarray) -> np.ndarray:
    """Float32 logits [n, classes] of a `trained_network` for uint8 images
    [n, *run.image_shape]."""
    # As a graph: TensorFlow warns of functions that layers call with many shapes.
    model = tf.function(without_noise(trained), autograph=False, reduce_retracing=True)
    batches = np.split(images, range(BATCH_SIZE, len(images), BATCH_SIZE))
    with tf.device("CPU:0"):  # a GPU may round to TF32
        return np.concatenate([model(run.preprocess(batch)) for batch in batches])


def predict_in_new_process(
    format: str, path: pathlib.Path, images: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Logits [n, classes] and names of classes, `printable`, of an export that its own
    runtime loads in a new process without towers. Images and logits are stored next to
    it. ExportError where it cannot be loaded there."""
    with tempfile.TemporaryDirectory(prefix=f"{path.name}-", dir=path.parent) as folder:
        source, result = f"{folder}/images.npy", f"{folder}/logits.npz"
        np.save(source, images)
        # Without the folder of the program on its path, whose modules are named alike.
        done = subprocess.run(
            [sys.executable, "-P", PROGRAM, format, path, source, result],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        )
        if not done.returncode:
            with np.load(result) as values:
                class_names = values["class_names"].tolist()
                return values["logits"], tuple(map(printable, class_names))
    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["?"]
    raise ExportError(
        f"the {format} export cannot be used, so it is removed; in a new process "
        f"it ends with {one_line(lines[-1], 200)} (exit {done.returncode})"
    )


def predict_with_variables(
    path: pathlib.Path, run: RestoredRun, images: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Logits of a new network with the variables of a file, and the names of the
    classes in it, `printable`. ExportError where a variable is missing."""
    from safetensors import safe_open

    network = trained_network(run)
    values = read_variables(str(path), run.config.model, network)
    for variable in network.variables:
        if variable.path not in values:
            raise ExportError(f"the safetensors export lacks {variable.path}")
        variable.assign(values[variable.path])
    with safe_open(path, "numpy") as file:
        class_names = json.loads(file.metadata()["class_names"])
    logits = logits_of(run, network, images)
    return logits, tuple(map(printable, class_names))


def largest_difference(logits: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference of a logit, as a share of the largest expected one, or of
    SMALLEST_SCALE where that is larger."""
    scale = max(SMALLEST_SCALE, np.abs(expected).max())
    return float(np.abs(logits - expected).max() / scale)


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
        why = f"as the data set cannot be read ({one_line(error, 120)})"
        origin = f"drawn images, {why}"
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
    """At most NUM_CALIBRATION of the image files, at equal distances, resized."""

    def fail(path, reason):
        raise DataError(f"images: {shown(path)}: {reason}")

    paths = check_paths(paths)
    names = list(walk(paths, fail))
    if not names:
        way = f"of a folder the {FORMATS_TEXT} files are taken"
        raise DataError(f"images={shown(','.join(paths))}: no image; {way}")
    spaced = [names[i] for i in _equally_spaced(len(names), NUM_CALIBRATION)]
    config, images = run.config, []
    options = config.max_image_pixels, config.center_crop, config.interpolation
    for path, image, fault in read_files(spaced, run.image_shape, *options):
        if image is None:
            fail(path, fault)
        images.append(image)
    return np.stack(images)
