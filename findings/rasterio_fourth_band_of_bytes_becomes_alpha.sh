#!/bin/sh
# rasterio 1.4.4: of four bands of bytes, such as red, green, blue and near infrared,
# GDAL marks the fourth as alpha, so that Pillow 13.0.0 opens an RGBA image and
# convert('RGB') drops the band; the same bands in 16 bits are gray and three undefined
# ones, and Pillow cannot open them.
# Seen: red, green, blue, alpha and RGBA; gray, 3 undefined and not opened.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet rasterio==1.4.4 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import warnings

import numpy as np
import PIL
import rasterio
from PIL import Image

warnings.simplefilter("ignore")
print("rasterio", rasterio.__version__, "Pillow", PIL.__version__)
seen = {}
for dtype in ("uint8", "uint16"):
    name = f"{dtype}.tif"
    size = {"height": 4, "width": 5, "count": 4, "dtype": dtype}
    with rasterio.open(name, "w", driver="GTiff", **size) as file:
        for band in range(4):
            file.write(np.full((4, 5), 10 * (band + 1), dtype), band + 1)
    with rasterio.open(name) as file:
        bands = [x.name for x in file.colorinterp]
    try:
        mode = Image.open(name).mode
    except PIL.UnidentifiedImageError:
        mode = "not opened"
    seen[dtype] = bands, mode
    print(dtype, bands, "Pillow:", mode)
assert seen["uint8"] == (["red", "green", "blue", "alpha"], "RGBA"), "this has changed"
assert seen["uint16"] == (["gray"] + ["undefined"] * 3, "not opened"), "this has changed"
PYTHON
venv/bin/python case.py
