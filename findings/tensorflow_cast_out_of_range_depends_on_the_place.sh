#!/bin/sh
# TensorFlow 2.21.0: tf.cast of 300.0 to uint8 gives 255 under XLA; without it 255 or
# 44, by the place in the tensor: on an x86 processor whole groups of 32 numbers
# saturate, and those left over wrap.
# Seen: of 95 numbers 64 times 255, 31 times 44; under XLA 95 times 255.
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


def cast(x):
    return tf.cast(x, tf.uint8)


functions = {
    "eager": cast,
    "graph": tf.function(cast),
    "XLA": tf.function(cast, jit_compile=True),
}
seen = {}
for name, function in functions.items():
    values = function(tf.fill([95], 300.0)).numpy().tolist()
    seen[name] = values[0], values[-1]
    print(f"95 times 300.0, {name}:", {x: values.count(x) for x in set(values)})
assert seen == {"eager": (255, 44), "graph": (255, 44), "XLA": (255, 255)}, (
    "this has changed"
)
PYTHON
venv/bin/python case.py
