#!/bin/sh
# tifffile 2026.3.3: of a file written by TiffWriter.write in a loop, or by imwrite with
# append=True, imread returns the first image alone, as each call makes a series of its
# own, and so do imageio 2.38.1 and scikit-image 0.26.0. Pillow has all frames. With
# metadata=None it is one series.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tifffile==2026.3.3 imageio==2.38.1 scikit-image==0.26.0 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import imageio.v3
import numpy as np
import skimage.io
import tifffile
from PIL import Image

print("tifffile", tifffile.__version__)
images = [np.full((8, 9), k, np.uint8) for k in range(5)]
for name, options in (("series", {}), ("pages", {"metadata": None})):
    with tifffile.TiffWriter(f"{name}.tif") as file:
        for image in images:
            file.write(image, **options)
for image in images:
    tifffile.imwrite("appended.tif", image, append=True)
seen = {}
for name in ("series", "appended", "pages"):
    path = f"{name}.tif"
    readers = tifffile.imread, imageio.v3.imread, skimage.io.imread
    seen[name] = [x(path).shape for x in readers], Image.open(path).n_frames
    print(name, "in tifffile, imageio, skimage, Pillow:", *seen[name])
assert seen["series"] == seen["appended"] == (3 * [(8, 9)], 5), "this has changed"
assert seen["pages"] == (3 * [(5, 8, 9)], 5), "this has changed"
PYTHON
venv/bin/python case.py
