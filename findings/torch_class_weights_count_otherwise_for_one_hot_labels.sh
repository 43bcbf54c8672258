#!/bin/sh
# PyTorch 2.13.0: cross_entropy with weights of classes divides the sum by the weights of
# the labels if these are numbers, and by the number of images if they are rows of
# probabilities: one-hot rows of the same labels give another loss and gradient, so that
# turning on mixup changes the size of all updates. label_smoothing of numbers divides by
# the weights.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import torch
from torch.nn.functional import cross_entropy, one_hot

print("torch", torch.__version__)
torch.manual_seed(0)
logits = torch.randn(6, 3)
labels = torch.tensor([0, 0, 0, 1, 2, 2])
seen = {}
for name, weights in (("no weights", None), ("weights", torch.tensor([1.0, 5.0, 2.0]))):
    rows = one_hot(labels, 3).float()
    by_numbers = cross_entropy(logits, labels, weights)
    smoothed = cross_entropy(logits, labels, weights, label_smoothing=1e-6)
    seen[name] = (cross_entropy(logits, rows, weights) / by_numbers).item()
    print(name, "loss of numbers", by_numbers.item(), "one-hot: times", seen[name])
    assert torch.isclose(smoothed, by_numbers, rtol=1e-4)
assert abs(seen["no weights"] - 1) < 1e-5, "this has changed"
assert abs(seen["weights"] - 2) < 1e-5, "this has changed"  # 12 / 6
PYTHON
venv/bin/python case.py
