#!/bin/sh
# datasets 5.2.0: class_encode_column of integer labels 0 to 11 sorts them as texts: 2
# becomes 4, 10 becomes 2. With ten classes or fewer, numbered from 0, nothing changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet datasets==5.2.0
cat > case.py <<'PYTHON'
import datasets

datasets.disable_progress_bars()
print("datasets", datasets.__version__)
labels = list(range(12))
data = datasets.Dataset.from_dict({"label": labels}).class_encode_column("label")
print("names:", data.features["label"].names)
print("labels 0 to 11 became", data["label"][:])
assert data["label"][:] == [0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 2, 3], "this has changed"
PYTHON
venv/bin/python case.py
