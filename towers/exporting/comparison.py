"""Logits of an export in a new process, and of the trainer's network."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf

from towers.build import match_parameters
from towers.errors import ExportError, one_line, printable
from towers.evaluation.restored import RestoredRun, reported_weights
from towers.models.create import without_noise

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
    """Float32 logits [n, classes] of a `RestoredRun.network`, for uint8 images
    [n, *run.image_shape]."""
    model = without_noise(trained)
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


def largest_difference(logits: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference of a logit, as a share of the largest expected one, or of
    SMALLEST_SCALE where that is larger."""
    scale = max(SMALLEST_SCALE, np.abs(expected).max())
    return float(np.abs(logits - expected).max() / scale)
