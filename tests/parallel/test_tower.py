"""A tower is a pure function of its arguments."""

from functools import partial

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from engines import oracle

from towers.optim.losses import create_loss, cross_entropy
from towers.optim.phases import phases_of
from towers.parallel.towers import count_correct, tower_gradients

SMOOTHING = 0.1


def loss_fn(logits, labels):
    return cross_entropy(logits, labels, SMOOTHING)


def given(network, seed=7):
    """Create parameters and state other than the model's, and a batch of 6 images."""
    rng = np.random.default_rng(seed)

    def nearby(arrays):
        return {
            name: (a + rng.uniform(0.0, 0.1, a.shape)).astype(a.dtype)
            for name, a in arrays.items()
        }

    (batch,) = networks.random_batches(1, 6)
    return nearby(network.params), nearby(network.state), batch


def run_tower(network, params, state, batch, loss_fn=loss_fn):
    """Return a result with gradients and state in the order of the model."""
    batch = {name: tf.constant(value) for name, value in batch.items()}
    layout, values = networks.values_of(params, state)
    [phase] = phases_of((), network.model)
    result = tower_gradients(phase, values, batch, loss_fn=loss_fn, layout=layout)
    views = layout.state_views(values._replace(state=result.state))
    return result._replace(gradients=layout.params.views(result.gradients), state=views)


def assert_equals_oracle(result, network, params, state, batch):
    [(images, labels, noise)] = networks.oracle_batches([batch])
    expected = oracle.loss_and_gradients(
        *(network.described, params, state, images, labels),
        noise=noise,
        label_smoothing=SMOOTHING,
    )
    assert float(result.loss) == pytest.approx(expected.loss, rel=1e-5)
    assert float(result.correct) == round(expected.accuracy * len(batch["labels"]))
    for name, found in zip(params, result.gradients, strict=True):
        gradient = expected.gradients[name]
        np.testing.assert_allclose(found, gradient, rtol=1e-4, atol=1e-6, err_msg=name)
    for (name, value), found in zip(expected.state.items(), result.state, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert bool(result.is_finite())


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_a_tower_is_a_function_of_what_it_is_given(name):
    """The variables of the model are NaN and stay so; noise is the mask."""
    network, created = networks.NETWORKS[name](), []
    params, state, batch = given(network)
    for variable in network.model.variables:
        variable.assign(np.full(variable.shape, np.nan))

    def creator(next_creator, **kwargs):
        created.append(kwargs.get("name"))
        return next_creator(**kwargs)

    all_kept = batch | {"dropout1_noise": np.ones_like(batch["dropout1_noise"])}
    with tf.variable_creator_scope(creator):
        results = [
            run_tower(network, params, state, each) for each in (batch, batch, all_kept)
        ]
    assert created == []
    assert all(np.isnan(v).all() for v in network.model.variables)
    for result, each in zip(results[1:], (batch, all_kept), strict=True):
        assert_equals_oracle(result, network, params, state, each)
    for found, expected in zip(*map(tf.nest.flatten, results[:2]), strict=True):
        np.testing.assert_array_equal(found, expected)


# What is not finite.


@pytest.mark.parametrize("where", ["images", "logits/bias", "norm1/gamma"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_finite_tells_of_a_bad_number_wherever_it_comes_from(where, bad):
    network = networks.residual_network()
    params, state, batch = given(network)
    (batch if where == "images" else params)[where].flat[2] = bad
    assert not bool(run_tower(network, params, state, batch).is_finite())


def test_finite_tells_of_a_gradient_that_overflows_under_a_finite_loss():
    """sqrt(0) is 0, and its slope is not finite."""
    images = keras.Input((2,), name="images")
    model = keras.Model(images, keras.layers.Dense(2, name="logits")(images))
    network = networks.Network(model, [], {})
    params = {v.path: np.zeros(v.shape, np.float32) for v in model.weights}
    batch = {"images": np.ones([3, 2], np.float32), "labels": np.zeros(3, np.int32)}
    result = run_tower(network, params, {}, batch, lambda x, _: tf.sqrt(x[:, 0]))
    assert float(result.loss) == 0
    assert not bool(result.is_finite())


def test_a_mixed_image_is_right_where_its_largest_share_is_predicted():
    logits = tf.constant([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [0.0, 3.0, 1.0]])
    labels = tf.constant([[0.6, 0.4, 0.0], [0.0, 0.7, 0.3], [0.0, 1.0, 0.0]])
    assert float(count_correct(loss_fn, logits, labels)) == 2
    assert float(count_correct(loss_fn, logits, tf.constant([0, 1, 1]))) == 2


def test_a_label_set_is_right_where_all_its_labels_and_no_others_are_predicted():
    of_sets = create_loss("cross_entropy", multi_label=True)
    logits = tf.constant([[2.0, 1.0, -1.0], [0.1, -1.0, 2.0], [-1.0, -3.0, -1.0]])
    labels = tf.constant([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    assert float(count_correct(of_sets, logits, labels)) == 2
    mixed = tf.constant([[0.7, 0.8, 0.2], [0.6, 0.0, 1.0], [0.6, 0.0, 0.0]])
    assert float(count_correct(of_sets, logits, mixed)) == 2


@pytest.mark.parametrize("is_compiled", [False, True])
def test_with_a_nan_logit_no_label_is_right(is_compiled):
    logits = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    logits[:8] = np.nan
    logits[range(8, 20), np.arange(12) % 3] = np.nan
    labels = np.arange(40) % 3
    sets = (logits > 0) ^ (np.arange(40) % 4 == 0)[:, np.newaxis]
    for loss_fn, targets, right in (
        (create_loss("cross_entropy"), labels, logits.argmax(1) == labels),
        (
            create_loss("cross_entropy", multi_label=True),
            np.float32(sets),
            ((logits >= 0) == sets).all(1),
        ),
    ):
        count = tf.function(partial(count_correct, loss_fn), jit_compile=is_compiled)
        has_nan = np.isnan(logits).any(1)
        assert (right & has_nan).any()
        assert float(count(logits, targets)) == (right & ~has_nan).sum() > 0
