#!/bin/sh
# TensorFlow 2.21.0: a float outside the range of an integer is cast to its nearest
# value in a function compiled by XLA, and wraps or becomes the smallest integer in one
# that is not. On a CPU.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tensorflow==2.21.0 keras==3.15.1
cat > case.py <<'PYTHON'
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import tensorflow as tf

print("tensorflow", tf.__version__)
values = tf.constant([300.0, -5.0, 256.0, 1e10])


@tf.function(jit_compile=True)
def compiled(x, dtype):
    return tf.cast(x, dtype)


seen = {}
for dtype in (tf.uint8, tf.int32):
    plain = tf.cast(values, dtype).numpy().tolist()
    seen[dtype.name] = plain, compiled(values, dtype).numpy().tolist()
    print(dtype.name, "without XLA:", plain, "with XLA:", seen[dtype.name][1])
assert seen == {
    "uint8": ([44, 251, 0, 0], [255, 0, 255, 255]),
    "int32": ([300, -5, 256, -(2**31)], [300, -5, 256, 2**31 - 1]),
}, "this has changed"
PYTHON
venv/bin/python case.py
