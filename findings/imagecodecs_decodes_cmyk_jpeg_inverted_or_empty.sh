#!/bin/sh
# imagecodecs 2026.3.6: the CMYK of a JPEG file that Pillow 13.0.0 wrote, which Adobe
# stores inverted, comes out inverted. jpeg_decode(outcolorspace="RGB") of it returns an
# array of shape (0, 0), without an error; jpeg8_decode raises. Pillow reads back what it
# wrote.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet imagecodecs==2026.3.6 pillow==13.0.0
cat > case.py <<'PYTHON'
import io

import imagecodecs
import numpy as np
from PIL import Image

print("imagecodecs", imagecodecs.__version__)
color = 255, 100, 0, 20
file = io.BytesIO()
Image.new("CMYK", (16, 16), color).save(file, "JPEG", quality=100)
seen = {
    "pillow": np.asarray(Image.open(file)),
    "imagecodecs": imagecodecs.jpeg_decode(file.getvalue()),
    "imagecodecs, RGB": imagecodecs.jpeg_decode(file.getvalue(), outcolorspace="RGB"),
}
for name, image in seen.items():
    print(name, image.shape, image[8, 8] if image.size else "")
pillow, inverted, empty = seen.values()
assert np.allclose(pillow[8, 8], color, atol=2), "this has changed"
assert np.allclose(inverted[8, 8], np.subtract(255, color), atol=2), "this has changed"
assert empty.shape == (0, 0), "this has changed"
PYTHON
venv/bin/python case.py
