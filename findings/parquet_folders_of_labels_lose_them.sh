#!/bin/sh
# datasets 5.2.0 reads Parquet files in folders label=01 and label=02, which pandas
# writes by to_parquet(partition_cols=['label']), as images without labels; pandas
# 3.1.1, pyarrow 26.0.1 and polars 2.1.0 make the labels 01 and 02 the numbers 1 and 2;
# duckdb 2.0.1 reads 01 and 02.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet datasets==5.2.0 pandas==3.1.1 pyarrow==26.0.1 polars==2.1.0 duckdb==2.0.1
cat > case.py <<'PYTHON'
import datasets
import duckdb
import pandas
import polars
import pyarrow
import pyarrow.parquet

datasets.disable_progress_bars()
for module in (datasets, pandas, pyarrow, polars, duckdb):
    print(module.__name__, module.__version__)
table = pandas.DataFrame({"image": [b"a", b"b"], "label": ["01", "02"]})
table.to_parquet("data", partition_cols=["label"])
data = datasets.load_dataset("parquet", data_dir="data", split="train")
query = "select label from read_parquet('data/*/*.parquet') order by label"
seen = {
    "pandas": sorted(pandas.read_parquet("data")["label"]),
    "pyarrow": sorted(pyarrow.parquet.read_table("data")["label"].to_pylist()),
    "polars": sorted(polars.read_parquet("data")["label"]),
    "duckdb": [x for (x,) in duckdb.sql(query).fetchall()],
}
print("columns of datasets:", data.column_names, "labels of others:", seen)
assert data.column_names == ["image"], "this has changed"
assert seen["pandas"] == seen["pyarrow"] == seen["polars"] == [1, 2], "this has changed"
assert seen["duckdb"] == ["01", "02"], "this has changed"
PYTHON
venv/bin/python case.py
