#!/bin/sh
# Keras 3.15.1: with use_ema=True the validation of each epoch of fit measures the
# weights of the last step; when fit ends, the network has the moving averages, whose
# loss was never shown.
# Seen: validation losses 16, 4, 1; after fit 12.39.
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

import keras
import numpy as np

print("keras", keras.__version__)
layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
model = keras.Sequential([keras.Input((1,)), layer])
optimizer = keras.optimizers.SGD(0.25, use_ema=True, ema_momentum=0.9)
model.compile(optimizer, "mse")
inputs, targets = np.ones((8, 1), "float32"), np.full((8, 1), 8.0, "float32")
history = model.fit(
    inputs,
    targets,
    batch_size=8,
    epochs=3,
    validation_data=(inputs, targets),
    verbose=0,
).history
after = model.evaluate(inputs, targets, verbose=0)
print("validation losses:", history["val_loss"], "after fit:", after)
# The weight is 4, 6, 7, its average 4, 4.2, 4.48.
assert history["val_loss"] == [16.0, 4.0, 1.0], "this has changed"
assert abs(after - (8 - 4.48) ** 2) < 1e-3, "this has changed"
PYTHON
venv/bin/python case.py
