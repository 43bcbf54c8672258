#!/bin/sh
# datasets 5.2.0: cast_column from ClassLabel(["cat", "dog"]) to ClassLabel(["dog", "cat"])
# keeps the numbers, so that all cats are dogs, without an error; concatenate_datasets of
# the two raises, and align_labels_with_mapping moves the numbers.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet datasets==5.2.0 numpy==2.4.6
cat > case.py <<'PYTHON'
import datasets
from datasets import ClassLabel, Dataset, Features

print("datasets", datasets.__version__)
datasets.disable_progress_bars()
features = Features({"label": ClassLabel(names=["cat", "dog"])})
data = Dataset.from_dict({"label": [0, 1, 1]}, features=features)
cast = data.cast_column("label", ClassLabel(names=["dog", "cat"]))
aligned = data.align_labels_with_mapping({"dog": 0, "cat": 1}, "label")
seen = [x.features["label"].int2str(x["label"][:]) for x in (data, cast, aligned)]
print("before", seen[0], "cast", seen[1], "aligned", seen[2])
assert seen[0] == seen[2] == ["cat", "dog", "dog"], "this has changed"
assert seen[1] == ["dog", "cat", "cat"], "this has changed"
try:
    datasets.concatenate_datasets([data, cast])
    raise SystemExit("this has changed")
except ValueError as error:
    print("concatenate_datasets:", str(error)[:60])
PYTHON
venv/bin/python case.py
