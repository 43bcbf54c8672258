#!/bin/sh
# Optax 0.2.8: a label of -1, which TFDS gives images without a label, is the last class for
# softmax_cross_entropy_with_integer_labels, in loss and gradient. A label that is too large
# gives NaN. PyTorch raises at both.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet jax==0.10.2 optax==0.2.8
cat > case.py <<'PYTHON'
import jax
import numpy as np
import optax

print("optax", optax.__version__)
logits = np.float32([[1.0, 2.0, 3.0]])
loss = optax.softmax_cross_entropy_with_integer_labels
seen = {}
for label in (-1, 2, 3):
    labels = np.array([label])
    gradient = jax.grad(lambda z, y=labels: loss(z, y).sum())(logits)
    seen[label] = np.round([*loss(logits, labels), *gradient[0]], 3).tolist()
print("label: loss and gradient of three classes:", seen)
assert seen[-1] == seen[2] and np.isnan(seen[3][0]), "this has changed"
PYTHON
venv/bin/python case.py
