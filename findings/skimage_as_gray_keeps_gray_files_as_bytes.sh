#!/bin/sh
# scikit-image 0.26.0: imread(as_gray=True) gives floats from 0 to 1 for a color file,
# and bytes from 0 to 255 for a gray one; gray with alpha raises an error; color with
# alpha lies on white. A folder of both kinds trains on two scales.
# Seen: gray uint8 128; color float64 0.502; color with alpha 0.75.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet scikit-image==0.26.0 pillow==13.0.0
cat > case.py <<'PYTHON'
import numpy as np
import skimage
from PIL import Image
from skimage import io

print("scikit-image", skimage.__version__)
seen = {}
for mode, channels in (("L", 1), ("RGB", 3), ("RGBA", 4), ("LA", 2)):
    pixels = np.full((5, 7, channels), 128, np.uint8)
    Image.frombytes(mode, (7, 5), pixels.tobytes()).save("image.png")
    try:
        image = io.imread("image.png", as_gray=True)
        seen[mode] = image.dtype.name, round(float(image.max()), 3)
    except ValueError as error:
        seen[mode] = str(error)
    print(mode, seen[mode])
assert seen["L"] == ("uint8", 128.0), "this has changed"
assert seen["RGB"] == ("float64", 0.502), "this has changed"
assert seen["RGBA"] == ("float64", 0.75), "this has changed"
assert "must have size 3" in seen["LA"], "this has changed"
PYTHON
venv/bin/python case.py
