"""--input=resident: the batches of the stream, made inside the compiled step."""

import dataclasses
from typing import ClassVar

import numpy as np
import small_runs
import tensorflow as tf

from towers.data.augment.augmentation import create_augment
from towers.data.batches import TrainBatches
from towers.data.resident import Resident
from towers.data.sources import ArraySource, DeviceSource, Subset, num_bytes
from towers.training.train import train


class Counted(TrainBatches):
    """Batches that note the epochs whose orders are drawn."""

    drawn: ClassVar[list[int]] = []

    def orders(self, first_epoch, num_epochs):
        self.drawn.extend(range(int(first_epoch), int(first_epoch) + num_epochs))
        return super().orders(first_epoch, num_epochs)


def test_the_order_of_an_epoch_is_drawn_once():
    """It costs more than a batch; every tower needs it."""
    augment = create_augment("none", (8, 8, 3), (120.0,) * 3, (60.0,) * 3)
    batches = Counted(ArraySource(*small_runs.arrays(12, 0)), augment, 3, 4)
    resident = Resident(batches.split([2, 2]), ["/CPU:3", "/CPU:4"])

    @tf.function
    def step_of(step):
        awaited = resident.wait(None, [step, step])
        return [resident.batch(k, x, step) for k, x in enumerate(awaited)]

    Counted.drawn.clear()
    labels = []
    for step in range(9):
        resident.start(step, 1)
        parts = step_of(tf.constant(step, tf.int64))
        labels.append(np.concatenate([x["labels"] for x in parts]))
    assert Counted.drawn == [0, 1, 2]
    for epoch in np.reshape(labels, [3, 12]):
        expected = small_runs.arrays(12, 0)[1]
        np.testing.assert_array_equal(np.sort(epoch), np.sort(expected))


def test_a_run_is_the_same_bit_for_bit_also_in_two_parts(tmp_path, monkeypatch):
    config, network = small_runs.small_config(num_towers=2), small_runs.full_network
    streamed = small_runs.uninterrupted(config, network).state
    small_runs.use(monkeypatch, network)
    config = dataclasses.replace(config, input="resident")
    train(tmp_path / "resident", dataclasses.replace(config, max_steps=3))
    resident = train(tmp_path / "resident", config).state
    small_runs.assert_equal_states(resident, streamed)


def test_sources_in_memory_know_their_size_and_are_copied_to_a_device():
    images, labels = small_runs.arrays(6, 0)
    weights = np.arange(6, dtype=np.float32)
    subset = Subset(ArraySource(images, labels, weights), np.array([4, 1]))
    assert num_bytes(subset) == 2 * 8 * 8 * 3
    copy = DeviceSource(subset, "/CPU:2")
    actual, of_classes = copy.read(tf.constant([1, 0, 1], tf.int64))
    assert "CPU:2" in actual.device and "CPU:2" in of_classes.device
    np.testing.assert_array_equal(actual, images[[1, 4, 1]])
    np.testing.assert_array_equal(copy.sample_weights, [4, 1])
    np.testing.assert_array_equal(of_classes, labels[[1, 4, 1]])
