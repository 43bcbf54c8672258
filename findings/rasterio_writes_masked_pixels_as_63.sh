#!/bin/sh
# rasterio 1.4.4: a masked array is written with the fill value of NumPy where it is masked,
# which is 999999 modulo 256 in bytes: dark gray of 63, and the file has no mask. Only with
# a nodata value is that written.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet rasterio==1.4.4 numpy==2.4.6
cat > case.py <<'PYTHON'
import warnings

import numpy as np
import rasterio

warnings.simplefilter("ignore")
print("rasterio", rasterio.__version__)
size = {"height": 4, "width": 5, "count": 1}
pixels = np.ma.array(np.full((1, 4, 5), 200, np.uint8), mask=False)
pixels[0, 0, 0] = np.ma.masked
seen = {}
for nodata in (None, 0):
    size["nodata"] = nodata
    with rasterio.open("a.tif", "w", driver="GTiff", dtype="uint8", **size) as file:
        file.write(pixels)
    with rasterio.open("a.tif") as file:
        read = file.read(1, masked=True)
    seen[nodata] = int(read.data[0, 0]), int(np.ma.count_masked(read))
    print("nodata:", nodata, "value and number of masked:", *seen[nodata])
assert seen == {None: (63, 0), 0: (0, 1)}, "this has changed"
PYTHON
venv/bin/python case.py
