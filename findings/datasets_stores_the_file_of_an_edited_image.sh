#!/bin/sh
# datasets 5.2.0 stores the file that a Pillow image was opened from, not its pixels:
# what was drawn on it, or made smaller in place, is lost, also in map(); a resize(),
# which makes a new image, is kept. The JPEG column of MosaicML's streaming 0.13.0 does
# the same.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet datasets==5.2.0 pillow==13.0.0 numpy==2.4.6
venv/bin/pip install --no-deps --quiet mosaicml-streaming==0.13.0
cat > case.py <<'PYTHON'
import importlib.metadata
import importlib.util
import io

import datasets
import numpy as np
from PIL import Image, ImageDraw

datasets.disable_progress_bars()
print("datasets", datasets.__version__)
Image.fromarray(np.full((64, 64, 3), 200, np.uint8)).save("photo.jpg")


def anonymize(image):
    ImageDraw.Draw(image).rectangle((0, 0, 63, 63), fill=0)
    image.thumbnail((32, 32))
    return image


def seen(image):
    return image.size, int(np.asarray(image).max())


image = anonymize(Image.open("photo.jpg"))
print("edited:", seen(image))
made = datasets.Dataset.from_dict({"image": [image]})[0]["image"]
files = datasets.Dataset.from_dict({"image": ["photo.jpg"]})
files = files.cast_column("image", datasets.Image())
mapped = files.map(lambda row: {"image": anonymize(row["image"])})[0]["image"]
resized = files.map(lambda row: {"image": row["image"].resize((32, 32))})[0]["image"]
# The module alone, as the package needs torch.
wheel = importlib.metadata.distribution("mosaicml-streaming")
path = wheel.locate_file("streaming/base/format/mds/encodings.py")
spec = importlib.util.spec_from_file_location("encodings", path)
spec.loader.exec_module(mds := importlib.util.module_from_spec(spec))
stored = Image.open(io.BytesIO(mds.JPEG().encode(image)))
for name in ("image", "made", "mapped", "resized", "stored"):
    print(name, seen(globals()[name]))
assert seen(image) == ((32, 32), 0)
assert seen(made) == seen(mapped) == seen(stored) == ((64, 64), 200), "this has changed"
assert seen(resized) == ((32, 32), 200), "this has changed"
PYTHON
venv/bin/python case.py
