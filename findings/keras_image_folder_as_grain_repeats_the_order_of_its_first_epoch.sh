#!/bin/sh
# Keras 3.15.1 with Grain 0.2.18: image_dataset_from_directory(shuffle=True,
# format="grain") gives the images in the same order in every epoch; with format="tf" each
# epoch has another one.
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

for number in range(16):
    path = pathlib.Path("images", "ab"[number % 2], f"{number}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), 10 * number).save(path)

alike = {}
for kind in ("tf", "grain"):
    images = keras.utils.image_dataset_from_directory(
        "images", image_size=(8, 8), batch_size=4, format=kind, verbose=False
    )
    epochs = [
        [int(x[0, 0, 0]) // 10 for batch, _ in images for x in np.asarray(batch)]
        for _ in range(3)
    ]
    print(kind, *epochs, sep="\n    ")
    assert sorted(epochs[0]) == list(range(16)), "this has changed"
    alike[kind] = epochs[0] == epochs[1] == epochs[2]
assert alike == {"tf": False, "grain": True}, "this has changed"
PYTHON
venv/bin/python case.py
