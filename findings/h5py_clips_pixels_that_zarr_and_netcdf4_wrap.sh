#!/bin/sh
# h5py 3.16.0 (HDF5): assigning 300, -5 and 254.7 to an array of bytes stores 255, 0 and
# 254; zarr 3.1.6 and netCDF4 1.7.5 store 44, 251 and 254, as NumPy; rasterio 1.4.4
# reads float files as bytes 255, 0 and 255. Nobody raises an error.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet h5py==3.16.0 zarr==3.1.6 netCDF4==1.7.5.1.post1 rasterio==1.4.4 numpy==2.4.6
cat > case.py <<'PYTHON'
import warnings

import h5py
import netCDF4
import numpy as np
import rasterio
import zarr

warnings.simplefilter("ignore")
for module in (h5py, zarr, netCDF4, rasterio):
    print(module.__name__, module.__version__)
pixels = np.array([[300, -5, 254.7]], np.float32)
seen = {}
with h5py.File("a.h5", "w") as file:
    array = file.create_dataset("image", (1, 3), "u1")
    array[...] = pixels
    seen["h5py"] = array[...]
array = zarr.create_array("a.zarr", shape=(1, 3), dtype="u1")
array[...] = pixels
seen["zarr"] = array[...]
with netCDF4.Dataset("a.nc", "w") as file:
    file.createDimension("row", 1), file.createDimension("column", 3)
    array = file.createVariable("image", "u1", ("row", "column"))
    array[...] = pixels
    seen["netCDF4"] = np.asarray(array[...])
size = {"height": 1, "width": 3, "count": 1, "dtype": "float32"}
with rasterio.open("a.tif", "w", driver="GTiff", **size) as file:
    file.write(pixels, 1)
with rasterio.open("a.tif") as file:
    seen["rasterio"] = file.read(1, out_dtype="uint8")
seen = {name: x.ravel().tolist() for name, x in seen.items()}
print(pixels.tolist(), "became", seen)
assert seen["h5py"] == [255, 0, 254], "this has changed"
assert seen["zarr"] == seen["netCDF4"] == [44, 251, 254], "this has changed"
assert seen["rasterio"] == [255, 0, 255], "this has changed"
PYTHON
venv/bin/python case.py
