#!/bin/sh
# Keras 3.15.1: keras.utils.save_img stretches each image, also one of bytes, to 0 to
# 255: a difference of 10 becomes black and white, and an image of one gray is black.
# scale=False stores the pixels.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet keras==3.15.1 jax==0.10.2 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
from PIL import Image

print("Keras", keras.__version__)
dark = np.full((8, 9, 3), 60, np.uint8)
dark[0] = 50
seen = {}
for name, image in (("dark", dark), ("one gray", dark[1:])):
    keras.utils.save_img("image.png", image)
    seen[name] = np.unique(np.asarray(Image.open("image.png"))).tolist()
    print(name, np.unique(image).tolist(), "became", seen[name])
assert seen == {"dark": [0, 255], "one gray": [0]}, "this has changed"
keras.utils.save_img("image.png", dark, scale=False)
assert np.array_equal(np.asarray(Image.open("image.png")), dark)
PYTHON
venv/bin/python case.py
