"""A function that is traced once and copied into every graph that calls it."""

import functools

import networks
import numpy as np
import pytest
import tensorflow as tf
from recipes import Recipe, create_trainer

from towers.optim.phases import Phase
from towers.parallel import towers as of_towers
from towers.parallel.compilation import TracedOnce
from towers.parallel.strategies.towers import towers


def powers(exponent, x, nothing):
    """A cube's gradient among others; the Python body counts its calls."""
    powers.calls += 1
    with tf.GradientTape() as tape:
        tape.watch(x["a"])
        y = tf.reduce_sum(x["a"] ** exponent)
    gradient = tape.gradient(y, x["a"])
    return {"y": y, "gradient": gradient, "same": x["b"]}


@pytest.fixture(autouse=True)
def _count_anew():
    powers.calls = 0


def arguments(size=3):
    a = np.random.default_rng(0).normal(size=size).astype(np.float32)
    return {"a": tf.constant(a), "b": tf.constant(7)}


def test_one_trace_serves_every_device_and_graph():
    traced = TracedOnce(functools.partial(powers, 3))

    @tf.function(autograph=False)
    def on_devices(x):
        results = []
        for device in range(3):
            with tf.device(f"/CPU:{device}"):
                results.append(traced(x, None, name=f"tower_{device}"))
        return results

    graphs = [on_devices.get_concrete_function(arguments()).graph]
    expected = arguments()["a"].numpy()
    for result in on_devices(arguments()):
        np.testing.assert_allclose(result["gradient"], 3 * expected**2, rtol=1e-6)
        np.testing.assert_allclose(result["y"], np.sum(expected**3), rtol=1e-6)
        assert result["same"] == 7
    assert powers.calls == 1
    devices = {
        op.device[-5:]
        for op in graphs[0].get_operations()
        if "gradient_tape" in op.name
    }
    assert devices == {"CPU:0", "CPU:1", "CPU:2"}

    on_devices(arguments(size=4))  # Another signature.
    assert powers.calls == 2


def test_towers_with_as_many_images_share_a_trace(monkeypatch):
    """Ten images for four towers: shares of 3 and of 2; the two phases differ."""
    calls, original = [], of_towers.tower_gradients

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(of_towers, "tower_gradients", counted)
    plain, batches = networks.plain_network(), networks.random_batches(2, 10)
    frozen = frozenset({"conv1/kernel"})
    phases = [Phase(1, plain.model), Phase(9, plain.model, frozen)]
    options = (towers, plain, Recipe(), batches, 4)
    trainer = create_trainer(*options, phases=phases)
    for _ in range(2):
        trainer.train(1)
    assert len(calls) == 4
