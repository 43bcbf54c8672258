#!/bin/sh
# datasets 5.2.0 takes the columns of tar shards from their first five samples: images
# with another extension after them, .jpeg after .jpg or .png after .jpg, are None next
# to their labels. Among the first five they are an error.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet datasets==5.2.0 pillow==13.0.0
cat > case.py <<'PYTHON'
import io
import tarfile

import datasets
from PIL import Image

datasets.disable_progress_bars()
print("datasets", datasets.__version__)


def read(extensions):
    with tarfile.open("train.tar", "w") as tar:
        for number, extension in enumerate(extensions):
            Image.new("RGB", (8, 9)).save(content := io.BytesIO(), "JPEG")
            for name, text in ((extension, content.getvalue()), ("cls", b"1")):
                member = tarfile.TarInfo(f"{number:04}.{name}")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
    files = {"train": "train.tar"}
    data = datasets.load_dataset(
        "webdataset", data_files=files, split="train", streaming=True
    )
    return [(row["jpg"] is not None, row["cls"]) for row in data]


seen = read(5 * ["jpg"] + 3 * ["jpeg"])
print("has an image, label:", seen)
assert seen == 5 * [(True, 1)] + 3 * [(False, 1)], "this has changed"
try:
    read(4 * ["jpg"] + 3 * ["jpeg"])
except ValueError as error:
    print("among the first five:", error)
else:
    raise AssertionError("this has changed")
PYTHON
venv/bin/python case.py
