#!/bin/sh
# Equinox 0.13.8: AvgPool2d(3, stride=2, use_ceil=True) divides the windows that reach
# beyond the image by 9. Seen: of 8x8 ones the last row and column of the means are 0.67,
# the corner is 0.44.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet jax==0.10.2 equinox==0.13.8
cat > case.py <<'PYTHON'
import equinox as eqx
import jax.numpy as jnp
import numpy as np

print("equinox", eqx.__version__)
pool = eqx.nn.AvgPool2d(3, stride=2, use_ceil=True)
means = np.asarray(pool(jnp.ones((1, 8, 8)))[0])
print("means of ones:", means.round(2).tolist())
corners = means[0, 0], means[0, 3], means[3, 3]
assert np.allclose(corners, [1, 2 / 3, 4 / 9]), "this has changed"
PYTHON
venv/bin/python case.py
