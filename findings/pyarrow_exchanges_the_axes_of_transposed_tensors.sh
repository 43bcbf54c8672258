#!/bin/sh
# pyarrow 26.0.1: FixedShapeTensorArray.from_numpy_ndarray of images [n, channels,
# height, width] seen as channels-last returns [n, height, channels, width], also out of
# Parquet, and of some other sizes an error; of transposed gray images the array is
# right and each image of it wrong. A copy of the view is right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet pyarrow==26.0.1 numpy==2.4.6
cat > case.py <<'PYTHON'
import numpy as np
import pyarrow as pa
import pyarrow.parquet

print("pyarrow", pa.__version__)


def tensors(array):
    return pa.FixedShapeTensorArray.from_numpy_ndarray(array)


images = np.arange(2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
view = images.transpose(0, 2, 3, 1)
pyarrow.parquet.write_table(pa.table({"image": tensors(view)}), "images.parquet")
column = pyarrow.parquet.read_table("images.parquet")["image"].combine_chunks()
shapes = tensors(view).to_numpy_ndarray().shape, column.to_numpy_ndarray().shape
print("channels-last view", view.shape, "became", *shapes)
assert shapes == (bad := (2, 32, 3, 32), bad), "this has changed"
copy = tensors(view.copy()).to_numpy_ndarray()
assert np.array_equal(copy, view)
gray = np.arange(2 * 4 * 6).reshape(2, 4, 6).transpose(0, 2, 1)
array = tensors(gray)
first = array[0].to_numpy()
print("first row of", gray.shape, gray[0, 0], "as a scalar", first.shape, first[0])
assert np.array_equal(array.to_numpy_ndarray(), gray), "this has changed"
assert first.shape == (6, 4) and not np.array_equal(first, gray[0]), "this has changed"
PYTHON
venv/bin/python case.py
