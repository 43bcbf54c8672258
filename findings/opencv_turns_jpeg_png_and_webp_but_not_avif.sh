#!/bin/sh
# OpenCV 5.0.0: imread turns JPEG, PNG and WebP files upright by their EXIF orientation,
# and leaves AVIF files as they lie, where Pillow 13.0.0 has written the orientation as
# a property of the file.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet opencv-python-headless==5.0.0.93 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import cv2
import numpy as np
import PIL
from PIL import ExifTags, Image, ImageOps

print("OpenCV", cv2.__version__, "Pillow", PIL.__version__)
image = Image.new("RGB", (48, 32))
seen = {}
for ending in ("jpg", "png", "webp", "avif"):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image.save(f"photo.{ending}", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(f"photo.{ending}"))
    seen[ending] = cv2.imread(f"photo.{ending}").shape[:2]
    print(ending, "OpenCV", seen[ending], "upright in Pillow", upright.size[::-1])
    assert upright.size == (32, 48)
assert seen["jpg"] == seen["png"] == seen["webp"] == (48, 32), "this has changed"
assert seen["avif"] == (32, 48), "this has changed"
PYTHON
venv/bin/python case.py
