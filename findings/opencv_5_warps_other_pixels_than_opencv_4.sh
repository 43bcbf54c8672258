#!/bin/sh
# OpenCV 5.0.0: warpAffine, warpPerspective and remap interpolate at exact places. OpenCV
# 4.12.0 rounds places to 1/32 of a pixel: of noise, rotated and enlarged by 1.1, its
# pixels differ from exact ones by up to 5.6 of 255, on average 0.87; those of 5.0.0 by
# the final rounding. Augmentations by the same numbers give other images.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet opencv-python-headless==5.0.0.93 numpy==2.4.6
cat > case.py <<'PYTHON'
import cv2
import numpy as np

y, x = np.mgrid[:97, :131]
image = np.random.default_rng(0).integers(0, 256, x.shape, np.uint8)
matrix = cv2.getRotationMatrix2D((65, 48), 13, 1.1)
warped = cv2.warpAffine(image, matrix, (131, 97), flags=cv2.INTER_LINEAR)

inverse = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))[:2]
from_x, from_y = np.tensordot(inverse, np.stack([x, y, np.ones_like(x)]), 1)
inner = (from_x >= 0) & (from_x < 130) & (from_y >= 0) & (from_y < 96)
left, top = np.floor(from_x[inner]).astype(int), np.floor(from_y[inner]).astype(int)
right, bottom = from_x[inner] - left, from_y[inner] - top
exact = sum(
    image[top + i, left + j] * abs(1 - i - bottom) * abs(1 - j - right)
    for i in (0, 1)
    for j in (0, 1)
)
difference = np.abs(warped[inner] - exact)
print("opencv", cv2.__version__, "differs by", difference.max(), difference.mean())
if cv2.__version__ == "5.0.0":
    assert difference.max() < 0.51, "this has changed"
else:
    assert difference.max() > 4 and difference.mean() > 0.5, "this has changed"
PYTHON
venv/bin/python case.py
venv/bin/pip install -q opencv-python-headless==4.12.0.88 numpy==2.2.6
venv/bin/python case.py
