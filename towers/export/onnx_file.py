"""Export as an .onnx file, for ONNX Runtime and the programs that read ONNX."""

import json
import logging
import pathlib

import keras
import numpy as np

from towers.evaluation import RestoredRun
from towers.export.saved_model import predict_fn

OPSET = 18


def write(
    path: pathlib.Path,
    network: keras.Model,
    run: RestoredRun,
    precision: str = "float32",
    calibration: np.ndarray | None = None,
) -> None:
    """Writes the function of `predict_fn`; its metadata have "class_names", in JSON."""
    import onnx
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.CRITICAL)  # `check` sees its errors
    predict = predict_fn(network, run)
    model, _ = tf2onnx.convert.from_function(
        predict,
        predict.input_signature,
        opset=OPSET,
        custom_op_handlers={"Erfc": (_erfc, [])},
    )
    onnx.helper.set_model_props(model, {"class_names": json.dumps(run.class_names)})
    onnx.save(model, path)


def _erfc(graph, node, name, args):
    """1 - erf, which tf2onnx 1.17 lacks; TensorFlow's GELU is made of it."""
    node.type = "Erf"
    one = graph.make_const(f"{name}_one", np.float32(1)).output[0]
    graph.insert_new_node_on_output(
        "Sub", node.output[0], name=f"{name}_from_one", inputs=[one, node.output[0]]
    )
