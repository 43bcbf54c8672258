#!/bin/sh
# datasets 5.2.0: a color array of 16 bits becomes an image of its low bytes, so that
# 255 stays white and 256 is black; a warning says 'Downcasting'. A gray one keeps its
# 16 bits.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet datasets==5.2.0 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import warnings

import datasets
import numpy as np

datasets.disable_progress_bars()
warnings.simplefilter("ignore")
print("datasets", datasets.__version__)
features = datasets.Features({"image": datasets.Image()})
seen = {}
for name, shape in (("gray", (4, 5)), ("color", (4, 5, 3))):
    for value in (255, 256, 4095):
        array = np.full(shape, value, np.uint16)
        data = datasets.Dataset.from_dict({"image": [array]}, features=features)
        image = data[0]["image"]
        seen[name, value] = image.mode, int(np.asarray(image).max())
print(seen)
assert [seen["gray", x] for x in (255, 256, 4095)] == [
    ("I;16", 255),
    ("I;16", 256),
    ("I;16", 4095),
], "this has changed"
assert [seen["color", x] for x in (255, 256, 4095)] == [
    ("RGB", 255),
    ("RGB", 0),
    ("RGB", 255),
], "this has changed"
PYTHON
venv/bin/python case.py
