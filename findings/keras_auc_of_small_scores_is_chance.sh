#!/bin/sh
# Keras 3.15.1: keras.metrics.AUC has 200 thresholds, evenly spaced from 0 to 1. Scores
# that rank perfectly but are all below 0.001, as with a thousand classes, have an area
# of 0.5; scikit-learn 1.9.1 says 1.
# Seen: ROC 0.5, PR 0.25; scikit-learn 1.0, 1.0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tensorflow==2.21.0 keras==3.15.1 scikit-learn==1.9.1
cat > case.py <<'PYTHON'
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import sklearn
from sklearn.metrics import average_precision_score, roc_auc_score

print("keras", keras.__version__, "scikit-learn", sklearn.__version__)
scores = np.linspace(0, 1e-3, 1001)
labels = (scores > 7.5e-4).astype(int)
seen = []
for curve in ("ROC", "PR"):
    metric = keras.metrics.AUC(curve=curve)
    metric.update_state(labels, scores)
    seen.append(round(float(metric.result()), 3))
others = [roc_auc_score(labels, scores), average_precision_score(labels, scores)]
print("Keras, ROC and PR:", seen, "scikit-learn:", others)
assert seen[0] == 0.5 and seen[1] < 0.7 and others == [1.0, 1.0], "this has changed"
PYTHON
venv/bin/python case.py
