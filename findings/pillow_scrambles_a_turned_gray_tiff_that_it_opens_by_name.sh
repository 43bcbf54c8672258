#!/bin/sh
# Pillow 13.0.0 turns TIFF files upright itself. Of an uncompressed gray one with
# orientation 5 to 8 that Image.open gets by its path, rows and columns are mixed: the
# buffer is mapped with height and width exchanged. From an open file, compressed or in
# color it is right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet pillow==13.0.0 tifffile==2026.3.3 numpy==2.4.6
cat > case.py <<'PYTHON'
import numpy as np
import PIL
import tifffile
from PIL import Image

print("Pillow", PIL.__version__)
stored = np.arange(24, dtype=np.uint8).reshape(4, 6)
upright = np.rot90(stored, -1)
seen = {}
for dtype in ("uint8", "uint16"):
    for compression in (None, "zlib"):
        tag = [(274, 3, 1, 6, True)]  # orientation: turn clockwise
        pixels = stored.astype(dtype)
        tifffile.imwrite("x.tif", pixels, compression=compression, extratags=tag)
        by_name = np.asarray(Image.open("x.tif"))
        with open("x.tif", "rb") as file:
            opened = np.asarray(Image.open(file))
        found = [np.array_equal(x, upright) for x in (by_name, opened)]
        seen[dtype, compression] = by_name.shape, *found
        print(dtype, compression, "shape, right by name, right from a file:", end=" ")
        print(seen[dtype, compression])
for dtype in ("uint8", "uint16"):
    assert seen[dtype, None] == ((4, 6), False, True), "this has changed"
    assert seen[dtype, "zlib"] == ((6, 4), True, True), "this has changed"
PYTHON
venv/bin/python case.py
