"""The walker, its tape over devices, and the split of layers (split, device_tape)."""

import networks
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from marks import slow
from recipes import Recipe, create_trainer

from benchmarks.graphs.executed import partition_graphs
from towers.errors import ConfigError
from towers.models.layers.core import Conv2D, GroupedConv2D, PadChannels
from towers.models.layers.normalization import (
    BatchNormalization,
    LocalResponseNormalization,
)
from towers.optim import losses
from towers.optim.phases import phases_of
from towers.parallel.copies import Initial
from towers.parallel.sharding.device_tape import DeviceTape, Value
from towers.parallel.sharding.network import SplitTowers
from towers.parallel.sharding.split import Shards, channel_slice
from towers.parallel.strategies.model_parallel import model_parallel
from towers.parallel.towers import tower_gradients

# The tape over devices.


def test_gradients_over_devices_are_those_of_one_tape():
    x, w = np.array([1.0, 2.0, 3.0]), np.array([0.5, -1.0, 2.0])

    @tf.function(autograph=False)
    def over_devices():
        tape = DeviceTape()
        a = Value(tf.constant(x), "/CPU:0", differentiable=True)
        b = Value(tf.constant(w), "/CPU:1", differentiable=True)
        there = tape.move(a, "/CPU:1")
        assert tape.move(a, "/CPU:0") is a and tape.move(a, "/CPU:1") is there
        [product] = tape.apply("/CPU:1", lambda a, b: a * b, [there, b])
        [square] = tape.apply("/CPU:0", lambda a: a * a, [a])
        back = tape.move(product, "/CPU:0")
        total = tape.apply(
            "/CPU:0", lambda p, s: tf.reduce_sum(tf.sin(p) + s), [back, square]
        )
        assert len(tape.moved) == 2
        tape.backward([(total[0], tf.constant(2.0, tf.float64))])
        assert len(tape.moved) == 4  # each gradient once
        return a.gradient(), b.gradient()

    of_a, of_b = over_devices()
    np.testing.assert_allclose(of_a, 2 * (np.cos(x * w) * w + 2 * x))
    np.testing.assert_allclose(of_b, 2 * np.cos(x * w) * x)


# The split of layers.


class OtherNormalization(layers.LayerNormalization):
    def call(self, inputs):
        return 2 * super().call(inputs)


@pytest.mark.parametrize(
    "layer,reason",
    [
        (layers.Softmax(name="soft"), "soft .*cannot be split"),
        (layers.Conv2D(3, 3, name="thin"), "thin has 3 outputs"),
        (layers.Conv2D(8, 1, groups=2, name="columns"), "columns has 2 groups"),
        (
            layers.Conv2D(8, 1, activation="softmax", name="odd"),
            "odd has the activation softmax",
        ),
        (
            layers.Conv2D(8, 1, activation=layers.LeakyReLU(), name="odd"),
            "odd has the activation LeakyReLU",
        ),
        (layers.LayerNormalization(1, name="norm"), "norm normalizes over axis"),
        (OtherNormalization(name="other"), "other .*cannot be split"),
        (layers.DepthwiseConv2D(3, name="deep"), "deep .*cannot be split"),
        (GroupedConv2D(8, 1, groups=2, name="columns"), "columns has 2 groups"),
        (LocalResponseNormalization(groups=2, name="near"), "near has 2 groups"),
    ],
)
def test_a_layer_that_cannot_be_split_is_refused_by_name(layer, reason):
    model = networks.model_of(layers.Conv2D(8, 1, name="conv"), layer)
    with pytest.raises(ConfigError, match=reason):
        Shards(model, 4)


@pytest.mark.parametrize(
    "layer", [layers.Conv2D(10, 3, name="c"), GroupedConv2D(10, 3, groups=10, name="c")]
)
def test_shards_own_slices_that_make_up_the_whole(layer):
    shards = Shards(networks.model_of(layer, shape=(8, 8, 10)), 4)
    kernel = layer.kernel.numpy()
    parts = [channel_slice(kernel, shard, 4) for shard in range(4)]
    assert [part.shape[-1] for part in parts] == [3, 3, 2, 2]
    np.testing.assert_array_equal(np.concatenate(parts, -1), kernel)
    built = [shards.of(layer, shard) for shard in range(4)]
    assert [tuple(b.kernel.shape) for b in built] == [part.shape for part in parts]


