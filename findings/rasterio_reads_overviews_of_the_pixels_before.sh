#!/bin/sh
# rasterio 1.4.4: after new pixels are written to a GeoTIFF that has overviews, reading it
# at half its size, read(out_shape=...), returns the old ones, and statistics() has the old
# mean. build_overviews makes the overviews anew.
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
size = {"height": 64, "width": 64, "count": 1, "dtype": "uint8"}
with rasterio.open("image.tif", "w", driver="GTiff", **size) as file:
    file.write(np.full((1, 64, 64), 50, np.uint8))
with rasterio.open("image.tif", "r+") as file:
    file.build_overviews([2, 4])
    file.statistics(1)
with rasterio.open("image.tif", "r+") as file:
    file.write(np.full((1, 64, 64), 200, np.uint8))
seen = {}
with rasterio.open("image.tif") as file:
    for edge in (64, 32, 16, 48):
        seen[edge] = int(file.read(1, out_shape=(edge, edge)).mean())
    seen["statistics"] = int(file.statistics(1).mean)
print("mean by the size that is read:", seen)
expected = {64: 200, 32: 50, 16: 50, 48: 200, "statistics": 50}
assert seen == expected, "this has changed"
with rasterio.open("image.tif", "r+") as file:
    file.build_overviews([2, 4])
with rasterio.open("image.tif") as file:
    assert file.read(1, out_shape=(32, 32)).mean() == 200
PYTHON
venv/bin/python case.py
