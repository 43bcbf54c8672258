"""A function that is traced once and copied into every graph that calls it."""

import networks
import numpy as np
import tensorflow as tf
from recipes import Recipe, create_trainer

from towers.optim.phases import Phase
from towers.parallel.compilation import TracedOnce
from towers.parallel.strategies.towers import towers


def cube(x, nothing):
    with tf.GradientTape() as tape:
        tape.watch(x["a"])
        y = tf.reduce_sum(x["a"] ** 3)
    gradient = tape.gradient(y, x["a"])
    return {"y": y, "gradient": gradient, "same": x["b"]}


def arguments(size=3):
    a = np.random.default_rng(0).normal(size=size).astype(np.float32)
    return {"a": tf.constant(a), "b": tf.constant(7)}


def test_one_trace_serves_every_device_and_graph():
    traced = TracedOnce(cube)

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
    assert traced._function.experimental_get_tracing_count() == 1
    devices = {
        op.device[-5:]
        for op in graphs[0].get_operations()
        if "gradient_tape" in op.name
    }
    assert devices == {"CPU:0", "CPU:1", "CPU:2"}

    on_devices(arguments(size=4))  # Another signature.
    assert traced._function.experimental_get_tracing_count() == 2


def test_towers_with_equally_many_images_share_a_trace():
    """Ten images for four towers, in shares of 3 and of 2; phases have own traces."""
    plain, batches = networks.plain_network(), networks.random_batches(2, 10)
    frozen = frozenset({"conv1/kernel"})
    phases = [Phase(1, plain.model), Phase(9, plain.model, frozen)]
    options = (towers, plain, Recipe(), batches, 4)
    trainer = create_trainer(*options, phases=phases)
    trainer.trace()
    traces = [
        x._function.experimental_get_tracing_count()
        for x in trainer.towers._gradient_fns.values()
    ]
    assert traces == [2, 2]
