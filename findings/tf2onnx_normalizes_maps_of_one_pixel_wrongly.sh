#!/bin/sh
# tf2onnx 1.17.0: layer normalization of the output of a convolution, of one pixel in
# height or width, is converted without an error to other numbers: each channel is
# centered and not scaled by the deviation over the channels, and the output has another
# shape. Seen: [2, 1, 1, 8] becomes [2, 1, 8, 8]; with maps of 2x2 differences are below
# 1e-5.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tensorflow==2.21.0 keras==3.15.1 tf2onnx==1.17.0 onnx==1.23.2 onnxruntime==1.32.0
cat > case.py <<'PYTHON'
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import importlib.metadata

import keras
import numpy as np
import onnxruntime
import tensorflow as tf
import tf2onnx

print("tf2onnx", importlib.metadata.version("tf2onnx"))
seen = {}
for size in (8, 4):
    network = keras.Sequential(
        [
            keras.Input((size, size, 3)),
            keras.layers.Conv2D(8, 4, strides=4),
            keras.layers.LayerNormalization(epsilon=1e-6),
        ]
    )
    function = tf.function(
        network, input_signature=[tf.TensorSpec([None, size, size, 3])]
    )
    model, _ = tf2onnx.convert.from_function(
        function, function.input_signature, opset=18
    )
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    images = np.float32(np.random.default_rng(0).normal(size=(2, size, size, 3)))
    [converted] = session.run(None, {session.get_inputs()[0].name: images})
    expected = network(images).numpy()
    seen[size] = float(np.abs(converted - expected).max())
    print("maps", expected.shape, "became", converted.shape, "difference", seen[size])
assert seen[8] < 1e-5 and seen[4] > 0.1, "this has changed"
PYTHON
venv/bin/python case.py
