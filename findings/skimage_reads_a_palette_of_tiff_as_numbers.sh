#!/bin/sh
# scikit-image 0.26.0 and imageio 2.38.1: of the same picture with a palette, saved by
# Pillow 13.0.0, they read colors from PNG and BMP, and the numbers of the palette from
# TIFF, as a gray image. SimpleITK 2.5.7 reads colors from both, bytes from PNG and 16
# bits, times 256, from TIFF.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet scikit-image==0.26.0 imageio==2.38.1 SimpleITK==2.5.7 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import imageio.v3
import numpy as np
import SimpleITK
import skimage
from PIL import Image
from skimage import io

print("scikit-image", skimage.__version__, "SimpleITK", SimpleITK.__version__)
colors = np.array([[[200, 100, 50], [10, 20, 30]]], np.uint8)
image = Image.fromarray(colors).quantize(2)
colors = np.asarray(image.convert("RGB"))
seen = {}
for ending in ("png", "bmp", "tif"):
    name = f"image.{ending}"
    image.save(name)
    assert np.array_equal(np.asarray(Image.open(name).convert("RGB")), colors)
    itk = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(name))
    arrays = io.imread(name), imageio.v3.imread(name), itk
    seen[ending] = [(x.dtype.name, x.ravel()[:3].tolist()) for x in arrays]
    print(ending, "in scikit-image, imageio, SimpleITK:", *seen[ending])
first = colors[0, 0].tolist()
assert seen["png"] == seen["bmp"] == 3 * [("uint8", first)], "this has changed"
assert seen["tif"][0] == seen["tif"][1] == ("uint8", [0, 1]), "this has changed"
assert seen["tif"][2] == ("uint16", [256 * x for x in first]), "this has changed"
PYTHON
venv/bin/python case.py
