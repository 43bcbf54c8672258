#!/bin/sh
# TensorFlow 2.21.0: tf.debugging.check_numerics and the assertions of tf.debugging do
# nothing in a function with jit_compile=True. Without it both raise.
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


def check(x):
    return tf.debugging.check_numerics(tf.math.log(x), "not finite")


def claim(x):
    tf.debugging.assert_positive(x)
    return x + 1


seen = {}
for function in (check, claim):
    for jit_compile in (False, True):
        compiled = tf.function(function, jit_compile=jit_compile)
        try:
            result = compiled(tf.constant([-1.0])).numpy().tolist()
        except tf.errors.InvalidArgumentError:
            result = "raises"
        seen[function.__name__, jit_compile] = str(result)
print("function, jit_compile, result:", seen)
assert seen == {
    ("check", False): "raises",
    ("check", True): "[nan]",
    ("claim", False): "raises",
    ("claim", True): "[0.0]",
}, "this has changed"
PYTHON
venv/bin/python case.py
