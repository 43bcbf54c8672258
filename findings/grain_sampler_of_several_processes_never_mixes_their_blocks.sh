#!/bin/sh
# Grain 0.2.18: IndexSampler(shuffle=True) with ShardOptions gives each process a fixed
# block of the records and shuffles within it, in every epoch. Records that are sorted by
# class are never mixed over the processes; with drop_remainder=True the records behind
# the last block are never read in any epoch.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet grain==0.2.18
cat > case.py <<'PYTHON'
import importlib.metadata

import grain

print("grain", importlib.metadata.version("grain"))
NUM_RECORDS, NUM_PROCESSES, NUM_EPOCHS = 10, 3, 20
seen = []
for process in range(NUM_PROCESSES):
    sampler = grain.samplers.IndexSampler(
        NUM_RECORDS,
        shard_options=grain.sharding.ShardOptions(
            process, NUM_PROCESSES, drop_remainder=True
        ),
        shuffle=True,
        seed=1,
        num_epochs=NUM_EPOCHS,
    )
    num_positions = NUM_RECORDS // NUM_PROCESSES * NUM_PROCESSES * NUM_EPOCHS
    positions = range(process, num_positions, NUM_PROCESSES)
    seen.append(sorted({sampler[position].record_key for position in positions}))
print("records of each process in 20 epochs:", seen)
assert seen == [[0, 1, 2], [3, 4, 5], [6, 7, 8]], "this has changed"
PYTHON
venv/bin/python case.py
