#!/bin/sh
# dask-image 2026.5.0: imread of a folder takes shape and dtype from the first file and
# casts the others: 30000 of a 16-bit PNG after one of 8 bits becomes 48, without an error.
# If the 16-bit file is the first one, both are right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet dask-image==2026.5.0 dask==2026.8.0 scikit-image==0.26.0 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import pathlib
from importlib.metadata import version

import dask_image.imread
import numpy as np
from PIL import Image

print("dask-image", version("dask-image"))
for folder, dtypes in (("8", (np.uint8, np.uint16)), ("16", (np.uint16, np.uint8))):
    pathlib.Path(folder).mkdir()
    for name, dtype in zip("ab", dtypes, strict=True):
        value = 200 if dtype is np.uint8 else 30000
        Image.fromarray(np.full((8, 9), value, dtype)).save(f"{folder}/{name}.png")
seen = {}
for folder in ("8", "16"):
    images = dask_image.imread.imread(f"{folder}/*.png").compute()
    seen[folder] = images.dtype.name, images[:, 0, 0].tolist()
    print("first file of", folder, "bits:", *seen[folder])
assert seen["8"] == ("uint8", [200, 48]), "this has changed"
assert seen["16"] == ("uint16", [30000, 200]), "this has changed"
PYTHON
venv/bin/python case.py
