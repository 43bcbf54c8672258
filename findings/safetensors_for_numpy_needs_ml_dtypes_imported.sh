#!/bin/sh
# safetensors 0.8.0: safetensors.numpy.load_file of a bfloat16 tensor raises a
# TypeError, until the program has imported ml_dtypes, which is not mentioned; then it
# works.
# Seen: data type 'bfloat16' not understood; after the import 1.0, 2.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet safetensors==0.8.0 numpy==2.4.6 ml_dtypes==0.5.4
cat > case.py <<'PYTHON'
import json
import struct

import numpy as np
import safetensors
from safetensors.numpy import load_file

print("safetensors", safetensors.__version__)
tensor = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
header = json.dumps({"a": tensor}).encode()
with open("w.safetensors", "wb") as file:
    file.write(struct.pack("<Q", len(header)) + header + b"\x80\x3f\x00\x40")
try:
    load_file("w.safetensors")
    before = "loaded"
except TypeError as error:
    before = str(error)
import ml_dtypes  # noqa: E402, F401

after = load_file("w.safetensors")["a"].astype(np.float32).tolist()
print("before the import:", before, "- after it:", after)
assert "bfloat16" in before and after == [1.0, 2.0], "this has changed"
PYTHON
venv/bin/python case.py
