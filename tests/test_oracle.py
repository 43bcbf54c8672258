"""The oracle against TensorFlow's operations, finite differences and literals.

Its optimizers, clipping and averages are compared with Keras' and TensorFlow's by way
of the trainer's, in test_optimizers.py.
"""

import functools
import itertools
import math

import numpy as np
import pytest
import tensorflow as tf
from engines import oracle
from engines import oracle_layers as layers
from engines.oracle import layer


def generator():
    return np.random.default_rng(7)


def random_normal(*shape):
    return generator().normal(size=shape)


def central_differences(function, array, step=1e-5):
    """The gradient of `function()`, which reads `array`, by changing it in place."""
    gradient = np.zeros_like(array)
    for index in np.ndindex(array.shape):
        kept = array[index]
        array[index] = kept + step
        above = function()
        array[index] = kept - step
        below = function()
        array[index] = kept
        gradient[index] = (above - below) / (2 * step)
    return gradient


# Layers.


def conv(x, kernel, bias=0.0, *, stride=1, padding="same", groups=1):
    pairs = zip(tf.split(x, groups, -1), tf.split(kernel, groups, -1), strict=True)
    parts = [tf.nn.conv2d(a, b, stride, padding.upper()) for a, b in pairs]
    return tf.concat(parts, -1) + bias


def pool(function, x, *, size, stride, padding="same"):
    return function(x, size, stride, padding.upper())


def local_response_norm(x, *, depth_radius, bias, alpha, beta, groups=1):
    """`tf.nn.local_response_normalization` is for float32 alone."""
    outputs = []
    for part in tf.split(x, groups, -1):
        channel = np.arange(part.shape[-1])
        band = np.abs(channel[:, None] - channel) <= depth_radius
        scale = bias + alpha * tf.square(part) @ band.astype(np.float64)
        outputs.append(part / scale**beta)
    return tf.concat(outputs, -1)


def batch_norm(x, gamma, beta, **_):
    mean, variance = tf.nn.moments(x, range(len(x.shape) - 1))
    return tf.nn.batch_normalization(x, mean, variance, beta, gamma, 1e-3)


OF_TENSORFLOW = {
    "conv": conv,
    "dense": lambda x, kernel, bias: x @ kernel + bias,
    "relu": tf.nn.relu,
    "gelu": lambda x: 0.5 * x * (1 + tf.math.erf(x / math.sqrt(2))),
    "pad": lambda x, rows, columns, channels: tf.pad(
        x, [(0, 0), rows, columns, channels]
    ),
    "max_pool": functools.partial(pool, tf.nn.max_pool2d),
    "average_pool": functools.partial(pool, tf.nn.avg_pool2d),
    "global_average_pool": lambda x: tf.reduce_mean(x, [1, 2]),
    "global_max_pool": lambda x: tf.reduce_max(x, [1, 2]),
    "flatten": lambda x: tf.reshape(x, [len(x), -1]),
    "add": lambda *xs: tf.add_n(xs),
    "local_response_norm": local_response_norm,
    "batch_norm": batch_norm,
    "dropout": lambda x, noise, rate, training: tf.where(
        noise < rate, 0.0, x / (1 - rate)
    ),
}


def kernel(*shape, bias=False):
    variables = {"kernel": 0.3 * random_normal(*shape)}
    return variables | ({"bias": random_normal(shape[-1])} if bias else {})


