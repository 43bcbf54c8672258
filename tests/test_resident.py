"""--input=resident: the batches of the stream, made inside the compiled step."""

import dataclasses

import networks
import numpy as np
import pytest
import small_runs
import tensorflow as tf
from marks import slow
from recipes import Recipe, create_trainer, have_steps_of_gpus

from towers import build, training
from towers.config import Config
from towers.data.augment import create_augment
from towers.data.batches import TrainBatches
from towers.data.mixing import create_mix
from towers.data.resident import ResidentBatches
from towers.data.sources import ArraySource, DeviceSource, Subset, num_bytes
from towers.errors import ConfigError
from towers.parallel import strategies
from towers.parallel.devices import Devices
from towers.parallel.feed import CopiedAhead, HostStream


def batches_of(num_examples, batch_size, augment, mixed=False):
    images, labels = small_runs.arrays(num_examples, 0)
    return TrainBatches(
        ArraySource(images, labels),
        create_augment(augment, (8, 8, 3), (120.0, 125.0, 130.0), (60.0, 61.0, 62.0)),
        seed=3,
        images_per_step=batch_size,
        noise_shapes={"dropout1_noise": (7,)},
        mix=create_mix(1.0, 1.0, 5) if mixed else None,
    )


@pytest.mark.parametrize("first_step", [slow(0), 5])
@pytest.mark.parametrize(
    "num_examples,batch_size,augment,mixed",
    [
        (7, 5, "pad_crop_flip", False),
        slow(12, 4, "none", False),
        (3, 11, "pad_crop_flip", True),
        slow(5, 5, "pad_crop_flip", True),
        slow(1, 3, "none", False),
    ],
)
def test_the_batches_are_those_of_the_stream_bit_for_bit(
    num_examples, batch_size, augment, mixed, first_step
):
    batches = batches_of(num_examples, batch_size, augment, mixed)
    resident = ResidentBatches(batches, "/CPU:3")
    count = 6

    @tf.function(autograph=False)
    def made(first_step):
        """As the loop of a trainer makes them."""
        step, actual = first_step, []
        for _ in range(count):
            actual.append(resident.batch(resident.wait(None, step), step))
            step += 1
        return actual

    streamed = list(batches.stream(first_step).take(count))
    for ours, theirs in zip(
        made(tf.constant(first_step, tf.int64)), streamed, strict=True
    ):
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)
    graph = made.get_concrete_function(tf.TensorSpec([], tf.int64)).graph
    reads = [op for op in graph.get_operations() if "Gather" in op.type]
    assert reads and {op.device[-5:] for op in reads} == {"CPU:3"}


def test_the_order_of_an_epoch_is_drawn_once():
    """The shuffle, slower than a batch, is in a branch that is not taken."""
    resident = ResidentBatches(batches_of(12, 4, "none"), "/CPU:3")
    step = tf.constant(4, tf.int64)
    resident.wait(None, step)
    drawn = resident._orders.numpy()
    resident._orders.assign(drawn[:, ::-1])
    resident.wait(None, step + 1)  # of the same epoch
    np.testing.assert_array_equal(resident._orders, drawn[:, ::-1])
    resident.wait(None, step + 2)
    np.testing.assert_array_equal(np.sort(resident._orders[0]), np.arange(12))
    assert (resident._orders.numpy() != drawn).any()


@pytest.mark.parametrize(
    "options",
    [
        {"num_towers": 2},
        slow({"num_towers": 3, "strategy": "replicated", "accumulate_steps": 2}),
        slow({"num_towers": 4, "strategy": "model_parallel", "group_size": 2}),
        slow({"num_towers": 2, "batch_norm": "sync"}),
    ],
)
def test_a_run_is_the_same_bit_for_bit_also_in_two_parts(
    options, tmp_path, monkeypatch
):
    small_runs.use(monkeypatch, small_runs.full_network)
    config = small_runs.small_config(**options)
    streamed = training.train(tmp_path / "stream", config).state
    config = dataclasses.replace(config, input="resident")
    training.train(tmp_path / "resident", dataclasses.replace(config, max_steps=3))
    resident = training.train(tmp_path / "resident", config).state
    small_runs.assert_equal_states(resident, streamed)


def test_a_whole_batch_stays_on_the_device_that_made_it(monkeypatch):
    """A step of GPUs, that is."""
    have_steps_of_gpus(monkeypatch)
    network, batches = networks.residual_network(), batches_of(12, 4, "none")
    strategy = create_trainer(
        strategies.towers,
        network,
        Recipe(),
        networks.random_batches(1, 4),
        2,
        feed=ResidentBatches(batches, "/CPU:3"),
    )
    [graph] = strategy.loop.trace()
    shares = [op for op in graph.get_operations() if "share" in op.name]
    shares = [op for op in shares if op.type == "Slice"]
    assert len(shares) == 6 and {op.device[-5:] for op in shares} == {"CPU:3"}


def test_sources_in_memory_know_their_size_and_are_copied_to_a_device():
    images, labels = small_runs.arrays(6, 0)
    subset = Subset(ArraySource(images, labels), np.array([4, 1]))
    assert num_bytes(subset) == 2 * 8 * 8 * 3
    copy = DeviceSource(subset, "/CPU:2")
    actual, of_classes = copy.read(tf.constant([1, 0, 1], tf.int64))
    assert "CPU:2" in actual.device and "CPU:2" in of_classes.device
    np.testing.assert_array_equal(actual, images[[1, 4, 1]])
    np.testing.assert_array_equal(of_classes, labels[[1, 4, 1]])


class FromFiles:
    """A source that does not lie in memory."""

    num_examples, image_shape = 10, (8, 8, 3)

    def __init__(self, source):
        self.read = source.read


@pytest.mark.parametrize(
    "kind,wanted,in_memory,expected",
    [
        ("CPU", "auto", True, HostStream),
        ("GPU", "auto", True, ResidentBatches),
        ("GPU", "auto", False, CopiedAhead),
        ("GPU", "stream", True, CopiedAhead),
        ("CPU", "resident", True, ResidentBatches),
    ],
)
def test_auto_is_resident_on_gpus_for_data_in_memory(kind, wanted, in_memory, expected):
    batches = batches_of(10, 5, "none")
    if not in_memory:
        batches = dataclasses.replace(batches, source=FromFiles(batches.source))
    config = small_runs.small_config(input=wanted)
    devices = Devices(kind, ["/CPU:0"])
    assert type(build.create_feed(config, batches, devices)) is expected


def test_what_is_read_from_files_is_not_resident():
    batches = batches_of(10, 5, "none")
    batches = dataclasses.replace(batches, source=FromFiles(batches.source))
    config = small_runs.small_config(input="resident")
    with pytest.raises(ConfigError, match="^input=resident with dataset=synthetic: "):
        build.create_feed(config, batches, Devices("CPU", ["/CPU:0"]))


def test_asynchronous_towers_draw_from_a_stream():
    with pytest.raises(ConfigError, match="^input=resident with strategy=async_towers"):
        Config(strategy="async_towers", input="resident")
