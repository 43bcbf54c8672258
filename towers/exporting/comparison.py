"""Comparison of an export with the trained network."""

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

from towers import errors
from towers.build.builder import load_data_set, match_parameters
from towers.build.restored import RestoredRun, reported_weights
from towers.data.files.paths import FORMATS_TEXT, Paths, check_paths, walk
from towers.data.files.unlabeled import read_files
from towers.data.sources import Source
from towers.exporting.formats import LIMITS
from towers.messages import one_line, printable, shown
from towers.metrics.predictions import top_class
from towers.models.create import without_noise
from towers.pretrained.initial import read_variables

NUM_COMPARED, NUM_JUDGED, NUM_CALIBRATION = 64, 512, 256
BATCH_SIZE = 32
# Smaller logits are compared as they are: 1e-4 changes the odds of classes by 0.01 %.
SMALLEST_SCALE = 1.0
PROGRAM = pathlib.Path(__file__).with_name("load_in_new_process.py")


def trained_network(run: RestoredRun) -> keras.Model:
    """Return the network in float32 with the weights that the run reports."""
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
    """Return logits, float32 [n, classes], of a `trained_network` for images."""
    # As a graph: TensorFlow warns of functions that layers call with many shapes.
    model = tf.function(without_noise(trained), autograph=False, reduce_retracing=True)
    batches = np.split(images, range(BATCH_SIZE, len(images), BATCH_SIZE))
    with tf.device("CPU:0"):  # a GPU may round to TF32
        return np.concatenate([model(run.preprocess(batch)) for batch in batches])


