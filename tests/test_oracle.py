"""The oracle against finite differences, TensorFlow's operations and literals."""

import math

import numpy as np
import oracle
import oracle_layers as layers
import pytest
import tensorflow as tf
from oracle import layer


def generator():
    return np.random.default_rng(7)


def random_normal(*shape):
    return generator().normal(size=shape)


def away_from_zero(*shape):
    """Distinct values with gaps, so that a finite difference crosses no kink."""
    count = math.prod(shape)
    values = (generator().permutation(count) - count / 2 + 0.25) * 0.05
    return values.reshape(shape)


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


KERNEL = 0.3 * random_normal(3, 3, 4, 6)
NORM = {
    "gamma": 1.0 + 0.1 * random_normal(4),
    "beta": random_normal(4),
    "moving_mean": 0.1 * random_normal(4),
    "moving_variance": 1.0 + 0.1 * random_normal(4) ** 2,
}
LRN = {"depth_radius": 2, "bias": 1.0, "alpha": 0.3, "beta": 0.75}
X = random_normal(2, 5, 6, 4)
DISTINCT = away_from_zero(2, 5, 6, 4)

# name: (layer, inputs, variables that have a gradient, everything else)
GRADIENT_CASES = {
    "conv": (layers.conv, [X], {"kernel": KERNEL, "bias": random_normal(6)}, {}),
    "conv_stride_2": (layers.conv, [X], {"kernel": KERNEL}, {"stride": 2}),
    "conv_even_kernel": (
        layers.conv,
        [X],
        {"kernel": random_normal(2, 4, 4, 3)},
        {"stride": 2},
    ),
    "conv_valid_stride_2": (
        layers.conv,
        [X],
        {"kernel": KERNEL},
        {"stride": 2, "padding": "valid"},
    ),
    "conv_1x1_stride_2": (
        layers.conv,
        [X],
        {"kernel": random_normal(1, 1, 4, 3)},
        {"stride": 2},
    ),
    "conv_groups": (
        layers.conv,
        [X],
        {"kernel": random_normal(3, 3, 2, 6), "bias": random_normal(6)},
        {"groups": 2},
    ),
    "conv_depthwise": (
        layers.conv,
        [X],
        {"kernel": random_normal(3, 3, 1, 8)},
        {"groups": 4, "stride": 2},
    ),
    "dense": (
        layers.dense,
        [random_normal(5, 7)],
        {"kernel": random_normal(7, 3), "bias": random_normal(3)},
        {},
    ),
    "relu": (layers.relu, [DISTINCT], {}, {}),
    "max_pool_same": (layers.max_pool, [DISTINCT], {}, {"size": 3, "stride": 2}),
    "max_pool_valid": (
        layers.max_pool,
        [DISTINCT],
        {},
        {"size": 2, "stride": 2, "padding": "valid"},
    ),
    "average_pool_same": (layers.average_pool, [X], {}, {"size": 3, "stride": 2}),
    "average_pool_valid": (
        layers.average_pool,
        [X],
        {},
        {"size": 3, "stride": 1, "padding": "valid"},
    ),
    "global_average_pool": (layers.global_average_pool, [X], {}, {}),
    "global_max_pool": (layers.global_max_pool, [DISTINCT], {}, {}),
    "flatten": (layers.flatten, [X], {}, {}),
    "add": (layers.add, [X, DISTINCT, 2.0 * X], {}, {}),
    "gelu": (layers.gelu, [2.0 * X], {}, {}),
    "pad": (
        layers.pad,
        [X],
        {},
        {"rows": (1, 2), "columns": (0, 1), "channels": (2, 1)},
    ),
    "local_response_norm": (layers.local_response_norm, [X], {}, LRN),
    "local_response_norm_groups": (
        layers.local_response_norm,
        [X],
        {},
        {**LRN, "groups": 2},
    ),
    "batch_norm": (
        layers.batch_norm,
        [X],
        {name: NORM[name] for name in ("gamma", "beta")},
        {**NORM, "training": True},
    ),
    "batch_norm_after_dense": (
        layers.batch_norm,
        [random_normal(6, 4)],
        {name: NORM[name] for name in ("gamma", "beta")},
        {**NORM, "training": True},
    ),
    "dropout": (
        layers.dropout,
        [X],
        {},
        {"noise": generator().random(X.shape), "training": True, "rate": 0.4},
    ),
}


