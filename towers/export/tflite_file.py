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
from towers.export.saved_model import PREPROCESSING, SERVING


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
        precision: "float16" stores parameters in 16 bits; "int8" quantizes the network
            and its activations, except in operations without a kernel for that.
        calibration: uint8 images [n, *run.image_shape], from which "int8" learns the
            ranges of activations.
    """
    # Only a SavedModel has signatures that the converter keeps.
    source = path.with_name("saved_model")
    saved_model.save(source, network, {SERVING: saved_model.predict_fn(network, run)})
    with quiet_imports(), warnings.catch_warnings():  # about its own former parts
        warnings.simplefilter("ignore")
        if precision == "int8":
            content = _quantized(source, calibration)
        else:
            converter = _converter(source)
            if precision == "float16":
                converter.optimizations = [tf.lite.Optimize.DEFAULT]
                converter.target_spec.supported_types = [tf.float16]
            content = converter.convert()
    path.write_bytes(content)
    with zipfile.ZipFile(path, "a") as archive:
        names = "".join(f"{printable(name)}\n" for name in run.class_names)
        archive.writestr("labels.txt", names)


def _converter(source):
    return tf.lite.TFLiteConverter.from_saved_model(os.fspath(source))


def _quantized(source, calibration):
    """The network in int8 behind preprocessing in float32: eight bits of an image's
    variance are 0 for an image of little contrast, which is then divided by that."""
    interpreter = tf.lite.Interpreter(model_content=_converter(source).convert())
    names = [tensor["name"] for tensor in interpreter.get_tensor_details()]
    converter = _converter(source)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: (
        {"images": image[None]} for image in calibration
    )
    # Of the converter's interface only this leaves operations as they are.
    debugger = tf.lite.experimental.QuantizationDebugger(
        converter=converter,
        debug_dataset=lambda: iter(()),
        debug_options=tf.lite.experimental.QuantizationDebugOptions(
            denylisted_nodes=[name for name in names if PREPROCESSING in name]
        ),
    )
    return debugger.get_nondebug_quantized_model()
