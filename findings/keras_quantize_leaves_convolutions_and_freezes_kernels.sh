#!/bin/sh
# Keras 3.15.1: model.quantize("int8") turns the kernels of dense layers into 8 bits,
# leaves convolutions in float32, and fit afterwards trains the biases alone, without an
# error.
# Seen: conv/kernel float32, dense/kernel int8; after fit only the bias differs.
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

warnings.simplefilter("ignore")
print("keras", keras.__version__)
model = keras.Sequential(
    [
        keras.Input((8, 8, 3)),
        keras.layers.Conv2D(4, 3, name="conv"),
        keras.layers.Flatten(),
        keras.layers.Dense(2, name="dense"),
    ]
)
model.compile("sgd", "mse")
model.quantize("int8")
dtypes = {x.path.split("/", 1)[1]: x.dtype for x in model.weights}
print(dtypes)
dense = model.get_layer("dense")
before = np.array(dense._kernel), np.array(dense.bias)
model.fit(np.ones((4, 8, 8, 3)), np.ones((4, 2)), verbose=0)
moved = [
    not np.array_equal(x, y)
    for x, y in zip(before, (dense._kernel, dense.bias), strict=True)
]
print("after fit, kernel and bias of the dense layer changed:", moved)
assert dtypes["conv/kernel"] == "float32", "this has changed"
assert dtypes["dense/kernel"] == "int8", "this has changed"
assert moved == [False, True], "this has changed"
PYTHON
venv/bin/python case.py
