#!/bin/sh
# polars 2.1.0: the numbers of a Categorical column (to_physical) are those of all
# categories of the process: out of one Parquet file dog and cat are 0 and 1, or 2 and 1
# where another column has train and cat. An Enum has numbers of its own.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet polars==2.1.0
cat > case.py <<'PYTHON'
import sys

import polars as pl

print("polars", pl.__version__)


def numbers(column):
    return column.to_physical().to_list()


before = pl.Series(sys.argv[1:], dtype=pl.Categorical)
if not len(before):
    labels = pl.Series("label", ["dog", "cat", "dog"], dtype=pl.Categorical)
    pl.DataFrame([labels]).write_parquet("labels.parquet")
labels = pl.read_parquet("labels.parquet")["label"]
print("texts before:", before.to_list(), labels.to_list(), numbers(labels))
expected = [2, 1, 2] if len(before) else [0, 1, 0]
assert numbers(labels) == expected, "this has changed"
enum = pl.Series(["dog", "cat", "dog"], dtype=pl.Enum(["cat", "dog"]))
assert numbers(enum) == [1, 0, 1]
PYTHON
venv/bin/python case.py
venv/bin/python case.py train cat
