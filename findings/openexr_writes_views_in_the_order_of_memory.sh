#!/bin/sh
# OpenEXR 3.5.3: File(...).write of a NumPy view writes the numbers in the order in which
# they lie in memory: a transposed image, a channels-first one seen as channels-last, or
# every second column is another image, without an error. A copy (numpy.ascontiguousarray)
# is right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet openexr==3.5.3 numpy==2.4.6
cat > case.py <<'PYTHON'
import numpy as np
import OpenEXR

print("OpenEXR", OpenEXR.OPENEXR_VERSION)


def written(channel, array):
    header = {"compression": OpenEXR.ZIP_COMPRESSION, "type": OpenEXR.scanlineimage}
    with OpenEXR.File(header, {channel: array}) as file:
        file.write("image.exr")
    with OpenEXR.File("image.exr") as file:
        return file.channels()[channel].pixels


gray = np.arange(12, dtype=np.float32).reshape(3, 4)
first = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
views = {
    "transposed": ("Y", gray.T),
    "every second column": ("Y", gray[:, ::2]),
    "channels-last": ("RGB", first.transpose(1, 2, 0)),
}
for name, (channel, view) in views.items():
    pixels = written(channel, view)
    print(name, view[0].tolist(), "became", pixels[0].tolist())
    assert pixels.shape == view.shape
    assert np.array_equal(pixels.ravel(), np.arange(view.size)), "this has changed"
    assert np.array_equal(written(channel, view.copy()), view)
PYTHON
venv/bin/python case.py
