#!/bin/sh
# Adafactor keeps rows and columns of the last two axes. In PyTorch 2.13.0 those of a
# convolution are its 3x3 window: its state is two thirds of the kernel. Keras 3.15.1 has the
# right axes, and allocates another full second moment. Optax 0.2.8 keeps 18 numbers in 4,608.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 jax==0.10.2 keras==3.15.1 optax==0.2.8
cat > case.py <<'PYTHON'
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import optax
import torch

print("torch", torch.__version__, "keras", keras.__version__, "optax", optax.__version__)
kernel = np.zeros((3, 3, 512, 512), "float32")
shares = {}

weight = torch.nn.Parameter(torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy()))
weight.grad = torch.ones_like(weight)
optimizer = torch.optim.Adafactor([weight])
optimizer.step()
state = [x for x in optimizer.state[weight].values() if torch.is_tensor(x)]
shares["torch"] = sum(x.numel() for x in state) / kernel.size

optimizer = keras.optimizers.Adafactor()
optimizer.build([keras.Variable(kernel)])
shares["Keras"] = sum(np.prod(v.shape) for v in optimizer.variables) / kernel.size

state = jax.tree.leaves(optax.scale_by_factored_rms().init(kernel))
shares["optax"] = sum(x.size for x in state) / kernel.size

print("numbers of the state, as a share of the kernel's:", shares)
assert 0.66 < shares["torch"] < 0.67, "this has changed"
assert shares["Keras"] > 1 and shares["optax"] < 0.005, "this has changed"
PYTHON
venv/bin/python case.py
