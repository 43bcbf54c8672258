#!/bin/sh
# Keras 3.15.1: a network with equal outputs for all classes has a top-k accuracy of 1.0
# for every k, also for k=1; its accuracy is one over the number of classes.
# Seen: of ten classes accuracy 0.1, top-1 1.0, top-5 1.0.
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
labels, outputs = np.arange(10), np.zeros((10, 10), "float32")
seen = []
for metric in (
    keras.metrics.SparseCategoricalAccuracy(),
    keras.metrics.SparseTopKCategoricalAccuracy(k=1),
    keras.metrics.SparseTopKCategoricalAccuracy(k=5),
):
    metric.update_state(labels, outputs)
    seen.append(round(float(metric.result()), 6))
print("accuracy, top-1, top-5 of equal outputs:", seen)
assert seen == [0.1, 1.0, 1.0], "this has changed"
PYTHON
venv/bin/python case.py
