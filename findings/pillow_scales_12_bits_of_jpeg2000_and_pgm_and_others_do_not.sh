#!/bin/sh
# Pillow 13.0.0 scales JPEG 2000 and PGM files of 12 bits to 16 bits, OpenCV 5.0.0 and
# rasterio 1.4.4 return 0 to 4095; a PGM file whose white is 100 is white in Pillow
# alone. In 8 bits OpenCV scales JPEG 2000, and a PGM file of 12 bits is almost black.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet pillow==13.0.0 opencv-python-headless==5.0.0.93 rasterio==1.4.4 imagecodecs==2026.3.6 numpy==2.4.6
cat > case.py <<'PYTHON'
import warnings

import cv2
import imagecodecs
import numpy as np
import PIL
import rasterio
from PIL import Image

warnings.simplefilter("ignore")
print("Pillow", PIL.__version__, "OpenCV", cv2.__version__, "rasterio", end=" ")
print(rasterio.__version__)
pixels = np.full((32, 32), 4095, np.uint16)
options = {"bitspersample": 12, "reversible": True, "level": 0, "codecformat": "jp2"}
files = {
    "12.jp2": imagecodecs.jpeg2k_encode(pixels, **options),
    "12.pgm": b"P5 32 32 4095\n" + pixels.astype(">u2").tobytes(),
    "white100.pgm": b"P5 32 32 100\n" + bytes(32 * 32 * [100]),
}
seen = {}
for name, content in files.items():
    with open(name, "wb") as file:
        file.write(content)
    opencv, eight_bits = cv2.imread(name, cv2.IMREAD_UNCHANGED), cv2.imread(name)
    arrays = [Image.open(name), opencv, eight_bits, rasterio.open(name).read()]
    seen[name] = [int(np.max(np.asarray(x))) for x in arrays]
    print(name, "white in Pillow, OpenCV, OpenCV's 8 bits, rasterio:", seen[name])
assert seen["12.jp2"] == [65520, 4095, 255, 4095], "this has changed"
assert seen["12.pgm"] == [65535, 4095, 15, 4095], "this has changed"
assert seen["white100.pgm"] == [255, 100, 100, 100], "this has changed"
PYTHON
venv/bin/python case.py
