#!/bin/sh
# xarray 2026.9.0 packs floats from 0 to 1 as bytes with scale_factor 1/255: 1.004, as a
# bicubic resize leaves next to white, becomes black, and -0.004 white; not a number
# becomes black. Nothing is raised or clipped.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet xarray==2026.9.0 netCDF4==1.7.5.1.post1 numpy==2.4.6
cat > case.py <<'PYTHON'
import warnings

import numpy as np
import xarray

warnings.simplefilter("ignore")
print("xarray", xarray.__version__)
pixels = np.array([0, 0.5, 1, 1.004, 1.01, -0.004, np.nan])
packing = {"image": {"dtype": "uint8", "scale_factor": 1 / 255}}
xarray.Dataset({"image": ("x", pixels)}).to_netcdf("image.nc", encoding=packing)
read = xarray.open_dataset("image.nc")["image"].values
print("stored", pixels.tolist(), "read", read.round(3).tolist())
expected = np.array([0, 128, 255, 0, 2, 255, 0]) / 255
assert np.allclose(read, expected), "this has changed"
PYTHON
venv/bin/python case.py
