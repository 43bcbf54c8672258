#!/bin/sh
# pyvips 3.2.0 with libvips 8.18: new_from_file of a path whose file was replaced
# returns the old pixels, even of another size, as the operation is cached by its
# arguments. revalidate=True reads the file.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet pyvips==3.2.0 pyvips-binary==8.18.7 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import os

import pyvips
from PIL import Image

print("pyvips", pyvips.__version__, "libvips", pyvips.version(0), pyvips.version(1))
seen = {}
for ending in ("jpg", "png", "tif", "webp"):
    name = f"image.{ending}"
    Image.new("RGB", (8, 9), (10, 10, 10)).save(name)
    pyvips.Image.new_from_file(name).numpy()
    Image.new("RGB", (16, 20), (200, 200, 200)).save(f"new.{ending}")
    os.replace(f"new.{ending}", name)
    images = [
        pyvips.Image.new_from_file(name),
        pyvips.Image.new_from_file(name, revalidate=True),
    ]
    seen[ending] = [(x.width, x.height, round(x.avg())) for x in images]
    print(ending, "again, and with revalidate:", seen[ending])
assert all(x == [(8, 9, 10), (16, 20, 200)] for x in seen.values()), "this has changed"
PYTHON
venv/bin/python case.py