def test_every_layer_has_a_gradient_case():
    tested = {case[0] for case in GRADIENT_CASES.values()}
    assert tested == set(layers.LAYERS.values())


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradient_equals_finite_differences(name):
    function, inputs, variables, rest = GRADIENT_CASES[name]
    inputs = [array.copy() for array in inputs]
    variables = {key: array.copy() for key, array in variables.items()}
    done = function(*inputs, **{**rest, **variables})
    weights = generator().normal(size=done.output.shape)

    def weighted_sum():
        output = function(*inputs, **{**rest, **variables}).output
        return float((output * weights).sum())

    of_inputs, of_variables = done.pullback(weights)
    assert len(of_inputs) == len(inputs) and set(of_variables) == set(variables)
    pairs = [*zip(of_inputs, inputs, strict=True)]
    pairs += [(of_variables[key], variables[key]) for key in variables]
    for analytic, array in pairs:
        assert analytic.shape == array.shape
        numeric = central_differences(weighted_sum, array)
        np.testing.assert_allclose(analytic, numeric, rtol=1e-6, atol=1e-7)


# Forward, against TensorFlow's own operations.


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("window", [(1, 1), (2, 2), (3, 3), (5, 5), (4, 3)])
@pytest.mark.parametrize("size", [(8, 7), (5, 6)])
def test_conv_equals_tensorflow(size, window, stride, padding):
    x, kernel = random_normal(2, *size, 3), random_normal(*window, 3, 5)
    ours = layers.conv(x, kernel, stride=stride, padding=padding).output
    theirs = tf.nn.conv2d(x, kernel, stride, padding.upper())
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_grouped_conv_equals_one_convolution_per_block():
    kernel = random_normal(3, 3, 2, 6)
    ours = layers.conv(X, kernel, stride=2, groups=2).output
    theirs = tf.concat(
        [
            tf.nn.conv2d(X[..., :2], kernel[..., :3], 2, "SAME"),
            tf.nn.conv2d(X[..., 2:], kernel[..., 3:], 2, "SAME"),
        ],
        axis=-1,
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize(("size", "stride"), [(2, 2), (3, 2), (3, 1), (2, 1), (3, 3)])
def test_pools_equal_tensorflow(size, stride, padding):
    options = {"size": size, "stride": stride, "padding": padding}
    for x in (X, random_normal(2, 8, 7, 3)):
        tensor = tf.constant(x)  # the pools take an array for float32
        theirs = tf.nn.max_pool2d(tensor, size, stride, padding.upper())
        np.testing.assert_array_equal(layers.max_pool(x, **options).output, theirs)
        theirs = tf.nn.avg_pool2d(tensor, size, stride, padding.upper())
        ours = layers.average_pool(x, **options).output
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_first_maximum_takes_the_gradient_as_in_tensorflow(padding):
    x = generator().integers(0, 2, size=(4, 8, 7, 3)).astype(np.float64)
    done = layers.max_pool(x, size=3, stride=2, padding=padding)
    gradient = random_normal(*done.output.shape)
    variable = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(variable)
        pooled = tf.nn.max_pool2d(variable, 3, 2, padding.upper())
    theirs = tape.gradient(pooled, variable, output_gradients=tf.constant(gradient))
    (ours,), _ = done.pullback(gradient)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


def test_local_response_norm_equals_tensorflow():
    x = random_normal(2, 4, 4, 12)
    options = {"depth_radius": 4, "bias": 1.0, "alpha": 0.001 / 9.0, "beta": 0.75}
    for changed in (options, {**options, "depth_radius": 2, "bias": 2.0, "alpha": 0.3}):
        ours = layers.local_response_norm(x, **changed).output
        theirs = tf.nn.local_response_normalization(x.astype(np.float32), **changed)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_local_response_norm_in_groups_is_that_of_each_block():
    ours = layers.local_response_norm(X, **LRN, groups=2).output
    for block in (slice(0, 2), slice(2, 4)):
        theirs = layers.local_response_norm(X[..., block], **LRN).output
        np.testing.assert_array_equal(ours[..., block], theirs)


def test_gelu_and_pad_equal_tensorflow():
    # TensorFlow's constant is rounded to float32.
    np.testing.assert_allclose(layers.gelu(X).output, tf.nn.gelu(X), rtol=1e-6)
    ours = layers.pad(X, rows=(1, 0), columns=(2, 1), channels=(0, 3)).output
    np.testing.assert_array_equal(ours, tf.pad(X, [(0, 0), (1, 0), (2, 1), (0, 3)]))


@pytest.mark.parametrize("shape", [(3, 5, 4, 4), (6, 4)])
def test_batch_norm_equals_keras(shape):
    theirs = tf.keras.layers.BatchNormalization(momentum=0.9, dtype="float64")
    theirs.build(shape)
    for variable in theirs.weights:
        variable.assign(NORM[variable.name])
    x = random_normal(*shape)
    frozen = layers.batch_norm(x, **NORM, training=False).output
    np.testing.assert_allclose(frozen, theirs(x, training=False), rtol=1e-12)
    done = layers.batch_norm(x, **NORM, training=True, momentum=0.9)
    expected = theirs(x, training=True)
    np.testing.assert_allclose(done.output, expected, rtol=1e-9, atol=1e-12)
    for name in ("moving_mean", "moving_variance"):
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


def test_cross_entropy_stays_finite_for_large_logits():
    losses, of_logits = oracle.cross_entropy(np.array([[1e4, 0.0]]), np.array([1]))
    assert losses == 1e4
    np.testing.assert_array_equal(of_logits, [[1.0, -1.0]])


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


def plain_network():
    """The same network without batch normalisation."""
    network, params, _ = residual_network()
    network = [node for node in network if node.kind != "batch_norm"]
    return network, {k: v for k, v in params.items() if not k.startswith("norm1")}, {}


def random_batches(num_images, num_batches):
    rng = generator()
    return [
        oracle.Batch(
            rng.normal(size=(num_images, 7, 8, 2)),
            rng.integers(0, 3, size=num_images),
            {"dropout": rng.random((num_images, 16))},
        )
        for _ in range(num_batches)
    ]


def assert_same_arrays(found, expected, rtol=0.0, atol=1e-12):
    assert list(found) == list(expected)
    for name in expected:
        np.testing.assert_allclose(
            found[name], expected[name], rtol=rtol, atol=atol, err_msg=name
        )


@pytest.mark.parametrize("num_towers", [1, 3])
def test_gradient_of_a_network_equals_finite_differences(num_towers):
    network, params, state = residual_network()
    (batch,) = random_batches(7, 1)
    decay = {"conv1/kernel": 0.02, "logits/kernel": 0.3}

    def weighted_mean_loss():
        """Spelled out: every tower's mean loss, weighted by its images."""
        total = oracle.weight_decay_loss(params, decay)
        for share in oracle.shares(7, num_towers):
            noise = {"dropout": batch.noise["dropout"][share]}
            passed = oracle.forward(network, params, state, batch.images[share], noise)
            losses, _ = oracle.cross_entropy(passed.logits, batch.labels[share], 0.1)
            total += losses.mean() * len(losses) / 7
        return total

    found = oracle.batch_gradients(network, params, state, batch, num_towers, 0.1)
    gradients = oracle.add_weight_decay(found.gradients, params, decay)
    assert list(gradients) == list(params)
    for name, array in params.items():
        numeric = central_differences(weighted_mean_loss, array)
        np.testing.assert_allclose(
            gradients[name], numeric, rtol=1e-6, atol=1e-8, err_msg=name
        )


def test_whole_network_equals_tensorflows_gradients():
    network, params, _ = plain_network()
    (batch,) = random_batches(6, 1)
    variables = {name: tf.constant(array) for name, array in params.items()}
    channel = np.arange(4)
    band = (np.abs(channel[:, None] - channel) <= 2).astype(np.float64)
    with tf.GradientTape() as tape:
        tape.watch(variables)
        x = tf.nn.relu(tf.nn.conv2d(batch.images, variables["conv1/kernel"], 2, "SAME"))
        blocks = zip(
            tf.split(x, 2, -1), tf.split(variables["conv2/kernel"], 2, -1), strict=True
        )
        y = tf.concat([tf.nn.conv2d(a, k, 1, "SAME") for a, k in blocks], -1)
        x = x + y + variables["conv2/bias"]
        x = x / (1.0 + 0.3 * tf.square(x) @ band) ** 0.75
        x = tf.reshape(tf.nn.max_pool2d(x, 3, 2, "SAME"), [6, -1])
        x = x * (batch.noise["dropout"] >= 0.25) / 0.75
        logits = x @ variables["logits/kernel"] + variables["logits/bias"]
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(batch.labels, logits)
        )
    expected = tape.gradient(loss, variables)
    found = oracle.loss_and_gradients(
        network, params, {}, batch.images, batch.labels, noise=batch.noise
    )
    assert found.loss == pytest.approx(float(loss), rel=1e-12)
    assert found.accuracy == np.mean(np.argmax(logits, axis=1) == batch.labels)
    assert_same_arrays(found.gradients, {name: expected[name] for name in params})


