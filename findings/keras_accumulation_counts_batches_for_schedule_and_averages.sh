#!/bin/sh
# Keras 3.15.1 with gradient_accumulation_steps=4: optimizer.iterations counts updates, but a
# learning rate schedule gets the number of batches, and moving averages are taken after
# each batch: between two updates a momentum of 0.5 acts like 0.0625.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet jax==0.10.2 keras==3.15.1
cat > case.py <<'PYTHON'
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

print("keras", keras.__version__)


class ByStep(keras.optimizers.schedules.LearningRateSchedule):
    """A rate of 1 more than the step it is asked for."""

    def __call__(self, step):
        return keras.ops.cast(step, "float32") + 1.0


def train(num_batches, **options):
    w = keras.Variable(np.zeros(1, "float32"))
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=4, **options)
    optimizer.build([w])
    weights = []
    for _ in range(num_batches):
        optimizer.apply([keras.ops.convert_to_tensor([-1.0])], [w])
        weights.append(float(w[0]))
    return optimizer, weights


optimizer, weights = train(8, learning_rate=ByStep())
rates = [weights[3], weights[7] - weights[3]]
print("rates of the two updates:", rates, "iterations:", int(optimizer.iterations))
assert rates == [4.0, 8.0] and int(optimizer.iterations) == 2, "this has changed"

averages = []
for num_batches in (8, 9, 10, 11):
    optimizer, weights = train(
        num_batches, learning_rate=1.0, use_ema=True, ema_momentum=0.5
    )
    averages.append(float(optimizer._model_variables_moving_average[0][0]))
print("weight:", weights[-1], "average after batches 8, 9, 10, 11:", averages)
assert averages == [1.5, 1.75, 1.875, 1.9375], "this has changed"
PYTHON
venv/bin/python case.py