NORM = {"gamma": 1.0 + 0.1 * random_normal(4), "beta": random_normal(4)}
MOVING = {
    "moving_mean": 0.1 * random_normal(4),
    "moving_variance": 1.0 + 0.1 * random_normal(4) ** 2,
}
LRN = {"depth_radius": 2, "bias": 1.0, "alpha": 0.3, "beta": 0.75}
X, TRAINING = random_normal(2, 5, 6, 4), MOVING | {"training": True}
# Of equal numbers the first is the largest.
TIES = generator().integers(0, 2, size=(2, 8, 7, 3)).astype(np.float64)
CONVS = itertools.product(
    [(8, 7), (5, 6)], [(1, 1), (2, 2), (5, 5), (4, 3)], [1, 2], ["same", "valid"]
)
POOLS = itertools.product(
    ["max_pool", "average_pool"], [X, TIES], [2, 3], [1, 2, 3], ["same", "valid"]
)
# (layer, inputs, variables, options)
CASES = [
    *(
        (
            "conv",
            [random_normal(2, *size, 4)],
            kernel(*window, 4, 3),
            {"stride": n, "padding": pad},
        )
        for size, window, n, pad in CONVS
    ),
    ("conv", [X], kernel(3, 3, 2, 6, bias=True), {"groups": 2}),
    ("conv", [X], kernel(3, 3, 1, 8, bias=True), {"groups": 4, "stride": 2}),
    ("dense", [random_normal(5, 7)], kernel(7, 3, bias=True), {}),
    ("relu", [X], {}, {}),
    *(
        (name, [x], {}, {"size": size, "stride": stride, "padding": pad})
        for name, x, size, stride, pad in POOLS
    ),
    ("global_average_pool", [X], {}, {}),
    ("global_max_pool", [X], {}, {}),
    ("flatten", [X], {}, {}),
    ("add", [X, X**2, 2.0 * X], {}, {}),
    ("gelu", [2.0 * X], {}, {}),
    ("pad", [X], {}, {"rows": (1, 2), "columns": (0, 1), "channels": (2, 1)}),
    ("local_response_norm", [X], {}, LRN),
    ("local_response_norm", [X], {}, LRN | {"groups": 2}),
    ("batch_norm", [X], NORM, TRAINING),
    ("batch_norm", [random_normal(6, 4)], NORM, TRAINING),
    (
        "dropout",
        [X],
        {},
        {"noise": generator().random(X.shape), "rate": 0.4, "training": True},
    ),
]


@pytest.mark.parametrize("name", layers.LAYERS)
def test_layers_and_their_gradients_equal_tensorflow(name):
    cases = [case[1:] for case in CASES if case[0] == name]
    assert cases
    for inputs, variables, options in cases:
        done = layers.LAYERS[name](*inputs, **variables, **options)
        given = [tf.constant(x) for x in (*inputs, *variables.values())]
        with tf.GradientTape() as tape:
            tape.watch(given)
            named = dict(zip(variables, given[len(inputs) :], strict=True))
            theirs = OF_TENSORFLOW[name](*given[: len(inputs)], **named, **options)
        np.testing.assert_allclose(done.output, theirs, rtol=1e-9, atol=1e-12)
        weights = generator().normal(size=done.output.shape)
        expected = tape.gradient(theirs, given, tf.constant(weights))
        of_inputs, of_variables = done.pullback(weights)
        found = [*of_inputs, *(of_variables[key] for key in variables)]
        for ours, gradient in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 5, 4, 4), (6, 4)])
def test_batch_norm_equals_keras(shape):
    theirs = tf.keras.layers.BatchNormalization(momentum=0.9, dtype="float64")
    theirs.build(shape)
    for variable in theirs.weights:
        variable.assign((NORM | MOVING)[variable.name])
    x = random_normal(*shape)
    frozen = layers.batch_norm(x, **NORM, **MOVING, training=False).output
    np.testing.assert_allclose(frozen, theirs(x, training=False), rtol=1e-12)
    done = layers.batch_norm(x, **NORM, **TRAINING, momentum=0.9)
    expected = theirs(x, training=True)
    np.testing.assert_allclose(done.output, expected, rtol=1e-9, atol=1e-12)
    for name in MOVING:
        expected = getattr(theirs, name)
        np.testing.assert_allclose(done.state[name], expected, rtol=1e-12)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_equals_keras_and_its_gradient_tensorflows(label_smoothing):
    logits, labels = 3.0 * random_normal(6, 5), np.array([0, 4, 2, 2, 1, 3])
    ours, of_logits = oracle.cross_entropy(logits, labels, label_smoothing)
    variable = tf.constant(logits)
    with tf.GradientTape() as tape:
        tape.watch(variable)
        theirs = tf.keras.losses.categorical_crossentropy(
            tf.one_hot(labels, 5, dtype=tf.float64),
            variable,
            from_logits=True,
            label_smoothing=label_smoothing,
        )
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    expected = tape.gradient(theirs, variable)
    np.testing.assert_allclose(of_logits, expected, rtol=1e-12, atol=1e-15)


