#!/bin/sh
# Keras 3.15.1 with Grain 0.2.18: image_dataset_from_directory(format="grain") cuts gray
# PNG files of 16 bits off at 255, so that nearly all of them are white; with format="tf"
# it takes the upper 8 bits. Seen: 30000 is 255 and 117.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tensorflow==2.21.0 keras==3.15.1 grain==0.2.18 pillow==13.0.0
cat > case.py <<'PYTHON'
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import pathlib

import keras
import numpy as np
from PIL import Image

print("keras", keras.__version__)

for name in "ab":
    pathlib.Path("images", name).mkdir(parents=True)
    pixels = np.full((8, 8), 30000, np.uint16)
    Image.fromarray(pixels).save(f"images/{name}/1.png")

seen = {}
for kind in ("tf", "grain"):
    images = keras.utils.image_dataset_from_directory(
        "images", image_size=(8, 8), format=kind, verbose=False
    )
    [(batch, _)] = images
    seen[kind] = np.unique(batch).tolist()
print("pixels of 30000:", seen)
assert seen == {"tf": [117], "grain": [255]}, "this has changed"
PYTHON
venv/bin/python case.py
