#!/bin/sh
# TensorFlow 2.21.0: a TFLite file with Optimize.DEFAULT has kernels in 8 bits from
# 1,024 numbers on; smaller ones, such as a first convolution or a head of few classes,
# stay float32 in a file that is called int8.
# Seen: a kernel of 1,016 numbers is float32, one of 1,024 int8.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tensorflow==2.21.0 keras==3.15.1
cat > case.py <<'PYTHON'
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import warnings

import keras
import numpy as np
import tensorflow as tf

warnings.simplefilter("ignore")
print("tensorflow", tf.__version__)
sizes = {}
for units in (127, 128):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(units)])
    converter = tf.lite.TFLiteConverter.from_keras_model(model)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    interpreter = tf.lite.Interpreter(model_content=converter.convert())
    [kernel] = [
        x for x in interpreter.get_tensor_details() if tuple(x["shape"]) == (units, 8)
    ]
    sizes[8 * units] = np.dtype(kernel["dtype"]).name
print("numbers of a kernel, type in the file:", sizes)
assert sizes == {1016: "float32", 1024: "int8"}, "this has changed"
PYTHON
venv/bin/python case.py
