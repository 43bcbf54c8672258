"""Classes with few images: the banner, weights of the loss, balanced orders."""

import json

import numpy as np
import pytest
import tensorflow as tf

from towers import Config
from towers.data.classes import class_weights, logit_offsets
from towers.data.orders import BalancedOrder
from towers.data.sources import ArraySource

MEAN, DEVIATION = (100.0,) * 3, (50.0,) * 3
# 200 examples of four classes, one of which has none.
LABELS = np.random.default_rng(0).permutation([0] * 170 + [1] * 25 + [3] * 5)


def source_of(labels, shape=(6, 6, 3)):
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (len(labels), *shape), dtype=np.uint8)
    return ArraySource(images, labels)


def test_balanced_weights_are_inverse_to_the_images_and_have_the_mean_1():
    weights = np.array(class_weights("balanced", source_of(LABELS), tuple("abcd")))
    np.testing.assert_allclose(weights[[1, 3]] / weights[0], [170 / 25, 170 / 5])
    assert weights[LABELS].mean() == pytest.approx(1)
    assert weights[2] == 1


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


def test_offsets_are_the_logarithms_of_shares():
    """A class without images counts as one."""
    offsets = logit_offsets(1.5, source_of(LABELS), 4)
    shares = np.float64([170, 25, 1, 5]) / 200
    np.testing.assert_allclose(offsets, 1.5 * np.log(shares))


def test_every_class_that_has_images_is_equally_likely():
    order = BalancedOrder(LABELS)
    compiled = tf.function(lambda epoch: order(7, epoch))
    epochs = np.array([compiled(tf.constant(x, tf.int64)) for x in range(200)])
    assert epochs.shape == (200, 200)
    shares = np.bincount(LABELS[epochs].reshape(-1), minlength=4) / epochs.size
    np.testing.assert_allclose(shares, [1 / 3, 1 / 3, 0, 1 / 3], atol=0.01)
    for label in (0, 1, 3):  # and in a class every image
        counts = np.bincount(epochs.reshape(-1), minlength=200)[label == LABELS]
        expected = epochs.size / 3 / len(counts)
        assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected))
    assert len(np.unique(epochs, axis=0)) == 200
    np.testing.assert_array_equal(order(7, tf.constant(3, tf.int64)), epochs[3])
    assert np.any(order(8, tf.constant(3, tf.int64)) != epochs[3])
