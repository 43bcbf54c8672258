#!/bin/sh
# SimpleITK 2.5.7: GetImageFromArray of [height, width, 3] is a gray volume, and
# WriteImage stores its first slice as PNG: a gray image of width x 3 pixels, without an
# error. JPEG and BMP raise one. With isVector=True it is the color image.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet SimpleITK==2.5.7 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import numpy as np
import SimpleITK
from PIL import Image

print("SimpleITK", SimpleITK.__version__)
array = np.random.default_rng(0).integers(0, 256, (10, 20, 3)).astype(np.uint8)
SimpleITK.WriteImage(SimpleITK.GetImageFromArray(array), "volume.png")
SimpleITK.WriteImage(SimpleITK.GetImageFromArray(array, isVector=True), "color.png")
volume, color = Image.open("volume.png"), Image.open("color.png")
print("volume:", volume.mode, volume.size, "with isVector:", color.mode, color.size)
assert (volume.mode, volume.size) == ("L", (3, 20)), "this has changed"
assert np.array_equal(np.asarray(volume), array[0]), "this has changed"
assert np.array_equal(np.asarray(color), array), "this has changed"
try:
    SimpleITK.WriteImage(SimpleITK.GetImageFromArray(array), "volume.jpg")
except RuntimeError:
    print("JPEG raises an error")
else:
    raise AssertionError("this has changed")
PYTHON
venv/bin/python case.py
