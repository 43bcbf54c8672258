#!/bin/sh
# Optax 0.2.8: inject_hyperparams casts the numbers of an optimizer to the dtype of the
# parameters. In bfloat16 Adam's b2 of 0.999 is 1, and the first update is NaN; the same
# optimizer without inject_hyperparams, or with hyperparam_dtype=jnp.float32, is right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet optax==0.2.8 jax==0.10.2 numpy==2.4.6
cat > case.py <<'PYTHON'
import jax.numpy as jnp
import numpy as np
import optax

print("optax", optax.__version__)
injected = optax.inject_hyperparams
optimizers = {
    "plain": optax.adamw(1e-3),
    "injected": injected(optax.adamw)(1e-3),
    "float32": injected(optax.adamw, hyperparam_dtype=jnp.float32)(1e-3),
}
seen = {}
for dtype in (jnp.float32, jnp.bfloat16):
    parameter = jnp.ones(3, dtype)
    for name, optimizer in optimizers.items():
        state = optimizer.init(parameter)
        update, state = optimizer.update(0.1 * parameter, state, parameter)
        seen[dtype.__name__, name] = float(update[0])
        numbers = getattr(state, "hyperparams", {})
        print(dtype.__name__, name, float(update[0]), "b2:", numbers.get("b2"))
bad = seen.pop(("bfloat16", "injected"))
assert np.isnan(bad), "this has changed"
assert np.allclose([*seen.values()], -1e-3, rtol=0.01), "this has changed"
PYTHON
venv/bin/python case.py
