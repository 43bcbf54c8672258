"""--compile=xla: the same training, each tower's part compiled as one."""

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from recipes import Recipe, assert_equal_to_oracle, create_trainer, have_steps_of_gpus

from benchmarks.graphs import placement
from towers.optim import losses
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.compilation import why_not_xla
from towers.parallel.strategies.replicated import replicated
from towers.parallel.strategies.towers import towers


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls,num_towers,name,accumulate_steps,of_gpus",
    [
        (towers, 2, "plain", 1, False),
        (AsynchronousTrainer, 1, "residual", 1, False),
        (replicated, 2, "residual", 2, False),
        (replicated, 2, "residual", 1, True),
        (towers, 1, "residual", 2, True),
    ],
)
def test_compiled_towers_equal_the_oracle(
    cls, num_towers, name, accumulate_steps, of_gpus, monkeypatch
):
    """And on GPUs the update, which is compiled as well, or the whole step of one."""
    if of_gpus:
        have_steps_of_gpus(monkeypatch)
    network = networks.NETWORKS[name]()
    batches = networks.random_batches(3, 12 * accumulate_steps)
    options = {"accumulate_steps": accumulate_steps} if accumulate_steps > 1 else {}
    options |= {"compile_towers": True, "compile_input": of_gpus}
    towers = create_trainer(cls, network, Recipe(), batches, num_towers, **options)
    assert towers.compilation.whole_step == (of_gpus and num_towers == 1)
    towers.train(3)
    expected = Recipe().oracle(network, batches, num_towers, accumulate_steps)
    assert_equal_to_oracle(towers.state(), expected)


def test_what_is_compiled_stays_on_its_tower():
    network = networks.residual_network()
    batches = networks.random_batches(1, 12)
    trainer = create_trainer(towers, network, Recipe(), batches, 3, compile_towers=True)
    [graph] = trainer.trace()
    every = list(placement.placements(graph))
    compiled = [p for p in every if p.compiled]
    assert {p.device for p in compiled} == {"/CPU:0", "/CPU:1", "/CPU:2"}
    assert any(p.op.type == "Conv2DBackpropFilter" for p in compiled)
    assert not any("Variable" in p.op.type for p in compiled)
    assert not any("Backprop" in p.op.type for p in every if not p.compiled)


class OfPython(keras.layers.Layer):
    """XLA compiles no Python."""

    def call(self, x):
        y = tf.numpy_function(np.abs, [x], x.dtype)
        return tf.ensure_shape(y, x.shape)


@pytest.mark.parametrize(
    "layer,deterministic,why",
    [
        (keras.layers.ReLU, False, ""),
        (keras.layers.MaxPooling2D, False, ""),
        (keras.layers.MaxPooling2D, True, "max pooling"),
        (OfPython, False, "PyFunc"),
    ],
)
def test_a_trial_finds_what_xla_does_not_compile(layer, deterministic, why):
    x = keras.Input((8, 8, 3))
    y = keras.layers.Flatten()(layer()(keras.layers.Conv2D(4, 3)(x)))
    model = keras.Model(x, keras.layers.Dense(5)(y))
    loss_fn, labels = losses.create_loss("cross_entropy"), tf.TensorSpec([], tf.int64)
    reason = why_not_xla(model, loss_fn, labels, "/CPU:0", deterministic)
    assert why in reason and bool(why) == bool(reason)
