#!/bin/sh
# Keras 3.15.1: image_dataset_from_directory reads .png, .jpg, .jpeg, .bmp and .gif.
# Images of other endings in the same folders (.webp, .tif, .avif, .jfif) are left out
# without a word; a class that has only such images becomes a class without images.
# Seen: "Found 1 files belonging to 2 classes.", of six files.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tensorflow==2.21.0 keras==3.15.1 pillow==13.0.0
cat > case.py <<'PYTHON'
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import contextlib
import io
import os.path

import keras
from PIL import Image

print("keras", keras.__version__)
for name in ("cat/a.png", "cat/b.webp", "cat/c.tif", "cat/d.avif", "dog/e.webp"):
    os.makedirs(os.path.dirname(f"photos/{name}"), exist_ok=True)
    Image.new("RGB", (8, 8)).save(f"photos/{name}")
Image.new("RGB", (8, 8)).save("photos/cat/f.jfif", "JPEG")
output = io.StringIO()
with contextlib.redirect_stdout(output):
    data = keras.utils.image_dataset_from_directory("photos", image_size=(8, 8))
print("it prints:", output.getvalue().strip())
print("classes:", data.class_names, "files:", data.file_paths)
assert data.class_names == ["cat", "dog"], "this has changed"
assert [os.path.basename(x) for x in data.file_paths] == ["a.png"], "this has changed"
assert output.getvalue().count("\n") == 1, "this has changed"
PYTHON
venv/bin/python case.py
