#!/bin/sh
# pillow-jxl-plugin 1.3.8: save() of an image that Image.open read from a JPEG file
# packs that file, not the pixels: what was drawn on it, made smaller or turned in place
# is not in the JPEG XL file. A warning speaks of lossless reconstruction.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet pillow-jxl-plugin==1.3.8 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import importlib.metadata
import warnings

import numpy as np
import pillow_jxl  # noqa: F401
from PIL import Image, ImageDraw

warnings.simplefilter("ignore")
print("pillow-jxl-plugin", importlib.metadata.version("pillow-jxl-plugin"))
Image.fromarray(np.full((64, 64, 3), 200, np.uint8)).save("photo.jpg")
image = Image.open("photo.jpg")
ImageDraw.Draw(image).rectangle((0, 0, 63, 63), fill=0)
image.thumbnail((32, 32))
seen = {}
for ending in ("png", "webp", "jxl"):
    image.save(f"edited.{ending}")
    saved = Image.open(f"edited.{ending}")
    seen[ending] = saved.size, int(np.asarray(saved).max())
image.save("edited.jxl", lossless_jpeg=False)
seen["lossless_jpeg=False"] = Image.open("edited.jxl").size
print(seen)
assert seen["png"] == seen["webp"] == ((32, 32), 0), "this has changed"
assert seen["jxl"] == ((64, 64), 200), "this has changed"
assert seen["lossless_jpeg=False"] == (32, 32), "this has changed"
PYTHON
venv/bin/python case.py
