#!/bin/sh
# pyvips 3.2.0 with libvips 8.18: a gray array of 16 bits is written to PNG in 8 bits, in
# which all values above 255 are white; TIFF keeps 16 bits, JPEG takes the upper 8, and
# colors of 16 bits are right in PNG too. image.copy(interpretation="grey16") writes 16
# bits.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet pyvips==3.2.0 pyvips-binary==8.18.7 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import io

import numpy as np
import pyvips
from PIL import Image

print("pyvips", pyvips.__version__, "libvips", pyvips.version(0), pyvips.version(1))
gray = pyvips.Image.new_from_array(np.full((8, 9), 30000, np.uint16))
colors = pyvips.Image.new_from_array(np.full((8, 9, 3), 30000, np.uint16))
seen = {}
for name, image, kind in (
    ("gray", gray, "png"),
    ("gray", gray, "tiff"),
    ("gray", gray, "jpeg"),
    ("declared", gray.copy(interpretation="grey16"), "png"),
):
    content = getattr(image, f"{kind}save_buffer")()
    with Image.open(io.BytesIO(content)) as file:
        seen[name, kind] = file.mode, int(np.asarray(file).max())
    print(name, kind, *seen[name, kind])
back = pyvips.Image.new_from_buffer(colors.pngsave_buffer(), "").numpy()
print("colors png", back.dtype, back.max())
assert seen["gray", "png"] == ("L", 255), "this has changed"
assert seen["gray", "tiff"] == ("I;16", 30000), "this has changed"
assert seen["gray", "jpeg"] == ("L", 117), "this has changed"
assert seen["declared", "png"] == ("I;16", 30000) and back.max() == 30000
PYTHON
venv/bin/python case.py