# Each comes first, when all channels are on every device, and after a split layer.
ONCE = [
    (lambda name: LocalResponseNormalization(2, alpha=0.1, name=name), 6),
    (lambda name: LocalResponseNormalization(2, alpha=0.1, groups=6, name=name), 6),
    (lambda name: PadChannels(1, 4, name=name), 7),
    (lambda name: PadChannels(3, 3, name=name), 6),
    (lambda name: GroupedConv2D(6, 3, padding="same", groups=6, name=name), 6),
    (lambda name: GroupedConv2D(12, 2, groups=6, name=name), 6),
    (lambda name: Conv2D(6, 1, strides=2, name=name), 6),
    (lambda name: BatchNormalization(name=name), 7),
    (lambda name: layers.LayerNormalization(name=name), 7),
    (lambda name: layers.LayerNormalization(scale=False, name=name), 7),
    (lambda name: layers.AveragePooling2D(1, strides=2, name=name), 7),
]


@pytest.mark.parametrize("num_shards", [slow(2), 3])
@pytest.mark.parametrize("create,channels", ONCE)
def test_a_split_layer_computes_what_the_whole_one_does(create, channels, num_shards):
    """Compare gradients, before and after a convolution."""
    model = networks.model_of(
        create("first"),
        layers.Conv2D(channels, 3, padding="same", name="conv"),
        create("second"),
        layers.Flatten(name="flatten"),
        layers.Dense(3, name="logits"),
        shape=(5, 4, channels),
    )
    rng = np.random.default_rng(0)
    batch = {
        "images": tf.constant(rng.normal(size=(4, 5, 4, channels)), tf.float32),
        "labels": tf.constant([0, 1, 2, 1]),
    }
    initial, phases = Initial.of(model), phases_of([], model)
    devices = [f"/CPU:{shard}" for shard in range(num_shards)]
    layouts, fetched = zip(
        *(
            networks.values_of(
                *initial.map(lambda v, i=i: channel_slice(v, i, num_shards))
            )
            for i in range(num_shards)
        ),
        strict=True,
    )
    network = SplitTowers(phases, losses.cross_entropy, layouts, [devices])
    results = network.gradients(0, fetched, [batch])
    layout, values = networks.values_of(*initial)
    expected = tower_gradients(
        phases[0], values, batch, loss_fn=losses.cross_entropy, layout=layout
    )
    np.testing.assert_allclose(results[0].loss, expected.loss, rtol=1e-5)
    for part, field in (("params", "gradients"), ("state", "state")):
        ours, theirs = [], getattr(layout, part).views(getattr(expected, field))
        for own, result in zip(layouts, results, strict=True):
            ours.append(getattr(own, part).views(getattr(result, field)))
        for *of_shards, whole in zip(*ours, theirs, strict=True):
            np.testing.assert_allclose(tf.concat(of_shards, -1), whole, atol=1e-5)


# What crosses devices.


def sent_bytes(strategy):
    """Return the bytes sent between devices in an executed step, without batches.

    Only floats with more than one element count.
    """
    step, zeros = strategy.loop._step_call, strategy.train_step.zero_metrics()
    batches = strategy.feed.batches_of(0)
    traced = step.get_concrete_function(0, batches, zeros).graph
    total = 0
    for graph in partition_graphs(lambda: step(0, batches, zeros)):
        for node in graph.node:
            if node.op not in ("_Send", "_HostSend"):
                continue
            if node.attr["send_device"].s == node.attr["recv_device"].s:
                continue
            name, _, place = node.input[0].partition(":")
            try:
                tensor = traced.get_operation_by_name(name).outputs[int(place or 0)]
            except KeyError:
                assert "/cond/" in name or "ctrl" in name, name  # of the control flow
                continue
            is_batch = tensor.op.type == "Placeholder"
            if tensor.dtype.is_floating and tensor.shape.rank and not is_batch:
                total += tensor.shape.num_elements() * tensor.dtype.size
    return total


@pytest.mark.parametrize("name,group_size", [("plain", 2), slow("residual", 3)])
def test_transferred_bytes_are_those_that_tensorflow_sends(name, group_size):
    network = networks.NETWORKS[name]()
    batches = networks.random_batches(2, 12)
    groups = create_trainer(
        model_parallel, network, Recipe(), batches, group_size, group_size=group_size
    )
    groups.trace()
    assert groups.transferred_bytes > 0
    assert sent_bytes(groups) == groups.transferred_bytes
