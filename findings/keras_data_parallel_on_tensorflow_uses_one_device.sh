#!/bin/sh
# Keras 3.15.1 with TensorFlow: keras.distribution.DataParallel over two devices is
# accepted, and fit computes everything on the first one.
# Seen: devices cpu:0 and cpu:1; all three batches and the variables on CPU:0.
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

import collections

import keras
import numpy as np
import tensorflow as tf

print("keras", keras.__version__, "backend", keras.backend.backend())
[cpu] = tf.config.list_physical_devices("CPU")
half = tf.config.LogicalDeviceConfiguration()
tf.config.set_logical_device_configuration(cpu, [half, half])
devices = keras.distribution.list_devices()
keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
used = collections.Counter()


class Where(keras.layers.Layer):
    def compute_output_shape(self, input_shape):
        return input_shape

    def call(self, inputs):
        def note(x):
            used[x.device[-5:], len(x)] += 1
            return x

        return tf.ensure_shape(tf.py_function(note, [inputs], inputs.dtype), inputs.shape)


model = keras.Sequential([keras.Input((3,)), Where(), keras.layers.Dense(2)])
model.compile("sgd", "mse")
inputs, targets = np.ones((12, 3), "float32"), np.ones((12, 2), "float32")
model.fit(inputs, targets, batch_size=4, verbose=0)
variables = {x.value.device[-5:] for x in model.weights}
print("devices:", devices, "of the batches:", dict(used), "variables:", variables)
assert len(devices) == 2 and variables == {"CPU:0"}, "this has changed"
assert used == {("CPU:0", 4): 3}, "this has changed"
PYTHON
venv/bin/python case.py
