#!/bin/sh
# webdataset 1.0.2: GNU tar stores a file with two names once, and a hard link. The
# sample of the link has its label and no image; nothing is raised.
# Seen: {'jpg': b'picture', 'cls': b'0'} and {'cls': b'1'}.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet webdataset==1.0.2
printf picture > a.jpg
ln a.jpg b.jpg
printf 0 > a.cls
printf 1 > b.cls
tar -cf shard.tar a.jpg a.cls b.jpg b.cls
tar -xOf shard.tar b.jpg >/dev/null && mkdir out && tar -xf shard.tar -C out
cat > case.py <<'PYTHON'
import importlib.metadata
import pathlib

import webdataset

print("webdataset", importlib.metadata.version("webdataset"))
data = webdataset.WebDataset("shard.tar", shardshuffle=False)
samples = [{k: x[k] for k in ("jpg", "cls") if k in x} for x in data]
print("samples:", samples)
print("GNU tar extracts b.jpg:", pathlib.Path("out/b.jpg").read_bytes())
assert samples == [{"jpg": b"picture", "cls": b"0"}, {"cls": b"1"}], "this has changed"
PYTHON
venv/bin/python case.py