def test_out_of_training_there_is_no_dropout_and_the_state_stays():
    network, params, state = residual_network()
    images = random_normal(3, 7, 8, 2)
    whole = oracle.forward(network, params, state, images, training=False)
    alone = oracle.forward(network, params, state, images[:1], training=False)
    np.testing.assert_allclose(whole.logits[:1], alone.logits, rtol=1e-12)
    assert_same_arrays(whole.state, state, atol=0.0)


# Towers.


def test_shares_are_contiguous_and_the_first_ones_are_larger():
    assert oracle.shares(7, 3) == [slice(0, 3), slice(3, 5), slice(5, 7)]
    assert oracle.shares(8, 4) == [slice(i, i + 2) for i in (0, 2, 4, 6)]
    assert oracle.shares(5, 1) == [slice(0, 5)]
    with pytest.raises(ValueError, match="3 images .* 4 towers"):
        oracle.shares(3, 4)


def test_uneven_towers_equal_one_device_without_batch_norm():
    network, params, state = plain_network()
    (batch,) = random_batches(7, 1)
    whole = oracle.batch_gradients(network, params, state, batch)
    towers = oracle.tower_gradients(network, params, state, batch, 3)
    assert [len(tower.image_losses) for tower in towers] == [3, 2, 2]
    mean = oracle.average_towers(towers)
    assert_same_arrays(mean.gradients, whole.gradients)
    assert mean.loss == pytest.approx(whole.loss, rel=1e-12)
    assert mean.accuracy == pytest.approx(whole.accuracy, rel=1e-12)
    unweighted = np.mean([tower.loss for tower in towers])
    assert abs(unweighted - whole.loss) > 1e-4


