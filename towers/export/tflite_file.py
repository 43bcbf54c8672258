"""Export as a .tflite file, for LiteRT (TensorFlow Lite) on phones and boards."""

import os
import pathlib
import warnings
import zipfile

import keras
import numpy as np
import tensorflow as tf

from towers import quiet_imports
from towers.errors import printable
from towers.evaluation import RestoredRun
from towers.export import saved_model
from towers.export.saved_model import SERVING


def write(
    path: pathlib.Path,
    network: keras.Model,
    run: RestoredRun,
    precision: str = "float32",
    calibration: np.ndarray | None = None,
) -> None:
    """Writes the function of `predict_fn`, its signature "serving_default".

    The names of the classes are `labels.txt`, a line each, in a zip archive at the end
    of the file, where the metadata tools of TensorFlow Lite put associated files.

    Args:
        precision: "float16" stores parameters in 16 bits; "int8" quantizes activations
            as well, except in operations without a kernel for that.
        calibration: uint8 images [n, *run.image_shape], from which "int8" learns the
            ranges of activations.
    """
    # Only a SavedModel has signatures that the converter keeps.
    source = path.with_name("saved_model")
    saved_model.save(source, network, {SERVING: saved_model.predict_fn(network, run)})
    converter = tf.lite.TFLiteConverter.from_saved_model(os.fspath(source))
    if precision != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if precision == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if precision == "int8":
        converter.representative_dataset = lambda: (
            {"images": image[None]} for image in calibration
        )
    with quiet_imports(), warnings.catch_warnings():  # about its own former parts
        warnings.simplefilter("ignore")
        content = converter.convert()
    path.write_bytes(content)
    with zipfile.ZipFile(path, "a") as archive:
        names = "".join(f"{printable(name)}\n" for name in run.class_names)
        archive.writestr("labels.txt", names)
