#!/bin/sh
# PyTorch 2.13.0: torch.compile on the CPU drops a cast to bfloat16 and back, so that numbers are
# not rounded: code that simulates 16 bits, or splits a float32 in two, computes something
# else without an error. jax.jit of JAX 0.10.2 rounds. It needs a C++ compiler.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 jax==0.10.2 numpy==2.4.6
cat > case.py <<'PYTHON'
import jax
import jax.numpy as jnp
import numpy as np
import torch

print("torch", torch.__version__, "jax", jax.__version__)


def rest(x):
    return x - x.bfloat16().float()


numbers = np.linspace(1, 2, 1000, dtype="float32")
eager = rest(torch.from_numpy(numbers)).abs().max().item()
compiled = torch.compile(rest)(torch.from_numpy(numbers)).abs().max().item()
by_jax = jax.jit(lambda x: x - x.astype(jnp.bfloat16).astype(jnp.float32))(numbers)
by_jax = float(jnp.abs(by_jax).max())
print("largest rest of x in bfloat16:", eager, "compiled:", compiled, "JAX:", by_jax)
assert eager > 0.003 and compiled == 0 and by_jax == eager, "this has changed"
PYTHON
venv/bin/python case.py
