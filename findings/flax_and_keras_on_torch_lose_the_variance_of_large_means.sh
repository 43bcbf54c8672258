#!/bin/sh
# Flax 0.12.8 and Keras 3.15.1 on PyTorch compute the variance of a batch normalization as
# E[x^2] - E[x]^2 in float32. Inputs with a mean of 1000 and a standard deviation of 0.1 come out
# with one of 3.1 or 0.4 in place of 0.95; Keras on JAX, and PyTorch's own layer, are right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet jax==0.10.2 flax==0.12.8 keras==3.15.1 torch==2.13.0
cat > case.py <<'PYTHON'
import os
import subprocess
import sys

import numpy as np

inputs = 1000 + 0.1 * np.random.default_rng(0).normal(size=(4096, 4))
inputs = inputs.astype("float32")


def by_flax():
    import flax.linen
    import jax

    layer = flax.linen.BatchNorm(use_running_average=False, epsilon=1e-3)
    variables = layer.init(jax.random.key(0), inputs)
    return layer.apply(variables, inputs, mutable=["batch_stats"])[0]


def by_keras():
    import keras

    layer = keras.layers.BatchNormalization(epsilon=1e-3)
    return keras.ops.convert_to_numpy(layer(inputs, training=True))


def by_torch():
    import torch

    layer = torch.nn.BatchNorm1d(4, eps=1e-3)
    return layer(torch.from_numpy(inputs)).detach().numpy()


if len(sys.argv) > 1:
    print(*np.asarray(globals()[sys.argv[1]]()).std(0).tolist())
    raise SystemExit
exact = np.float64(inputs).std(0) / np.sqrt(np.float64(inputs).var(0) + 1e-3)
print("standard deviations, exact:", exact)
for case in ("by_flax jax", "by_keras torch", "by_keras jax", "by_torch torch"):
    function, backend = case.split()
    command = [sys.executable, __file__, function]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    output = subprocess.check_output(command, env=environment, text=True)
    seen = np.array(output.split(), float)
    is_right = np.allclose(seen, exact, rtol=1e-3)
    print(case, seen)
    assert is_right == (case in ("by_keras jax", "by_torch torch")), "this has changed"
PYTHON
venv/bin/python case.py
