#!/bin/sh
# TensorFlow 2.21.0: on the CPU a tensor that tf.constant or tf.convert_to_tensor makes of
# a NumPy array, and a data set of Dataset.from_tensor_slices, take at least twice the
# bytes of the array as long as they live, besides the array. A tensor that an operation
# makes, such as tf.fill, takes them once.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tensorflow-cpu==2.21.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import gc
import sys

import numpy as np
import tensorflow as tf

SIZE = 400_000_000
kind = sys.argv[1]


def resident():
    """Return the bytes of the process in memory."""
    [line] = [x for x in open("/proc/self/status") if x.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


create = {
    "constant": tf.constant,
    "convert": tf.convert_to_tensor,
    "slices": tf.data.Dataset.from_tensor_slices,
    "fill": lambda x: tf.fill(x.shape, tf.constant(7, tf.uint8)),
}[kind]
create(np.zeros([10, 10], np.uint8))
array = np.full([SIZE // 100, 100], 7, np.uint8)
before = resident()
held = create(array)
gc.collect()
ratio = (resident() - before) / SIZE
print(f"TensorFlow {tf.__version__}, {kind}: {ratio:.2f} times the bytes of the array")
low, high = (0.9, 1.3) if kind == "fill" else (1.9, 3.3)
assert low < ratio < high, "this has changed"
PYTHON
for kind in constant convert slices fill; do
    TF_CPP_MIN_LOG_LEVEL=3 venv/bin/python case.py $kind
done