def network_of_one_norm():
    """Normalises one number; the logits are it and its negative."""
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
    return network, params, state


def test_local_batch_norm_state_is_the_image_weighted_mean_in_literals():
    network, params, state = network_of_one_norm()
    images = np.array([1.0, 2.0, 3.0, 4.0, 5.0]).reshape(5, 1, 1, 1)
    labels = np.array([0, 1, 0, 1, 0])
    result = oracle.train(
        network, params, state, [(images, labels)], learning_rate=0.0, num_towers=2
    )
    # Towers see 1, 2, 3 (mean 2, variance 2/3) and 4, 5 (mean 4.5, variance 1/4); their
    # states become (1, 5/6) and (2.25, 0.625).
    assert result.state["norm/moving_mean"] == pytest.approx((3 * 1 + 2 * 2.25) / 5)
    assert result.state["norm/moving_variance"] == pytest.approx(0.75)
    # Tower 2 normalises 4 and 5 to -+ 0.5 / sqrt(0.251); its logits differ by twice
    # that, and its labels 1 and 0 are the right ones.
    margin = 2 * 0.5 / math.sqrt(0.25 + 1e-3)
    report = result.reports[0]
    assert report.tower_images == [3, 2]
    assert report.tower_losses[1] == pytest.approx(math.log1p(math.exp(-margin)))
    assert report.loss == pytest.approx(
        (3 * report.tower_losses[0] + 2 * report.tower_losses[1]) / 5
    )


