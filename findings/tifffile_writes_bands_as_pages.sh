#!/bin/sh
# tifffile 2026.3.3: an array of [64, 64, 13] is written as 64 pages of 64x13 and reads back
# in its shape, so nobody notices; rasterio 1.4.4 reads one band of 64x13, and Pillow 13.0.0
# a gray image of 13x64. photometric="minisblack" with planarconfig="contig" writes bands.
# Arrays of [64, 64, 3] and [64, 64, 4] are written as one image.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tifffile==2026.3.3 rasterio==1.4.4 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import warnings

import numpy as np
import rasterio
import tifffile
from PIL import Image

warnings.simplefilter("ignore")
print("tifffile", tifffile.__version__, "rasterio", rasterio.__version__)
seen = {}
for name, bands, options in (
    ("three", 3, {}),
    ("thirteen", 13, {}),
    ("declared", 13, {"photometric": "minisblack", "planarconfig": "contig"}),
):
    array = np.arange(64 * 64 * bands, dtype=np.uint16).reshape(64, 64, bands)
    tifffile.imwrite(f"{name}.tif", array, **options)
    assert (tifffile.imread(f"{name}.tif") == array).all()
    with tifffile.TiffFile(f"{name}.tif") as file, rasterio.open(f"{name}.tif") as other:
        seen[name] = len(file.pages), (other.count, *other.shape)
    print(name, "pages and bands, height, width in rasterio:", *seen[name])
with Image.open("thirteen.tif") as image:
    size = image.size
    print("Pillow: size", size, "mode", image.mode)
assert seen == {
    "three": (1, (3, 64, 64)),
    "thirteen": (64, (1, 64, 13)),
    "declared": (1, (13, 64, 64)),
}, "this has changed"
assert size == (13, 64), "this has changed"
PYTHON
venv/bin/python case.py
