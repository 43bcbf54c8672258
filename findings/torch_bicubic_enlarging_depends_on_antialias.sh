#!/bin/sh
# PyTorch 2.13.0: bicubic enlarging depends on antialias, which should matter only when an
# image shrinks: the kernel is -0.5 with it, -0.75 without. Keras 3.15.1 leaves it off by default:
# Resizing("bicubic") and UpSampling2D give other images on PyTorch than on JAX.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 jax==0.10.2 keras==3.15.1 pillow==13.0.0
cat > case.py <<'PYTHON'
import os
import subprocess
import sys

import numpy as np
from PIL import Image

image = np.random.default_rng(0).random((6, 6), dtype="float32")
if len(sys.argv) > 1:
    import keras

    layer = keras.layers.UpSampling2D(2, interpolation="bicubic")
    result = keras.ops.convert_to_numpy(layer(image[None, :, :, None]))
    np.save(sys.argv[1], result[0, :, :, 0])
    raise SystemExit

import torch
from torch.nn.functional import interpolate

print("torch", torch.__version__)
results = {"pillow": np.asarray(Image.fromarray(image).resize((12, 12), 3))}
for antialias in (False, True):
    [[x]] = interpolate(
        torch.from_numpy(image)[None, None],
        size=(12, 12),
        mode="bicubic",
        antialias=antialias,
    )
    results["torch", antialias] = x.numpy()
for backend in ("torch", "jax"):
    command = [sys.executable, __file__, f"{backend}.npy"]
    subprocess.check_call(command, env={**os.environ, "KERAS_BACKEND": backend})
    results["keras", backend] = np.load(f"{backend}.npy")
apart = {
    name: round(float(np.abs(x - results["pillow"]).max()), 3)
    for name, x in results.items()
}
print("twice the size, of values from 0 to 1, largest difference from Pillow:", apart)
assert apart["torch", True] == apart["keras", "jax"] == 0, "this has changed"
assert apart["torch", False] > 0.02, "this has changed"
assert apart["keras", "torch"] == apart["torch", False], "this has changed"
PYTHON
venv/bin/python case.py
