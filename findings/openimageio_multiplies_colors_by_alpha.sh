#!/bin/sh
# OpenImageIO 3.2.2.0: read_image and ImageBuf of a PNG with alpha return colors multiplied
# by it, in bytes: (200, 100, 50) under alpha 128 is (100, 50, 25), and black under alpha 0;
# files without alpha next to it are as they are stored. The hint oiio:UnassociatedAlpha
# returns what Pillow 13.0.0 reads.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet openimageio==3.2.2.0 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import numpy as np
import OpenImageIO as oiio
from PIL import Image

print("OpenImageIO", oiio.__version__)
stored = np.uint8([[[200, 100, 50, 255], [200, 100, 50, 128], [200, 100, 50, 0]]])
Image.fromarray(stored).save("image.png")
assert (np.asarray(Image.open("image.png")) == stored).all()
seen = {}
for hint in (0, 1):
    spec = oiio.ImageSpec()
    spec["oiio:UnassociatedAlpha"] = hint
    file = oiio.ImageInput.open("image.png", spec)
    seen[hint] = file.read_image("uint8").tolist()
    file.close()
    print("with the hint:" if hint else "without:", seen[hint])
expected = [[[200, 100, 50, 255], [100, 50, 25, 128], [0, 0, 0, 0]]]
by_buffer = oiio.ImageBuf("image.png").get_pixels("uint8").tolist()
assert seen == {0: expected, 1: stored.tolist()}, "this has changed"
assert by_buffer == expected, "this has changed"
PYTHON
venv/bin/python case.py
