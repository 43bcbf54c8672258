#!/bin/sh
# rasterio 1.4.4 (GDAL) and SimpleITK 2.5.7 repeat the halved color channels of a JPEG,
# where Pillow 13.0.0 and OpenCV 5.0.0 interpolate them: at edges of colors one pixel of
# the same file differs by more than 100. Without subsampling they agree to 1.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet rasterio==1.4.4 SimpleITK==2.5.7 opencv-python-headless==5.0.0.93 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import warnings

import cv2
import numpy as np
import PIL
import rasterio
import SimpleITK
from PIL import Image

warnings.simplefilter("ignore")
for module in (rasterio, SimpleITK, cv2, PIL):
    print(module.__name__, module.__version__)
colors = np.random.default_rng(1).integers(0, 255, (20, 24, 3)).astype(np.uint8)
picture = Image.fromarray(colors.repeat(5, axis=0).repeat(5, axis=1))
seen = {}
for name in ("4:2:0", "4:4:4"):
    picture.save("image.jpg", quality=90, subsampling=name)
    read = {
        "OpenCV": cv2.imread("image.jpg")[..., ::-1],
        "rasterio": np.moveaxis(rasterio.open("image.jpg").read(), 0, 2),
        "SimpleITK": SimpleITK.GetArrayFromImage(SimpleITK.ReadImage("image.jpg")),
    }
    pillow = np.asarray(Image.open("image.jpg")).astype(int)
    seen[name] = {key: int(abs(x - pillow).max()) for key, x in read.items()}
    print(name, "largest difference from Pillow:", seen[name])
assert seen["4:2:0"]["OpenCV"] == 0, "this has changed"
assert seen["4:2:0"]["rasterio"] > 100 and seen["4:2:0"]["SimpleITK"] > 100
assert max(seen["4:4:4"].values()) <= 1, "this has changed"
PYTHON
venv/bin/python case.py
