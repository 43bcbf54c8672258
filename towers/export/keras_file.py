"""Export as a .keras file, which Keras loads and goes on training."""

import json
import pathlib
import zipfile

import keras
import numpy as np

from towers.evaluation import RestoredRun
from towers.export.stock import with_preprocessing


def write(
    path: pathlib.Path,
    network: keras.Model,
    run: RestoredRun,
    precision: str = "float32",
    calibration: np.ndarray | None = None,
) -> None:
    """Writes a model from uint8 images to logits, of stock layers alone.

    Keras has no field for the names of classes. They are one more file of the archive,
    `class_names.json`, which `keras.saving.load_model` does not read.

    Raises:
        ConfigError: see `with_preprocessing`.
    """
    with_preprocessing(network, run).save(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("class_names.json", json.dumps(run.class_names))
