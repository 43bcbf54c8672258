"""Updates against Keras' optimizers, TensorFlow's clipping and NumPy in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.optimizers import (
    OPTIMIZERS,
    Update,
    clip_by_global_norm,
    create_optimizer,
    moving_average,
)

SHAPES = [(4, 3), (3,), ()]
NUM_STEPS = 6

# Name and momentum, and whether Keras calls it Nesterov's.
CASES = [("sgd", 0.0, False), ("sgd", 0.9, False), ("nesterov", 0.9, True)]


def random_arrays(seed, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in SHAPES]


def zero_slots(optimizer, params):
    return [{name: tf.zeros_like(p) for name in optimizer.slots} for p in params]


def global_norm(arrays):
    return np.sqrt(sum(np.sum(np.square(a)) for a in arrays))


def run(update, dtype=tf.float64, num_steps=NUM_STEPS):
    """Params, slots and averages after some steps with random gradients."""
    params = [tf.constant(p, dtype) for p in random_arrays(0)]
    slots = zero_slots(update.optimizer, params)
    averages = list(params) if update.ema_decay else []
    for step in range(num_steps):
        gradients = [tf.constant(g, dtype) for g in random_arrays(100 + step)]
        norm = tf.linalg.global_norm(gradients)
        params, slots, averages = update(
            tf.constant(step, tf.int64), norm, params, slots, averages, gradients
        )
    return params, slots, averages


def constant_rate(step):
    return tf.constant(0.125, tf.float64)


def falling_rate(step):
    return tf.constant(0.5, tf.float64) ** tf.cast(step, tf.float64)


def test_every_optimizer_is_tested():
    assert {name for name, _, _ in CASES} == set(OPTIMIZERS)


@pytest.mark.parametrize("name,momentum,is_nesterov", CASES)
def test_at_a_constant_rate_the_params_are_those_of_keras(name, momentum, is_nesterov):
    variables = [
        keras.Variable(p.astype(np.float32), dtype="float32") for p in random_arrays(0)
    ]
    optimizer = keras.optimizers.SGD(0.125, momentum, nesterov=is_nesterov)
    for step in range(NUM_STEPS):
        gradients = [tf.constant(g, tf.float32) for g in random_arrays(100 + step)]
        optimizer.apply(gradients, variables)

    ours = create_optimizer(name, momentum=momentum)
    params, _, _ = run(Update(ours, constant_rate), tf.float32)
    for param, variable in zip(params, variables, strict=True):
        np.testing.assert_allclose(param, variable.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name,momentum,is_nesterov", CASES)
def test_under_a_schedule_the_rate_stays_outside_the_velocity(
    name, momentum, is_nesterov
):
    params, velocity = random_arrays(0), [np.zeros(shape) for shape in SHAPES]
    for step in range(NUM_STEPS):
        gradients = random_arrays(100 + step)
        for i, gradient in enumerate(gradients):
            velocity[i] = momentum * velocity[i] + gradient
            ahead = gradient + momentum * velocity[i] if is_nesterov else velocity[i]
            params[i] = params[i] - 0.5**step * ahead

    optimizer = create_optimizer(name, momentum=momentum)
    found, slots, averages = run(Update(optimizer, falling_rate))
    for param, expected in zip(found, params, strict=True):
        np.testing.assert_allclose(param, expected, rtol=1e-12, atol=1e-12)
    assert averages == []
    for slot, expected in zip(slots, velocity, strict=True):
        assert set(slot) == ({"velocity"} if momentum else set())
        if momentum:
            np.testing.assert_allclose(slot["velocity"], expected, rtol=1e-12)


@pytest.mark.parametrize("name,momentum,is_nesterov", CASES)
def test_elementwise_means_that_a_slice_can_be_updated_alone(
    name, momentum, is_nesterov
):
    optimizer = create_optimizer(name, momentum=momentum)
    assert optimizer.elementwise
    rng = np.random.default_rng(0)
    param, gradient, velocity = (tf.constant(rng.normal(size=(6, 4))) for _ in range(3))
    slots = {slot: velocity for slot in optimizer.slots}
    rate = tf.constant(0.1, tf.float64)
    whole, whole_slots = optimizer.update(param, slots, gradient, rate)
    part, part_slots = optimizer.update(
        param[2:5], {k: v[2:5] for k, v in slots.items()}, gradient[2:5], rate
    )
    np.testing.assert_array_equal(part, whole[2:5])
    for slot, value in part_slots.items():
        np.testing.assert_array_equal(value, whole_slots[slot][2:5])


# Clipping.


@pytest.mark.parametrize("clip_norm", [0.5, 3.0, 1000.0])
def test_clipping_equals_that_of_tensorflow(clip_norm):
    gradients = [tf.constant(g) for g in random_arrays(1)]
    expected, norm = tf.clip_by_global_norm(gradients, clip_norm)
    np.testing.assert_allclose(norm, global_norm(random_arrays(1)))
    found = clip_by_global_norm(gradients, norm, clip_norm)
    for clipped, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(clipped, wanted, rtol=1e-12)
    assert global_norm(found) == pytest.approx(min(clip_norm, float(norm)))


def test_a_clip_norm_of_zero_leaves_the_gradients_alone():
    gradients = [tf.constant(1e3 * g) for g in random_arrays(1)]
    found = clip_by_global_norm(gradients, tf.constant(1e9, tf.float64), 0)
    for clipped, gradient in zip(found, gradients, strict=True):
        np.testing.assert_array_equal(clipped, gradient)


def test_gradients_of_zero_are_not_divided_by_their_norm():
    (found,) = clip_by_global_norm([tf.zeros(3)], tf.constant(0.0), 1.0)
    np.testing.assert_array_equal(found, 0)


def test_the_norm_of_the_whole_clips_a_shard():
    """The norm is given, since a shard does not know those of the others."""
    (found,) = clip_by_global_norm([tf.constant([3.0])], tf.constant(5.0), 1.0)
    np.testing.assert_allclose(found, [0.6], rtol=1e-6)


# Moving averages.


@pytest.mark.parametrize("ema_decay", [0.3, 0.9999])
def test_averages_follow_the_tutorials_ramp(ema_decay):
    """The published rule: min(decay, (1 + n) / (10 + n)), n = 0 for the first step."""
    average, found = 1.0, tf.constant(1.0, tf.float64)
    for step in range(50):
        param = float(np.sin(step))
        decay = min(ema_decay, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * param
        found = moving_average(
            found,
            tf.constant(param, tf.float64),
            tf.constant(step, tf.int64),
            ema_decay,
        )
        assert float(found) == pytest.approx(average, rel=1e-12)


def test_averages_equal_those_of_tensorflow():
    variable, steps = tf.Variable(1.0), tf.Variable(0.0)
    theirs = tf.train.ExponentialMovingAverage(0.7, num_updates=steps)
    theirs.apply([variable])  # begins with the variable's value
    ours = tf.constant(1.0)
    for step in range(30):
        variable.assign(float(np.cos(step)))
        steps.assign(step)
        theirs.apply([variable])
        step = tf.constant(step, tf.int64)
        ours = moving_average(ours, variable.value(), step, 0.7)
        np.testing.assert_allclose(ours, theirs.average(variable), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", [2**24, 2**31, 2**40])
def test_late_steps_use_the_decay_itself(step):
    found = moving_average(
        tf.constant(1.0, tf.float64),
        tf.constant(0.0, tf.float64),
        tf.constant(step, tf.int64),
        0.9999,
    )
    assert float(found) == pytest.approx(0.9999, abs=1e-15)


# All of it together.


def test_an_update_clips_then_moves_then_averages():
    params, velocity = random_arrays(0), [np.zeros(shape) for shape in SHAPES]
    averages = random_arrays(0)
    for step in range(NUM_STEPS):
        gradients = random_arrays(100 + step)
        scale = min(1, 1.5 / global_norm(gradients))
        assert scale < 1
        decay = min(0.9, (1 + step) / (10 + step))
        for i, gradient in enumerate(gradients):
            velocity[i] = 0.9 * velocity[i] + scale * gradient
            params[i] = params[i] - 0.5**step * velocity[i]
            averages[i] = decay * averages[i] + (1 - decay) * params[i]

    optimizer = create_optimizer("sgd", momentum=0.9)
    found = run(Update(optimizer, falling_rate, clip_norm=1.5, ema_decay=0.9))
    for values, expected in zip(
        [found[0], [s["velocity"] for s in found[1]], found[2]],
        [params, velocity, averages],
        strict=True,
    ):
        for value, wanted in zip(values, expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12)


def test_an_update_keeps_the_dtype_of_the_params():
    for dtype in (tf.float32, tf.float64):
        optimizer = create_optimizer("nesterov", momentum=0.9)
        params, slots, averages = run(
            Update(optimizer, falling_rate, clip_norm=1.0, ema_decay=0.9), dtype, 1
        )
        slots = [slot["velocity"] for slot in slots]
        assert {x.dtype for x in params + slots + averages} == {dtype}


def test_an_update_creates_no_variable():
    created = []

    def creator(next_creator, **kwargs):
        created.append(kwargs.get("name"))
        return next_creator(**kwargs)

    optimizer = create_optimizer("nesterov", momentum=0.9)
    update = Update(optimizer, falling_rate, clip_norm=1.0, ema_decay=0.9)
    with tf.variable_creator_scope(creator):
        run(update, num_steps=1)
    assert created == []
