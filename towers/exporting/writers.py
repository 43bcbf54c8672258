"""Writers of the formats."""

import dataclasses
import json
import logging
import pathlib
import tempfile
import warnings
import zipfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import console
from towers.build.restored import RestoredRun
from towers.config import choices
from towers.data.files.image import FILTERS
from towers.data.unknown import UNKNOWN
from towers.errors import ConfigError
from towers.exporting.encoded_images import decode_image
from towers.exporting.stock import config_for_older_keras, with_preprocessing
from towers.exporting.tflite_metadata import LABELS, with_metadata
from towers.messages import printable
from towers.pretrained import torch_names

PREPROCESSING_JSON = "preprocessing.json"  # options that turn a photo into an input
SERVING = "serving_default"  # TensorFlow Serving's default signature
PREPROCESSING = "preprocessing"  # scope of the operations before the network
ONNX_OPSET = 18


def predict_fn(
    network: keras.Model, run: RestoredRun, present_dtype: tf.DType = tf.bool
) -> Any:
    """Return the function from images to "logits" and "probabilities"."""
    to_probabilities = tf.sigmoid if run.dataset_info.multi_label else tf.nn.softmax
    images_spec = tf.TensorSpec([None, *run.image_shape], run.dtype, name="images")

    @tf.function(input_signature=[images_spec], autograph=False)
    def predict(images):
        with tf.name_scope(PREPROCESSING):
            images = run.preprocess(images)
        logits = network(images, training=False)
        probabilities = to_probabilities(logits / run.temperature)
        results = {"logits": logits, "probabilities": probabilities}
        if run.thresholds is not None or run.reject_below:
            limits = run.reject_below if run.thresholds is None else run.thresholds
            is_present = probabilities >= tf.constant(limits, probabilities.dtype)
            if run.reject_below:
                top = tf.argmax(logits, 1), len(run.class_names)
                is_present &= tf.one_hot(*top, True, False, dtype=tf.bool)
            results["present"] = tf.cast(is_present, present_dtype)
        return results

    return predict


def preprocessing_json(run: RestoredRun) -> str:
    """Return the options of the function `pixels` in docs/export.md as JSON.

    For other images than 8-bit gray and colors also the range of their pixels, which
    the export scales.
    """
    options = run.config.resize_options
    options["center_crop"] = options["center_crop"] or 1.0
    options["interpolation"] = FILTERS[options["interpolation"]].name.lower()
    options["fit"] = options["fit"].replace("auto", "crop")
    shape = zip(("height", "width", "channels"), run.image_shape, strict=True)
    if not run.pixels.is_photo:
        options["pixels"] = dataclasses.asdict(run.pixels)
    return json.dumps(dict(shape) | options)


def rejection(run: RestoredRun) -> dict[str, float]:
    """Return what the user of logits needs to answer that an image is of no class."""
    return {"temperature": run.temperature, "threshold": run.reject_below}


def write_saved_model(
    path: pathlib.Path, network: keras.Model, run: RestoredRun, *_, **options
):
    """Write a SavedModel with signatures for images, encoded images and class names.

    Encoded images are 8-bit gray and colors only.
    """
    predict = predict_fn(network, run, **options)

    def predict_encoded(encoded_images):
        options = run.config.resize_options
        images = tf.map_fn(
            lambda content: decode_image(content, run.image_shape, **options),
            encoded_images,
            fn_output_signature=tf.TensorSpec(run.image_shape, tf.uint8),
        )
        results = predict(images)
        # TensorFlow Serving's HTTP cannot call a signature without inputs.
        names = tf.gather(tf.constant(run.class_names), tf.argmax(results["logits"], 1))
        if run.reject_below:
            is_class = tf.reduce_any(tf.cast(results["present"], tf.bool), 1)
            names = tf.where(is_class, names, UNKNOWN)
        return results | {"class": names}

    def class_names():
        return {"class_names": tf.constant(run.class_names)}

    files_spec = tf.TensorSpec([None], tf.string, name="encoded_images")
    archive = keras.export.ExportArchive()
    archive.add_endpoint(SERVING, predict, predict.input_signature)
    if run.dtype == "uint8" and run.image_shape[-1] in (1, 3):
        archive.add_endpoint("encoded_images", predict_encoded, [files_spec])
    elif not options:  # not for another format
        kind = f"{run.image_shape[-1]} band(s) of {run.pixels.dtype}"
        console.line(f"without a signature encoded_images, as images are {kind}")
    archive.add_endpoint("class_names", class_names, [])
    archive.write_out(path, verbose=False)
    (path / PREPROCESSING_JSON).write_text(preprocessing_json(run))


