#!/bin/sh
# Keras 3.15.1: weight_decay of SGD shrinks the parameters by themselves, and does not go
# through the velocity. With a momentum of 0.9 the same number decays a tenth of what
# torch.optim.SGD and TensorFlow programs with an L2 loss do. Lamb has the decay outside
# of its trust ratio, unlike algorithm 2 of arXiv:1904.00962 and optax.lamb 0.2.8.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet jax==0.10.2 keras==3.15.1 optax==0.2.8
cat > case.py <<'PYTHON'
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
import optax

print("keras", keras.__version__, "optax", optax.__version__)
start = np.float32([1.0, -2.0, 0.5])
zeros, ones = np.zeros(3, "float32"), np.ones(3, "float32")


def by_keras(optimizer, gradient, steps):
    w = keras.Variable(start)
    optimizer.build([w])
    for _ in range(steps):
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [w])
    return np.asarray(w.value)


def by_optax(transform, gradient, steps):
    w = start
    state = transform.init(w)
    for _ in range(steps):
        updates, state = transform.update(gradient, state, w)
        w = w + np.asarray(updates)
    return w


rate, decay = 0.01, 0.01
coupled = optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, 0.9))
ours = by_keras(keras.optimizers.SGD(rate, 0.9, weight_decay=decay), zeros, 500)
theirs = by_optax(coupled, zeros, 500)
print("500 steps of decay alone, Keras:", ours / start, "through momentum:", theirs / start)
assert np.allclose(ours / start, (1 - rate * decay) ** 500), "this has changed"
assert np.allclose(theirs / start, np.exp(-500 * 10 * rate * decay), atol=0.01)
lamb = keras.optimizers.Lamb(0.1, weight_decay=0.5, epsilon=1e-6)
ours = by_keras(lamb, ones, 1)
theirs = by_optax(optax.lamb(0.1, weight_decay=0.5), ones, 1)
print("a step of LAMB, Keras:", ours, "optax:", theirs)
outside = start * (1 - 0.1 * 0.5)
outside = outside - 0.1 * np.linalg.norm(outside) / np.sqrt(3)
assert not np.allclose(ours, theirs, atol=0.01), "this has changed"
assert np.allclose(ours, outside, atol=1e-3), "this has changed"
PYTHON
venv/bin/python case.py
