#!/bin/sh
# Pillow 13.0.0 ignores BZERO of FITS files: they have no unsigned 16-bit type, so
# astropy 8.0.2 stores such images minus 32768. Black and middle gray change places,
# without a word.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet astropy==8.0.2 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import astropy
import numpy as np
import PIL
from astropy.io import fits
from PIL import Image

print("astropy", astropy.__version__, "Pillow", PIL.__version__)
pixels = np.array([[0, 1000, 32767], [32768, 40000, 65535]], np.uint16)
fits.writeto("image.fits", pixels)
assert np.array_equal(fits.getdata("image.fits"), pixels)
image = Image.open("image.fits")
read = np.asarray(image)[::-1]  # FITS begins with the lowest row
print(image.mode, "stored", pixels.tolist(), "read", read.tolist())
assert np.array_equal(read, pixels ^ 32768), "this has changed"
PYTHON
venv/bin/python case.py