def test_micro_batches_chain_the_states_of_local_batch_norm_in_literals():
    network, params, state = network_of_one_norm()
    # Two micro-batches of five images on two towers: (1, 2, 3), (4, 5); (3, 5, 7),
    # (8, 10).
    images = np.array([1.0, 2, 3, 4, 5, 3, 5, 7, 8, 10]).reshape(10, 1, 1, 1)
    labels = np.array([0, 1, 0, 1, 0, 0, 0, 1, 1, 0])
    result = oracle.train(
        network,
        params,
        state,
        [(images, labels)],
        learning_rate=0.0,
        num_towers=2,
        accumulate_steps=2,
    )
    # Tower 1 has means 2 and 5 and variances 2/3 and 8/3, tower 2 means 4.5 and 9 and
    # variances 1/4 and 1.
    means = (0.25 * 2 + 0.5 * 5, 0.25 * 4.5 + 0.5 * 9)
    variances = (0.25 + 0.25 * 2 / 3 + 0.5 * 8 / 3, 0.25 + 0.25 / 4 + 0.5)
    for name, (one, two) in (("mean", means), ("variance", variances)):
        found = result.state[f"norm/moving_{name}"]
        assert found == pytest.approx((3 * one + 2 * two) / 5)
    # Tower 2 sees 4 and 5 at -+ 0.5 / sqrt(0.251), then 8 and 10 at -+ 1 / sqrt(1.001).
    report = result.reports[0]
    assert report.tower_images == [6, 4]
    margins = (2 * 0.5 / math.sqrt(0.25 + 1e-3), 2 * 1 / math.sqrt(1 + 1e-3))
    expected = np.mean([math.log1p(math.exp(-margin)) for margin in margins])
    assert report.tower_losses[1] == pytest.approx(expected)
    assert report.loss == pytest.approx(
        (3 * report.tower_losses[0] + 2 * report.tower_losses[1]) / 5
    )


def test_gradient_of_micro_batches_is_the_mean_of_each_by_itself():
    network, params, state = residual_network()
    first, second = random_batches(4, 2)
    both = oracle.Batch(
        np.concatenate([first.images, second.images]),
        np.concatenate([first.labels, second.labels]),
        {k: np.concatenate([v, second.noise[k]]) for k, v in first.noise.items()},
    )
    found = oracle.batch_gradients(
        network, params, state, both, num_towers=2, accumulate_steps=2
    )
    halves = [
        oracle.batch_gradients(network, params, state, batch, num_towers=2)
        for batch in (first, second)
    ]
    mean = {
        name: (halves[0].gradients[name] + halves[1].gradients[name]) / 2
        for name in params
    }
    assert_same_arrays(found.gradients, mean)
    whole = oracle.batch_gradients(network, params, state, both, num_towers=2)
    difference = whole.gradients["conv1/kernel"] - mean["conv1/kernel"]
    assert np.abs(difference).max() > 1e-6


def test_num_towers_changes_nothing_without_batch_norm_and_something_with():
    batches = random_batches(7, 2)
    for build, same in ((plain_network, True), (residual_network, False)):
        one = oracle.train(*build(), batches)
        three = oracle.train(*build(), batches, num_towers=3)
        difference = max(
            np.abs(one.params[name] - three.params[name]).max() for name in one.params
        )
        assert (difference == 0.0) == same


# The update, in literal numbers. With images of zeros the cross-entropy has no gradient
# by the kernel, so with weight decay 1 the gradient is the kernel itself.


def decay_alone(num_steps, **options):
    network = [layer("flatten", "flat"), layer("dense", "logits")]
    params = {"logits/kernel": np.array([[1.0, -1.0]])}
    batch = (np.zeros((2, 1, 1, 1)), np.array([0, 1]))
    options = {"weight_decay": {"logits/kernel": 1.0}, "learning_rate": 0.1, **options}
    return oracle.train(network, params, {}, [batch] * num_steps, **options)


