"""Classes with few images: the banner, weights of the loss, balanced orders."""

import json

import numpy as np
import pytest
import small_runs
import tensorflow as tf
from small_runs import small_config

from towers import Config, build, build_trainer
from towers.data.augment.augmentation import none
from towers.data.batches import EvalBatches, TrainBatches
from towers.data.classes import class_weights, logit_offsets
from towers.data.orders import BalancedOrder
from towers.data.resident import Resident
from towers.data.sources import ArraySource
from towers.optim.losses import cross_entropy
from towers.parallel.devices import Devices

MEAN, DEVIATION = (100.0,) * 3, (50.0,) * 3
# 200 examples of four classes, one of which has none.
LABELS = np.random.default_rng(0).permutation([0] * 170 + [1] * 25 + [3] * 5)


def source_of(labels, shape=(6, 6, 3)):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (len(labels), *shape), dtype=np.uint8)
    return ArraySource(images, labels)


# Weights.


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_weighted_loss_is_the_weighted_sum_over_the_classes(smoothing):
    rng = np.random.default_rng(2)
    logits, weights = rng.normal(size=(20, 4)), rng.random(4) * 3
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    labels = rng.integers(0, 4, 20)
    mixed = rng.dirichlet(np.ones(4), 20)
    for given, targets in ((labels, np.eye(4)[labels]), (mixed, mixed)):
        targets = weights * ((1 - smoothing) * targets + smoothing / 4)
        variable = tf.constant(logits)
        with tf.GradientTape() as tape:
            tape.watch(variable)
            loss = cross_entropy(variable, tf.constant(given), smoothing, weights)
        np.testing.assert_allclose(loss, -(targets * log_p).sum(1), rtol=1e-12)
        gradient = np.exp(log_p) * targets.sum(1, keepdims=True) - targets
        np.testing.assert_allclose(tape.gradient(loss, variable), gradient, atol=1e-12)


def test_balanced_weights_are_inverse_to_the_images_and_have_the_mean_1():
    weights = np.array(class_weights("balanced", source_of(LABELS), tuple("abcd")))
    np.testing.assert_allclose(weights[[1, 3]] / weights[0], [170 / 25, 170 / 5])
    assert weights[LABELS].mean() == pytest.approx(1)


def test_weights_of_a_file(tmp_path):
    path = tmp_path / "weights.json"
    path.write_text(json.dumps({"d": 2.5, "a": 0}))
    assert class_weights(str(path), source_of(LABELS), tuple("abcd")) == (0, 1, 1, 2.5)


def test_weights_of_a_dict_have_names_or_numbers_of_classes():
    for given, expected in (
        ({"b": 2, "1": 0.5}, (0.5, 1, 2, 1)),
        ({1: np.float32(3), np.int64(3): 0}, (1, 3, 1, 0)),
        ({0: 2, "0": 3}, (2, 3, 1, 1)),
    ):
        text = Config(class_weights=given).class_weights
        assert class_weights(text, source_of(LABELS), tuple("10bc")) == expected


def test_weights_offsets_and_the_sampler_reach_the_training_alone(
    monkeypatch, tmp_path
):
    small_runs.use(monkeypatch)
    path = tmp_path / "weights.json"
    weights = dict(zip("abcde", (3.0, 0.5, 1.0, 2.0, 0.0), strict=True))
    path.write_text(json.dumps(weights))
    config = small_config(
        class_weights=str(path),
        logit_adjustment=5.0,
        sampler="balanced",
        weight_decay=0.0,
        augment="none",
    )
    parts = build.build(config)
    trainer = build_trainer.create_trainer(config, parts, Devices("CPU", ("/CPU:0",)))
    source, test = parts.data.train, parts.data.test
    step = tf.constant(0, tf.int64)
    order = BalancedOrder(source.labels)
    batch = parts.train_batches(step)
    np.testing.assert_array_equal(
        batch["labels"], source.labels[order(config.seed, step)[:10]]
    )
    logits = parts.model(batch["images"])
    shares = np.log(np.bincount(source.labels) / source.num_examples)
    expected = cross_entropy(
        logits, batch["labels"], 0.0, tuple(weights.values()), 5 * shares
    )
    images, labels = test.read(tf.range(test.num_examples, dtype=tf.int64))
    logits = parts.model(parts.augment.evaluate(images))
    feed = build_trainer.create_eval_feed(EvalBatches(test, parts.augment, 10), trainer)
    counts = trainer.evaluate(feed, 3, heartbeat=lambda: None).reported
    plain = tf.reduce_sum(cross_entropy(logits, labels))
    assert counts["loss"] == pytest.approx(float(plain), rel=1e-5)
    loss = float(trainer.train(1)["loss"])
    assert loss == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_an_adjusted_loss_is_that_of_logits_plus_logarithms_of_shares(smoothing):
    offsets = logit_offsets(1.5, source_of(LABELS), 4)
    shares = np.float64([170, 25, 1, 5]) / 200  # a class without images counts as one
    np.testing.assert_allclose(offsets, 1.5 * np.log(shares))
    logits, labels = np.random.default_rng(0).normal(size=(9, 4)), np.arange(9) % 4
    found, expected = (
        cross_entropy(tf.constant(x), labels, smoothing, logit_adjustment=more)
        for x, more in ((logits, offsets), (logits + offsets, None))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)


# Balanced orders.


def test_every_class_that_has_images_is_equally_likely():
    order = BalancedOrder(LABELS)
    compiled = tf.function(lambda epoch: order(7, epoch))
    epochs = np.array([compiled(tf.constant(x, tf.int64)) for x in range(200)])
    assert epochs.shape == (200, 200)
    shares = np.bincount(LABELS[epochs].reshape(-1), minlength=4) / epochs.size
    np.testing.assert_allclose(shares, [1 / 3, 1 / 3, 0, 1 / 3], atol=0.01)
    for label in (0, 1, 3):  # and in a class every image
        counts = np.bincount(epochs.reshape(-1), minlength=200)[LABELS == label]
        expected = epochs.size / 3 / len(counts)
        assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))
    assert len(np.unique(epochs, axis=0)) == 200
    np.testing.assert_array_equal(order(7, tf.constant(3, tf.int64)), epochs[3])
    assert np.any(order(8, tf.constant(3, tf.int64)) != epochs[3])


@pytest.mark.parametrize("repeats", [1, 3])
def test_balanced_batches_are_functions_of_seed_and_step_however_they_are_made(repeats):
    source = source_of(LABELS)
    augment = none(source.image_shape, MEAN, DEVIATION)
    batches = TrainBatches(
        source, augment, 3, 32, order=BalancedOrder(LABELS), repeats=repeats
    )
    resident = Resident(batches.split([20, 12]), ["/CPU:0"] * 2)
    # The second batch reaches over the end of an epoch.
    for step, streamed in enumerate(batches.stream(5).take(2), 5):
        expected = batches(tf.constant(step, tf.int64))
        parts = resident.batches_of(step)
        for name, values in expected.items():
            joined = tf.concat([tf.cast(x[name], values.dtype) for x in parts], 0)
            np.testing.assert_array_equal(joined, values)
            np.testing.assert_array_equal(streamed[name], values)
