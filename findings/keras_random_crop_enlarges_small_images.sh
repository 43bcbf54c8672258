#!/bin/sh
# Keras 3.15.1: RandomCrop of an image that is smaller than the crop neither pads nor
# raises: it enlarges the image, so that objects have another size than in the rest of
# the batch.
# Seen: a row of 0, 0, 1, 1 becomes 0, 0, 0, 0.25, 0.75, 1, 1, 1.
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

import keras
import numpy as np

print("keras", keras.__version__)
image = np.zeros((1, 4, 4, 1), "float32")
image[:, :, 2:] = 1.0  # an edge two pixels from the left
cropped = keras.layers.RandomCrop(8, 8)(image, training=True)
row = np.array(cropped)[0, 0, :, 0].tolist()
print("a row of 4 pixels becomes", row)
assert len(row) == 8 and row[:3] == [0.0] * 3 and row[5:] == [1.0] * 3, "this has changed"
PYTHON
venv/bin/python case.py
