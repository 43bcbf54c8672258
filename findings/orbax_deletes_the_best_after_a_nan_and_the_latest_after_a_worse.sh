#!/bin/sh
# Orbax 0.12.8: CheckpointManager(max_to_keep=2, best_fn) keeps the best two. A metric of
# NaN displaces better ones: of 0.5, 0.9, 0.9, 0.4, NaN, 0.3 the last two are kept and 0.3
# is the best. Without NaN a checkpoint that is worse than the kept ones is deleted again,
# although save returned True: latest_step() is then an old step.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet jax==0.10.2 orbax-checkpoint==0.12.8
cat > case.py <<'PYTHON'
import pathlib

import jax.numpy as jnp
import orbax.checkpoint as ocp

print("orbax", ocp.__version__)
nan = float("nan")
seen = {}
for name, metrics in {
    "nan": [0.5, 0.9, 0.9, 0.4, nan, 0.3],
    "worse": [0.5, 0.9, 0.8, 0.4, 0.3, 0.2],
}.items():
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, best_fn=lambda x: x["accuracy"], best_mode="max"
    )
    with ocp.CheckpointManager(pathlib.Path(name).absolute(), options=options) as all_:
        saved = [
            all_.save(
                step,
                args=ocp.args.StandardSave({"x": jnp.ones(3)}),
                metrics={"accuracy": accuracy},
            )
            for step, accuracy in enumerate(metrics)
        ]
        all_.wait_until_finished()
        seen[name] = all_.all_steps(), all_.best_step(), all_.latest_step()
    print(name, "accuracies", metrics, "saved", saved)
    print("    kept, best, latest step:", *seen[name])
    assert all(saved), "this has changed"
assert seen["nan"] == ([4, 5], 5, 5), "this has changed"
assert seen["worse"] == ([1, 2], 1, 2), "this has changed"
PYTHON
venv/bin/python case.py
