#!/bin/sh
# h5py 3.16.0: where a file of a virtual data set is missing, renamed or not yet copied, its
# images are zeros, without an error or a warning. A link to a missing file raises.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet h5py==3.16.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import pathlib

import h5py
import numpy as np

print("h5py", h5py.__version__)
layout = h5py.VirtualLayout((2, 4, 4), np.uint8)
for i, value in enumerate((200, 100)):
    with h5py.File(f"shard{i}.h5", "w") as file:
        file["images"] = np.full((4, 4), value, np.uint8)
    layout[i] = h5py.VirtualSource(f"shard{i}.h5", "images", (4, 4))
with h5py.File("all.h5", "w") as file:
    file.create_virtual_dataset("images", layout)
    file["link"] = h5py.ExternalLink("shard1.h5", "images")
seen = []
for is_missing in (False, True):
    if is_missing:
        pathlib.Path("shard1.h5").unlink()
    with h5py.File("all.h5") as file:
        seen.append(file["images"][:].mean((1, 2)).tolist())
        try:
            linked = file["link"].shape
        except KeyError:
            linked = "KeyError"
    print("means of the images:", seen[-1], "the link:", linked)
assert seen == [[200, 100], [200, 0]], "this has changed"
assert linked == "KeyError", "this has changed"
PYTHON
venv/bin/python case.py