def predict_in_new_process(
    format: str, path: pathlib.Path, images: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return logits and class names of an export, from a process without towers."""
    with tempfile.TemporaryDirectory(prefix=f"{path.name}-", dir=path.parent) as folder:
        source, result = f"{folder}/images.npy", f"{folder}/logits.npz"
        np.save(source, images)
        # -P: the program's folder has modules with the names of packages.
        done = subprocess.run(
            [sys.executable, "-P", PROGRAM, format, path, source, result],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
            check=False,
        )
        if not done.returncode:
            with np.load(result) as values:
                class_names = values["class_names"].tolist()
                return values["logits"], tuple(map(printable, class_names))
    lines = done.stderr.decode(errors="replace").strip().splitlines() or ["?"]
    why = f"{one_line(lines[-1], 200)} (exit {done.returncode})"
    begin = f"the {format} export cannot be used: in a new process it ends with"
    raise errors.DoubtfulExport(f"{begin} {why}")


def predict_with_variables(
    path: pathlib.Path, run: RestoredRun, images: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return logits and class names of a new network with the values of a file."""
    from safetensors import safe_open

    network = trained_network(run)
    values = read_variables(str(path), run.config.model, network)
    for variable in network.variables:
        if variable.path not in values:
            raise errors.DoubtfulExport(f"the safetensors export lacks {variable.path}")
        variable.assign(values[variable.path])
    with safe_open(path, "numpy") as file:
        class_names = json.loads(file.metadata()["class_names"])
    logits = logits_of(run, network, images)
    return logits, tuple(map(printable, class_names))


def figures_of(
    run: RestoredRun,
    logits: np.ndarray,
    expected: np.ndarray,
    labels: np.ndarray | None,
) -> dict[str, float]:
    """Return how an export differs from the network.

    "largest_difference" of logits is relative to the largest expected one, at least
    SMALLEST_SCALE; "changed" is the fraction of images whose class changes. With labels
    there are also "accuracy" and "accuracy_lost". For label sets, F1 over all images
    and classes replaces accuracy, and 1 - F1 replaces "changed".
    """
    scale = max(SMALLEST_SCALE, np.abs(expected).max())
    predicted, wanted = _classes(run, logits), _classes(run, expected)
    difference = float(np.abs(logits - expected).max() / scale)
    figures = {"largest_difference": difference, "changed": 1 - _f1(predicted, wanted)}
    if labels is not None:
        if labels.ndim == 1:
            labels = labels[:, np.newaxis] == np.arange(logits.shape[1])
        figures["accuracy"] = _f1(predicted, labels > 0)
        figures["accuracy_lost"] = _f1(wanted, labels > 0) - figures["accuracy"]
    return figures


def _classes(run, logits):
    """Return the classes that are predicted for each image, bool [n, classes]."""
    if run.thresholds is not None:
        return run.to_probabilities(logits) >= run.thresholds
    return np.arange(logits.shape[1]) == top_class(logits)[:, np.newaxis]


def _f1(a, b):
    total = a.sum() + b.sum()
    return float(2 * (a & b).sum() / total) if total else 1.0


def exceeded(figures: dict[str, float], precision: str, num_images: int) -> list[str]:
    """Return the exceeded limits, each with its figure."""
    one = 0.0 if precision == "float32" else 1.001 / num_images
    return [
        f"{name} {figures[name]:.3g} (at most {limit:g})"
        for name, limit in LIMITS[precision].items()
        if name in figures and not figures[name] <= max(limit, one)  # nor NaN
    ]


def images_of(
    run: RestoredRun, precision: str, *, data_dir: str = "", paths: Paths = ()
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None, str]:
    """Return images to compare, their labels, images to calibrate, and the origin."""
    # Images are evenly spaced; noise if the data set cannot be read.
    count = NUM_COMPARED if precision == "float32" else NUM_JUDGED
    if paths:
        images = _read_files(run, paths)
        compared = images[_evenly_spaced(len(images), count)]
        return compared, None, images, "of the given images"
    place = data_dir or run.config.data_dir
    config = dataclasses.replace(run.config, image_cache_mb=0.0, data_dir=place)
    calibrates, calibration = precision == "int8", None
    try:
        data_set = load_data_set(config, run.dataset_info, test_only=not calibrates)
        images, labels = _some(data_set.test, count, run.dtype)
        if calibrates and data_set.train is not None:
            calibration, _ = _some(data_set.train, NUM_CALIBRATION, run.dtype)
        return images, labels, calibration, "test images"
    except (errors.ConfigError, errors.DataError) as error:
        if data_dir:
            raise errors.DataError(str(error)) from None
        reason = one_line(error, 120)
        origin = f"random images, because the data set cannot be read ({reason})"
        size = count, *run.image_shape
        images = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        if not run.pixels.is_photo:
            low, high = np.array(run.pixels.low), np.array(run.pixels.high)
            images = (low + (high - low) * (images / 255)).astype(run.dtype)
        return images, None, None, origin


def _some(source: Source, count: int, dtype: str) -> list[np.ndarray]:
    indices = _evenly_spaced(source.num_examples, count)
    with errors.data_errors_of_tensorflow():
        images, labels = source.read(tf.constant(indices))
    return [images.numpy().astype(dtype, copy=False), labels.numpy()]


def _evenly_spaced(length: int, count: int) -> np.ndarray:
    return np.linspace(0, length - 1, min(count, length)).astype(np.int64)


def _read_files(run, paths):
    """Return at most NUM_CALIBRATION evenly spaced image files, resized."""

    def fail(path, reason):
        raise errors.DataError(f"images: {shown(path)}: {reason}")

    paths = check_paths(paths)
    names = list(walk(paths, fail))
    if not names:
        way = f"of a folder the {FORMATS_TEXT} files are taken"
        raise errors.DataError(f"images={shown(','.join(paths))}: no image; {way}")
    spaced = [names[i] for i in _evenly_spaced(len(names), NUM_CALIBRATION)]
    config, images = run.config, []
    options = config.resize_options | {"pixels": run.pixels}
    limit = config.max_image_pixels
    for path, image, fault in read_files(spaced, run.image_shape, limit, **options):
        if image is None:
            fail(path, fault)
        images.append(image)
    return np.stack(images).astype(run.dtype, copy=False)