def write_keras(path: pathlib.Path, network: keras.Model, run: RestoredRun, *_):
    """Write a .keras file from images to logits, with two JSON files."""
    model = with_preprocessing(network, run)
    get_config = model.get_config
    model.get_config = lambda: config_for_older_keras(get_config())
    model.save(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("class_names.json", json.dumps(run.class_names))
        if run.reject_below:
            archive.writestr("rejection.json", json.dumps(rejection(run)))
        archive.writestr(PREPROCESSING_JSON, preprocessing_json(run))


def write_tflite(
    path: pathlib.Path,
    network: keras.Model,
    run: RestoredRun,
    precision: str = "float32",
    calibration: np.ndarray | None = None,
):
    """Write a .tflite file for LiteRT, with TFLite Metadata and attached files."""
    # This function and `_quantized` alone use `tf.lite`, which is to leave TensorFlow;
    # LiteRT (ai-edge-litert 2.3.0) has no converter of SavedModels yet.
    create_converter = tf.lite.TFLiteConverter.from_saved_model
    # The converter keeps only the signatures of a SavedModel.
    with tempfile.TemporaryDirectory(prefix=f"{path.name}-", dir=path.parent) as source:
        # MediaPipe needs all outputs in one type.
        options = {"present_dtype": tf.float32}
        write_saved_model(pathlib.Path(source), network, run, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own former parts
            converter = create_converter(source, [SERVING])
            if precision == "float16":
                converter.optimizations = [tf.lite.Optimize.DEFAULT]
                converter.target_spec.supported_types = [tf.float16]
            content = converter.convert()
            if precision == "int8":
                converter = create_converter(source, [SERVING])
                content = _quantized(converter, content, calibration)
    path.write_bytes(with_metadata(content, run.image_shape[-1], [PREPROCESSING_JSON]))
    with zipfile.ZipFile(path, "a") as archive:
        names = "".join(f"{printable(name)}\n" for name in run.class_names)
        archive.writestr(LABELS, names)
        archive.writestr(PREPROCESSING_JSON, preprocessing_json(run))


def _quantized(converter, in_float32, calibration):
    """Return int8 content; the preprocessing stays float32 for low contrast."""
    tensors = tf.lite.Interpreter(model_content=in_float32).get_tensor_details()
    names = [tensor["name"] for tensor in tensors if PREPROCESSING in tensor["name"]]
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: (
        {"images": image[None]} for image in calibration
    )
    # The converter has no other option that excludes operations.
    options = tf.lite.experimental.QuantizationDebugOptions(denylisted_nodes=names)
    debugger = tf.lite.experimental.QuantizationDebugger(
        converter=converter, debug_dataset=lambda: (), debug_options=options
    )
    return debugger.get_nondebug_quantized_model()


def write_onnx(path: pathlib.Path, network: keras.Model, run: RestoredRun, *_):
    """Write an .onnx file of `predict_fn`, its metadata in JSON."""
    import onnx
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.CRITICAL)  # the comparison suffices
    predict = predict_fn(network, run)
    model, _ = tf2onnx.convert.from_function(
        predict,
        predict.input_signature,
        opset=ONNX_OPSET,
        custom_op_handlers={"Erfc": (_erfc, [])},
    )
    names, options = json.dumps(run.class_names), preprocessing_json(run)
    onnx.helper.set_model_props(model, {"class_names": names, "preprocessing": options})
    onnx.save(model, path)


def _erfc(graph, node, name, args):
    """Replace Erfc of TensorFlow's GELU, which tf2onnx 1.17 lacks, by 1 - Erf."""
    node.type = "Erf"
    one = graph.make_const(f"{name}_one", np.float32(1)).output[0]
    graph.insert_new_node_on_output(
        "Sub", node.output[0], name=f"{name}_from_one", inputs=[one, node.output[0]]
    )


def write_safetensors(path: pathlib.Path, trained: keras.Model, run: RestoredRun):
    """Write parameters in timm's names, with class names and preprocessing in JSON."""
    model = run.config.model
    tables = torch_names.tables(model)
    ours = {variable.path for variable in trained.variables}
    if not tables or torch_names.missing_variables(tables[0], ours):
        why = f"timm has no network like model={model}"
        raise ConfigError(f"format=safetensors: {why}; set --format=keras")
    from safetensors.numpy import save_file

    metadata: dict[str, object] = {
        "class_names": run.class_names,
        "input_size": run.input_shape,
        "mean": [value / 255 for value in run.dataset_info.mean],
        "std": [value / 255 for value in run.dataset_info.std],
    }
    augment = choices.find("augment", run.config.augment)
    if run.config.augment == "tutorial" or augment.is_in_a_file:
        del metadata["mean"], metadata["std"]  # images are standardized differently
    if run.reject_below:
        metadata["rejection"] = rejection(run)
    texts = {name: json.dumps(x) for name, x in metadata.items()}
    texts |= {"format": "pt", "preprocessing": preprocessing_json(run)}
    save_file(torch_names.state_dict(trained, tables[0]), path, texts)
