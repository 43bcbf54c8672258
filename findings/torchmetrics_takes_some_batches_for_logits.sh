#!/bin/sh
# torchmetrics 1.9.0 takes scores for logits if one of the batch is outside of 0 to 1, anew
# in each batch: of logits near 0.5 some batches go through a sigmoid and some do not. An AUROC of
# 0.78 becomes 0.68 in batches of four, and an accuracy of 0.76 becomes 0.63.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 torchmetrics==1.9.0 scikit-learn==1.9.1
cat > case.py <<'PYTHON'
import numpy as np
import torch
import torchmetrics
from sklearn.metrics import roc_auc_score
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

print("torchmetrics", torchmetrics.__version__)
rng = np.random.default_rng(0)
logits = rng.normal(0.3, 0.3, 4000).astype("float32")
labels = (rng.random(4000) < 1 / (1 + np.exp(-4 * logits))).astype(int)
expected = {
    "BinaryAUROC": roc_auc_score(labels, logits),
    "BinaryAccuracy": np.mean((logits > 0) == labels),
}
for metric in (BinaryAUROC(), BinaryAccuracy()):
    name = type(metric).__name__
    seen = {}
    for size in (4000, 4):
        metric.reset()
        for i in range(0, 4000, size):
            batch = logits[i : i + size], labels[i : i + size]
            metric.update(*map(torch.from_numpy, batch))
        seen[size] = float(metric.compute())
    print(name, "by batch size:", seen, "expected:", expected[name])
    assert abs(seen[4000] - expected[name]) < 1e-4, "this has changed"
    assert seen[4] < expected[name] - 0.08, "this has changed"
PYTHON
venv/bin/python case.py