# Whole networks.


def residual_network():
    """Every kind of layer that acts on images, with a branch; 3 classes."""
    network = [
        layer("conv", "conv1", stride=2),
        layer("batch_norm", "norm1", momentum=0.8),
        layer("relu", "relu1"),
        layer("conv", "conv2", groups=2),
        layer("add", "add2", inputs=("relu1", "conv2")),
        layer("local_response_norm", "lrn", **LRN),
        layer("max_pool", "pool", size=3, stride=2),
        layer("flatten", "flat"),
        layer("dropout", "dropout", rate=0.25),
        layer("dense", "logits"),
    ]
    rng = generator()
    shapes = {
        "conv1/kernel": (3, 3, 2, 4),
        "norm1/gamma": (4,),
        "norm1/beta": (4,),
        "conv2/kernel": (3, 3, 2, 4),
        "conv2/bias": (4,),
        "logits/kernel": (16, 3),
        "logits/bias": (3,),
    }
    params = {name: 0.5 * rng.normal(size=shape) for name, shape in shapes.items()}
    params["norm1/gamma"] += 1.0
    state = {"norm1/moving_mean": np.zeros(4), "norm1/moving_variance": np.ones(4)}
    return network, params, state


def random_batch(num_images):
    rng = generator()
    return oracle.Batch(
        rng.normal(size=(num_images, 7, 8, 2)),
        rng.integers(0, 3, size=num_images),
        {"dropout": rng.random((num_images, 16))},
    )


def test_gradient_of_towers_equals_finite_differences():
    """Of every tower's mean loss, weighted by its images, and the weight decay."""
    network, params, state = residual_network()
    batch, decay = random_batch(7), {"conv1/kernel": 0.02, "logits/kernel": 0.3}

    def weighted_mean_loss():
        total = oracle.weight_decay_loss(params, decay)
        for share in (slice(0, 3), slice(3, 5), slice(5, 7)):
            noise = {"dropout": batch.noise["dropout"][share]}
            passed = oracle.forward(network, params, state, batch.images[share], noise)
            losses, _ = oracle.cross_entropy(passed.logits, batch.labels[share], 0.1)
            total += losses.mean() * len(losses) / 7
        return total

    found = oracle.batch_gradients(network, params, state, batch, 3, 0.1)
    gradients = oracle.add_weight_decay(found.gradients, params, decay)
    assert list(gradients) == list(params)
    for name, array in params.items():
        numeric = central_differences(weighted_mean_loss, array)
        np.testing.assert_allclose(
            gradients[name], numeric, rtol=1e-6, atol=1e-8, err_msg=name
        )


def test_out_of_training_there_is_no_dropout_and_the_state_stays():
    network, params, state = residual_network()
    images = random_normal(3, 7, 8, 2)
    whole = oracle.forward(network, params, state, images, training=False)
    alone = oracle.forward(network, params, state, images[:1], training=False)
    np.testing.assert_allclose(whole.logits[:1], alone.logits, rtol=1e-12)
    assert whole.state == state


def test_micro_batches_of_towers_chain_the_states_of_batch_norm_in_literals():
    network = [
        layer("batch_norm", "norm", momentum=0.5),
        layer("flatten", "flat"),
        layer("dense", "logits"),
    ]
    params = {
        "norm/gamma": np.ones(1),
        "norm/beta": np.zeros(1),
        "logits/kernel": np.array([[1.0, -1.0]]),
    }
    state = {"norm/moving_mean": np.zeros(1), "norm/moving_variance": np.ones(1)}
    # Two micro-batches of five images on two towers: (1, 2, 3), (4, 5); (3, 5, 7),
    # (8, 10).
    images = np.array([1.0, 2, 3, 4, 5, 3, 5, 7, 8, 10]).reshape(10, 1, 1, 1)
    labels = np.array([0, 1, 0, 1, 0, 0, 0, 1, 1, 0])
    options = {"learning_rate": 0.0, "num_towers": 2, "accumulate_steps": 2}
    result = oracle.train(network, params, state, [(images, labels)], **options)
    # Tower 1 has means 2 and 5 and variances 2/3 and 8/3, tower 2 means 4.5 and 9 and
    # variances 1/4 and 1.
    means = (0.25 * 2 + 0.5 * 5, 0.25 * 4.5 + 0.5 * 9)
    variances = (0.25 + 0.25 * 2 / 3 + 0.5 * 8 / 3, 0.25 + 0.25 / 4 + 0.5)
    for name, (one, two) in (("mean", means), ("variance", variances)):
        found = result.state[f"norm/moving_{name}"]
        assert found == pytest.approx((3 * one + 2 * two) / 5)
    # Tower 2 sees 4 and 5 at -+ 0.5 / sqrt(0.251), then 8 and 10 at -+ 1 / sqrt(1.001).
    [report] = result.reports
    assert report.tower_images == [6, 4]
    margins = (2 * 0.5 / math.sqrt(0.25 + 1e-3), 2 * 1 / math.sqrt(1 + 1e-3))
    expected = np.mean([math.log1p(math.exp(-margin)) for margin in margins])
    assert report.tower_losses[1] == pytest.approx(expected)
    assert report.loss == pytest.approx(
        (3 * report.tower_losses[0] + 2 * report.tower_losses[1]) / 5
    )


