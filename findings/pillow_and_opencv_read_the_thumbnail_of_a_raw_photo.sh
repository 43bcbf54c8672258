#!/bin/sh
# Pillow 13.0.0, OpenCV 5.0.0 and tifffile 2026.3.3 read the thumbnail of a DNG file,
# which is a TIFF file with this image first, without a word, and rawpy 0.28.0 the
# photo.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet pillow==13.0.0 opencv-python-headless==5.0.0.93 tifffile==2026.3.3 rawpy==0.28.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import cv2
import numpy as np
import PIL
import rawpy
import tifffile
from PIL import Image

print("Pillow", PIL.__version__, "OpenCV", cv2.__version__, "rawpy", rawpy.__version__)
identity = sum([(x, 1) for x in (1, 0, 0, 0, 1, 0, 0, 0, 1)], ())
first = [  # DNG version 1.4, camera, its colors under D65, neutral
    (50706, 1, 4, bytes([1, 4, 0, 0]), True),
    (50708, 2, 0, "Camera", True),
    (50721, 10, 9, identity, True),
    (50778, 3, 1, 21, True),
    (50728, 5, 3, (1, 1, 1, 1, 1, 1), True),
]
sensor = [  # Bayer pattern of 2x2 pixels: red, green, green, blue; white
    (33421, 3, 2, (2, 2), True),
    (33422, 1, 4, bytes([0, 1, 1, 2]), True),
    (50717, 4, 1, 4095, True),
]
thumbnail = np.full((16, 24, 3), (10, 200, 30), np.uint8)
raw = np.random.default_rng(0).integers(100, 4000, (128, 192)).astype(np.uint16)
with tifffile.TiffWriter("photo.dng") as file:
    plain = {"metadata": None}
    file.write(
        thumbnail, photometric="rgb", subfiletype=1, subifds=1, extratags=first, **plain
    )
    file.write(raw, photometric="cfa", subfiletype=0, extratags=sensor, **plain)
with rawpy.imread("photo.dng") as photo:
    seen = {"rawpy": photo.postprocess().shape}
seen["Pillow"] = np.asarray(Image.open("photo.dng")).shape
seen["OpenCV"] = cv2.imread("photo.dng").shape
seen["tifffile"] = tifffile.imread("photo.dng").shape
print(seen)
assert seen.pop("rawpy") == (128, 192, 3)
assert set(seen.values()) == {(16, 24, 3)}, "this has changed"
PYTHON
venv/bin/python case.py
