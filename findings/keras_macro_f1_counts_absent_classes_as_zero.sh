#!/bin/sh
# Keras 3.15.1: macro F1 divides by all classes, also those that are in neither labels nor
# predictions: 0.17 of ten classes where scikit-learn 1.9.1 says 0.83. A test split of some of
# the classes, or a network with spare outputs, is enough.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet jax==0.10.2 keras==3.15.1 scikit-learn==1.9.1
cat > case.py <<'PYTHON'
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
import sklearn
from sklearn.metrics import f1_score

print("keras", keras.__version__, "scikit-learn", sklearn.__version__)
labels, predicted = np.array([0, 0, 1, 0, 0, 1]), np.array([0, 0, 1, 1, 0, 1])
seen = {}
for num_classes in (2, 10, 100):
    metric = keras.metrics.F1Score(average="macro")
    one_hot = np.eye(num_classes, dtype="float32")
    metric.update_state(one_hot[labels], one_hot[predicted])
    seen[num_classes] = round(float(metric.result()), 3)
other = round(f1_score(labels, predicted, average="macro"), 3)
print("Keras, by number of classes:", seen, "scikit-learn:", other)
assert seen == {2: 0.829, 10: 0.166, 100: 0.017}, "this has changed"
assert other == 0.829, "this has changed"
PYTHON
venv/bin/python case.py
