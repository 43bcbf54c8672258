#!/bin/sh
# Orbax 0.12.8: a checkpoint is restored in the dtypes of the given tree. Integers that do
# not fit are wrapped, without an error or a warning. Seen: 0, 1000, 2000 as int8 are 0,
# -24, -48. Another shape is refused.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet jax==0.10.2 orbax-checkpoint==0.12.8
cat > case.py <<'PYTHON'
import pathlib

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

print("orbax", ocp.__version__)
path = pathlib.Path("checkpoint").absolute()
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, {"counts": jnp.array([0, 1000, 2000], jnp.int32)})
    checkpointer.wait_until_finished()
    wanted = {"counts": jax.ShapeDtypeStruct((3,), jnp.int8)}
    restored = checkpointer.restore(path, wanted)
    print("saved 0, 1000, 2000; restored", restored["counts"])
    assert restored["counts"].tolist() == [0, -24, -48], "this has changed"
    try:
        checkpointer.restore(path, {"counts": jax.ShapeDtypeStruct((2,), jnp.int32)})
        raise SystemExit("this has changed")
    except ValueError as error:
        print("another shape:", str(error).splitlines()[0][:80])
PYTHON
venv/bin/python case.py