@pytest.mark.parametrize(
    ("optimizer", "options", "after_one", "after_two", "velocity"),
    [
        # 1 - 0.1 = 0.9; 0.9 - 0.1 * 0.9 = 0.81
        ("sgd", {}, 0.9, 0.81, None),
        # v = 1; then v = 0.5 + 0.9 = 1.4 and 0.9 - 0.14 = 0.76
        ("momentum", {"momentum": 0.5}, 0.9, 0.76, 1.4),
        # 1 - 0.1 * (1 + 0.5) = 0.85; v = 0.5 + 0.85 = 1.35 and
        # 0.85 - 0.1 * (0.85 + 0.675) = 0.6975
        ("nesterov", {"momentum": 0.5}, 0.85, 0.6975, 1.35),
    ],
)
def test_two_steps_in_literals(optimizer, options, after_one, after_two, velocity):
    for num_steps, value in ((1, after_one), (2, after_two)):
        result = decay_alone(num_steps, optimizer=optimizer, **options)
        kernel = result.params["logits/kernel"]
        np.testing.assert_allclose(kernel, [[value, -value]], rtol=1e-14)
    if velocity is None:
        assert result.slots == {}
    else:
        found = result.slots["velocity"]["logits/kernel"]
        np.testing.assert_allclose(found, [[velocity, -velocity]], rtol=1e-14)
    # Half the sum of squares, before each update; the cross-entropy is ln 2 throughout.
    assert result.losses == pytest.approx([math.log(2)] * 2)
    assert result.total_losses == pytest.approx(
        [math.log(2) + 1.0, math.log(2) + after_one**2]
    )
    assert result.accuracies == [0.5, 0.5]


def test_two_steps_of_rmsprop_in_literals():
    # s = 0.5 * 1, direction 1 / sqrt(0.5); then s = 0.25 + 0.5 * x**2.
    x, velocity, second = 1.0, 0.0, 0.0
    for num_steps in (1, 2):
        second = 0.5 * second + 0.5 * x * x
        velocity = 0.5 * velocity + x / math.sqrt(second + 0.1)
        x -= 0.1 * velocity
        options = {"momentum": 0.5, "rho": 0.5, "epsilon": 0.1}
        result = decay_alone(num_steps, optimizer="rmsprop", **options)
        kernel = result.params["logits/kernel"]
        np.testing.assert_allclose(kernel, [[x, -x]], rtol=1e-14)
    assert x == pytest.approx(1 - 0.1 / math.sqrt(0.6) - 0.1 * velocity)


def test_the_first_steps_of_adam_are_of_one_length_and_the_decay_stands_beside_them():
    # With a constant gradient both moments, unbiased, are its own: each step is the
    # rate, and the decay takes 0.1 * 0.2 of what was there.
    params = {"a": np.array([[1.0]])}
    slots = {
        name: {"a": np.zeros((1, 1))} for name in ("first_moment", "second_moment")
    }
    for step, expected in enumerate([1 - 0.1 - 0.02, 0.88 - 0.1 - 0.0176]):
        params, slots = oracle.adamw(
            params,
            {"a": np.array([[3.0]])},
            slots,
            0.1,
            step=step,
            decay={"a": 0.2},
            epsilon=0.0,
        )
        np.testing.assert_allclose(params["a"], expected, rtol=1e-12)


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


def test_rate_is_outside_the_velocity():
    rates = {0: 0.1, 2: 0.01}  # by images seen: two per step
    result = decay_alone(
        2, optimizer="momentum", momentum=0.5, learning_rate=lambda seen: rates[seen]
    )
    # v = 1.4 as before; 0.9 - 0.01 * 1.4.
    kernel = result.params["logits/kernel"]
    np.testing.assert_allclose(kernel, [[0.886, -0.886]], rtol=1e-14)
    assert [report.learning_rate for report in result.reports] == [0.1, 0.01]


def test_clipping_follows_the_weight_decay_and_takes_the_joint_norm():
    # The gradient is (1, -1), of norm sqrt(2); clipped to 0.1 it is 0.1 / sqrt(2) each.
    result = decay_alone(1, clip_norm=0.1)
    assert result.reports[0].gradient_norm == pytest.approx(math.sqrt(2))
    expected = 1.0 - 0.1 * 0.1 / math.sqrt(2)
    assert result.params["logits/kernel"][0, 0] == pytest.approx(expected, rel=1e-14)
    gradients = {"a": np.array([3.0]), "b": np.array([[4.0]])}
    clipped = oracle.clip_by_global_norm(gradients, 1.0)
    assert_same_arrays(clipped, {"a": np.array([0.6]), "b": np.array([[0.8]])})
    for untouched in (None, 0, 5.0, 6.0):
        found = oracle.clip_by_global_norm(gradients, untouched)
        assert_same_arrays(found, gradients, atol=0.0)


