#!/bin/sh
# tifffile 2026.3.3: imread of one file of an OME-TIFF set of several returns the pixels
# of all; if the others are not there, black images in their place, and a log message.
# Pillow reads the one image of the file.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tifffile==2026.3.3 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import os
import uuid

import numpy as np
import tifffile
from PIL import Image

print("tifffile", tifffile.__version__)
schema = "http://www.openmicroscopy.org/Schemas/OME/2016-06"
ids = [f"urn:uuid:{uuid.uuid4()}" for _ in range(3)]
parts = "".join(
    f'<TiffData FirstC="{k}" IFD="0" PlaneCount="1">'
    f'<UUID FileName="channel{k}.ome.tif">{ids[k]}</UUID></TiffData>'
    for k in range(3)
)
channels = "".join(
    f'<Channel ID="Channel:0:{k}" SamplesPerPixel="1"/>' for k in range(3)
)
for k in range(3):
    text = (
        f'<?xml version="1.0"?><OME xmlns="{schema}" UUID="{ids[k]}"><Image '
        'ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZTC" Type="uint8" '
        'SizeX="9" SizeY="8" SizeZ="1" SizeT="1" SizeC="3">'
        f"{channels}{parts}</Pixels></Image></OME>"
    )
    pixels = np.full((8, 9), 50 * k + 50, np.uint8)
    tifffile.imwrite(f"channel{k}.ome.tif", pixels, description=text, metadata=None)
together = tifffile.imread("channel1.ome.tif")
os.remove("channel0.ome.tif"), os.remove("channel2.ome.tif")
alone = tifffile.imread("channel1.ome.tif")
pillow = np.asarray(Image.open("channel1.ome.tif"))
seen = [(x.shape, np.unique(x).tolist()) for x in (together, alone, pillow)]
print("with the others, alone, in Pillow:", *seen)
assert seen[0] == ((3, 8, 9), [50, 100, 150]), "this has changed"
assert seen[1] == ((3, 8, 9), [0, 100]), "this has changed"
assert seen[2] == ((8, 9), [100]), "this has changed"
PYTHON
venv/bin/python case.py
