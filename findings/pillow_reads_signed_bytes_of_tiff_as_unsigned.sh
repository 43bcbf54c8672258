#!/bin/sh
# Pillow 13.0.0: of a TIFF file of signed bytes, as rasterio 1.4.4 writes int8, it makes
# an image of mode L in which -1 is 255; signed 16 bits are right (mode I). tifffile
# returns -1.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet rasterio==1.4.4 pillow==13.0.0 tifffile==2026.3.3 numpy==2.4.6
cat > case.py <<'PYTHON'
import warnings

import numpy as np
import PIL
import rasterio
import tifffile
from PIL import Image

warnings.simplefilter("ignore")
print("rasterio", rasterio.__version__, "Pillow", PIL.__version__)
seen = {}
for dtype in ("int8", "int16"):
    pixels = np.array([[-128, -1, 0, 127]], dtype)
    size = {"height": 1, "width": 4, "count": 1, "dtype": dtype}
    with rasterio.open("image.tif", "w", driver="GTiff", **size) as file:
        file.write(pixels, 1)
    assert np.array_equal(tifffile.imread("image.tif").reshape(1, 4), pixels)
    image = Image.open("image.tif")
    seen[dtype] = image.mode, np.asarray(image).ravel().tolist()
    print(dtype, pixels.tolist(), "in Pillow:", *seen[dtype])
assert seen["int8"] == ("L", [128, 255, 0, 127]), "this has changed"
assert seen["int16"] == ("I", [-128, -1, 0, 127]), "this has changed"
PYTHON
venv/bin/python case.py