def test_moving_averages_follow_the_ramp_in_literals():
    # Parameters 1, 0.9, 0.81; decays 1/10 and 2/11, then the bound.
    result = decay_alone(2, ema_decay=0.999)
    first = 0.1 * 1.0 + 0.9 * 0.9
    expected = 2 / 11 * first + 9 / 11 * 0.81
    average = result.averages["logits/kernel"][0, 0]
    assert average == pytest.approx(expected, rel=1e-14)
    bounded = decay_alone(2, ema_decay=0.05)
    expected = 0.05 * (0.05 * 1.0 + 0.95 * 0.9) + 0.95 * 0.81
    average = bounded.averages["logits/kernel"][0, 0]
    assert average == pytest.approx(expected, rel=1e-14)
    assert decay_alone(1).averages == {}


def test_staircase_counts_images():
    rate = oracle.staircase(0.1, 0.5, num_examples=10, epochs_per_decay=2)
    assert [rate(images) for images in (0, 19, 20, 39, 40)] == [
        0.1,
        0.1,
        0.05,
        0.05,
        0.025,
    ]


def test_learning_rate_of_a_step_counts_the_images_before_it():
    schedule = oracle.staircase(0.1, 0.1, num_examples=4, epochs_per_decay=1)
    result = decay_alone(4, learning_rate=schedule)
    found = [report.learning_rate for report in result.reports]
    assert found == pytest.approx([0.1, 0.1, 0.01, 0.01])


# Running on, and what is refused.


def test_resumed_training_equals_uninterrupted():
    network, params, state = residual_network()
    batches = random_batches(7, 4)
    options = {
        "optimizer": "nesterov",
        "learning_rate": oracle.staircase(0.1, 0.5, 7, 1.5),
        "weight_decay": {"logits/kernel": 0.1},
        "clip_norm": 0.5,
        "ema_decay": 0.99,
        "num_towers": 2,
    }
    whole = oracle.train(network, params, state, batches, **options)
    half = oracle.train(network, params, state, batches[:2], **options)
    rest = oracle.train(
        network,
        half.params,
        half.state,
        batches[2:],
        first_step=2,
        slots=half.slots,
        averages=half.averages,
        **options,
    )
    assert whole.reports == half.reports + rest.reports
    for found, expected in (
        (rest.params, whole.params),
        (rest.state, whole.state),
        (rest.slots["velocity"], whole.slots["velocity"]),
        (rest.averages, whole.averages),
    ):
        assert_same_arrays(found, expected, atol=0.0)


def test_training_leaves_what_it_was_given_and_lowers_the_loss():
    network, params, state = residual_network()
    given = {name: array.copy() for name, array in {**params, **state}.items()}
    batches = random_batches(12, 1) * 30
    result = oracle.train(network, params, state, batches, optimizer="momentum")
    assert result.losses[-1] < 0.5 * result.losses[0]
    assert_same_arrays({**params, **state}, given, atol=0.0)
    assert all(array.dtype == np.float64 for array in result.params.values())


def test_what_does_not_fit_is_refused():
    network, params, state = plain_network()
    with pytest.raises(ValueError, match="no layer 'convolution'"):
        layer("convolution", "conv1")
    with pytest.raises(ValueError, match="'conv3/kernel' belongs to no layer"):
        oracle.train(network, {**params, "conv3/kernel": np.ones(1)}, state, [])
    with pytest.raises(ValueError, match="not unique"):
        oracle.train([*network, network[-1]], params, state, [])
    with pytest.raises(ValueError, match="no parameter"):
        oracle.train(network, params, state, [], weight_decay={"conv9/kernel": 1.0})
    with pytest.raises(ValueError, match="dropout needs noise"):
        images, labels, _ = random_batches(4, 1)[0]
        oracle.train(network, params, state, [(images, labels)])
    with pytest.raises(ValueError, match="4 images are not 3 micro-batches"):
        oracle.micro_batches(random_batches(4, 1)[0], 3)
    with pytest.raises(ValueError, match="3 images after 4"):
        batches = random_batches(4, 1) + random_batches(3, 1)
        oracle.train(network, params, state, batches)
