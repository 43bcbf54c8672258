#!/bin/sh
# OpenCV 5.0.0 ignores the byte order of arrays: of FITS files, which are big-endian,
# astropy 8.0.2 returns such arrays, and 300 is resized and written as 11265, without an
# error, and floats as almost 0. Pillow 13.0.0 is right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet astropy==8.0.2 opencv-python-headless==5.0.0.93 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import astropy
import cv2
import numpy as np
from astropy.io import fits
from PIL import Image

print("astropy", astropy.__version__, "OpenCV", cv2.__version__)
seen = {}
for dtype in ("int16", "float32"):
    fits.writeto(f"{dtype}.fits", np.full((8, 8), 300, dtype))
    array = fits.getdata(f"{dtype}.fits")
    assert array.dtype.byteorder == ">" and array[0, 0] == 300
    pillow = np.asarray(Image.fromarray(array))[0, 0]
    seen[dtype] = cv2.resize(array, (4, 4))[0, 0], pillow
    print(array.dtype.str, "300 is in OpenCV and Pillow", *seen[dtype])
array = np.full((8, 8), 300, ">u2")
cv2.imwrite("image.png", array)
seen["png"] = np.asarray(Image.open("image.png"))[0, 0]
print("300 in the PNG file of cv2.imwrite:", seen["png"])
assert seen["int16"] == (11265, 300) and seen["png"] == 11265, "this has changed"
assert seen["float32"][0] < 1e-30 and seen["float32"][1] == 300, "this has changed"
PYTHON
venv/bin/python case.py
