#!/bin/sh
# imageio 2.38.1: v3.imread of a GIF or an animated PNG gives all frames, with a
# dimension more even for a GIF of one frame; of an animated WebP the first frame alone.
# Seen: (3, 8, 9, 3), (3, 8, 9), (8, 9, 3); of a GIF of one frame (1, 8, 9, 3).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet imageio==2.38.1 pillow==13.0.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import imageio
import imageio.v3
import numpy as np
from PIL import Image

print("imageio", imageio.__version__)
frames = [Image.fromarray(np.full((8, 9), 60 * k, np.uint8)) for k in range(3)]
for ending in ("gif", "png", "webp"):
    frames[0].save(f"three.{ending}", save_all=True, append_images=frames[1:])
frames[0].save("one.gif")
names = ("three.gif", "three.png", "three.webp", "one.gif")
seen = {name: imageio.v3.imread(name).shape for name in names}
print(seen)
assert seen == {
    "three.gif": (3, 8, 9, 3),
    "three.png": (3, 8, 9),
    "three.webp": (8, 9, 3),
    "one.gif": (1, 8, 9, 3),
}, "this has changed"
PYTHON
venv/bin/python case.py