# The update, in literal numbers.


def test_two_steps_in_literals():
    """With images of zeros the cross-entropy has no gradient by the kernel, so with
    weight decay 1 the gradient is the kernel itself."""
    network = [layer("flatten", "flat"), layer("dense", "logits")]
    given = {"logits/kernel": np.array([[1.0, -1.0]])}
    batch = (np.zeros((2, 1, 1, 1)), np.array([0, 1]))
    result = oracle.train(
        network,
        given,
        {},
        2 * [batch],
        optimizer="momentum",
        momentum=0.5,
        learning_rate=oracle.staircase(0.1, 0.1, num_examples=2, epochs_per_decay=1),
        weight_decay={"logits/kernel": 1.0},
        clip_norm=math.sqrt(2) / 2,
        ema_decay=0.15,
    )
    # The joint norm of the decay is sqrt(2), so it is halved: v = 0.5, 1 - 0.1 * 0.5;
    # then 0.95 is clipped to 0.5, v = 0.25 + 0.5, 0.95 - 0.01 * 0.75.
    kernel = result.params["logits/kernel"]
    np.testing.assert_allclose(kernel, [[0.9425, -0.9425]], rtol=1e-14)
    velocity = result.slots["velocity"]["logits/kernel"]
    np.testing.assert_allclose(velocity, [[0.75, -0.75]], rtol=1e-14)
    # Decays 1/10, then the bound.
    average = 0.15 * (0.1 * 1 + 0.9 * 0.95) + 0.85 * 0.9425
    found = result.averages["logits/kernel"][0, 0]
    assert found == pytest.approx(average, rel=1e-14)
    steps = zip(result.reports, [0.1, 0.01], [1, 0.95], strict=True)
    for report, rate, before in steps:
        assert report.learning_rate == pytest.approx(rate)
        assert report.loss == pytest.approx(math.log(2))
        assert report.total_loss == pytest.approx(math.log(2) + before**2)
        assert report.gradient_norm == pytest.approx(math.sqrt(2) * before)
        assert report.accuracy == 0.5
    assert given["logits/kernel"].tolist() == [[1, -1]]


def test_a_step_of_lars_in_literals():
    # |w| = 5 and |g| = 10; with decay 1 the local rate is 0.3 * 5 / (10 + 5) = 0.1.
    params = {"k": np.array([[3.0, 4.0]]), "b": np.array([3.0]), "z": np.zeros((1, 1))}
    gradients = {
        "k": np.array([[6.0, 8.0]]),
        "b": np.array([8.0]),
        "z": np.ones((1, 1)),
    }
    slots = {"velocity": {name: np.zeros_like(p) for name, p in params.items()}}
    found, slots = oracle.lars(
        params, gradients, slots, 0.5, decay={"k": 1.0}, trust_coefficient=0.3
    )
    np.testing.assert_allclose(slots["velocity"]["k"], [[0.9, 1.2]], rtol=1e-14)
    np.testing.assert_allclose(found["k"], [[2.55, 3.4]], rtol=1e-14)
    assert (found["b"], found["z"]) == (-1.0, -0.5)
