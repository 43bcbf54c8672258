#!/bin/sh
# Optax 0.2.8 and Keras 3.15.1: Muon makes the update of a matrix nearly orthogonal. The
# four-dimensional kernel of a convolution goes to Adam, in both without a word, so that
# in a convolutional network Muon trains next to nothing. Seen: after one step all
# elements of the update of a convolution are of one size, as by Adam.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet jax==0.10.2 optax==0.2.8 tensorflow==2.21.0 keras==3.15.1
cat > case.py <<'PYTHON'
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import jax.numpy as jnp
import keras
import numpy as np
import optax

print("optax", optax.__version__, "keras", keras.__version__)
rng = np.random.default_rng(0)
# Gradients whose columns differ in size by a factor of 100.
gradients = {
    name: np.float32(rng.normal(size=shape) * np.linspace(0.01, 1, 16))
    for name, shape in {"convolution": (3, 3, 8, 16), "dense": (16, 16)}.items()
}
updates = {}

tensors = {name: jnp.array(x) for name, x in gradients.items()}
optimizer = optax.contrib.muon(0.1)
updates["optax"], _ = optimizer.update(tensors, optimizer.init(tensors), tensors)

variables = [
    keras.Variable(np.zeros_like(x), name=name) for name, x in gradients.items()
]
keras.optimizers.Muon(0.1, weight_decay=0).apply([*gradients.values()], variables)
updates["keras"] = {x.name: x.numpy() for x in variables}

for library, by_name in updates.items():
    spread = {}
    for name, update in by_name.items():
        sizes = np.abs(np.asarray(update))
        spread[name] = float(np.percentile(sizes, 90) / np.percentile(sizes, 10))
    print(library, "90th percentile of the update by the 10th:", spread)
    assert spread["convolution"] < 1.1 and spread["dense"] > 3, "this has changed"
PYTHON
venv/bin/python case.py
