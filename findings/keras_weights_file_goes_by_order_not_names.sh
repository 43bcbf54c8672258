#!/bin/sh
# Keras 3.15.1: a .weights.h5 file knows layers by class and order. A network whose two
# layers have their names exchanged loads each other's kernels, and no error says so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet jax==0.10.2 keras==3.15.1
cat > case.py <<'PYTHON'
import os

os.environ["KERAS_BACKEND"] = "jax"

import h5py
import keras
import numpy as np

print("keras", keras.__version__)


def network(*names):
    layers = [keras.layers.Dense(3, name=name) for name in names]
    return keras.Sequential([keras.Input((3,)), *layers])


written, read = network("neck", "head"), network("head", "neck")
written.save_weights("w.weights.h5")
read.load_weights("w.weights.h5")
with h5py.File("w.weights.h5") as file:
    names = list(file["layers"])
head = np.asarray(read.get_layer("head").kernel)
same = {
    name: np.array_equal(head, np.asarray(written.get_layer(name).kernel))
    for name in ("head", "neck")
}
print("layers in the file:", names, "kernel of head is that of:", same)
assert names == ["dense", "dense_1"], "this has changed"
assert same == {"head": False, "neck": True}, "this has changed"
PYTHON
venv/bin/python case.py
