#!/bin/sh
# netCDF4 1.7.5 reads a variable of bytes without a fill value, written by itself or by
# xarray 2026.9.0, as a masked array without its pixels of 255, the default fill value
# (65535 of 16 bits): mean() leaves white out. xarray and h5py read 255.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet netCDF4==1.7.5.1.post1 xarray==2026.9.0 h5py==3.16.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import h5py
import netCDF4
import numpy as np
import xarray

print("netCDF4", netCDF4.__version__, "xarray", xarray.__version__)
seen = {}
for dtype in ("uint8", "uint16"):
    white = np.iinfo(dtype).max
    pixels = np.array([0, 2, white, white], dtype)
    xarray.Dataset({"image": ("x", pixels)}).to_netcdf("image.nc", engine="netcdf4")
    with netCDF4.Dataset("image.nc") as file:
        masked = file["image"][:]
    with xarray.open_dataset("image.nc") as file:
        by_xarray = file["image"].values.mean()
    with h5py.File("image.nc") as file:
        by_h5py = file["image"][:].mean()
    seen[dtype] = float(masked.mean()), float(by_xarray), float(by_h5py)
    print(masked, "mean in netCDF4, xarray, h5py:", seen[dtype])
assert seen["uint8"] == (1.0, 128.0, 128.0), "this has changed"
assert seen["uint16"] == (1.0, 32768.0, 32768.0), "this has changed"
PYTHON
venv/bin/python case.py
