"""Losses against NumPy in float64."""

import functools
import json

import keras
import numpy as np
import pytest
import small_runs
import tensorflow as tf
from marks import slow
from scipy import special
from small_runs import small_config

from towers import load_run, train
from towers.build import assembly, builder
from towers.config.choices import LOSSES
from towers.data.batches import EvalBatches
from towers.data.orders import BalancedOrder
from towers.errors import ConfigError
from towers.optim import losses
from towers.optim.losses import WeightDecay, cross_entropy, pop_weight_decay
from towers.optim.phases import downscale
from towers.optim.vector import Layout
from towers.parallel.devices import Devices
from towers.training.setup import build_run

softmax = functools.partial(special.softmax, axis=1)


def example(n=50, classes=7, scale=3.0, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=scale, size=(n, classes))
    return logits, rng.integers(0, classes, n)


def soft_labels(n=50, classes=7, seed=1):
    """float32 rows that add up to 1, most of them of two classes."""
    rng = np.random.default_rng(seed)
    pairs, shares = rng.integers(0, classes, (2, n)), rng.random((n, 1))
    one_hot = np.eye(classes)
    mixed = shares * one_hot[pairs[0]] + (1 - shares) * one_hot[pairs[1]]
    return mixed.astype(np.float32)


# Each by its formula: (logits, targets, weights) -> the losses and their gradients.


def softmax_loss(gamma):
    def formula(logits, targets, weights):
        p = softmax(logits)
        targets = targets * weights
        terms = -targets * (1 - p) ** gamma * np.log(p)
        of_log_p = -targets * (1 - p) ** gamma
        if gamma:
            of_log_p += targets * gamma * (1 - p) ** (gamma - 1) * p * np.log(p)
        return terms.sum(1), of_log_p - p * of_log_p.sum(1, keepdims=True)

    return formula


def sigmoid_loss(logits, targets, weights):
    p = 1 / (1 + np.exp(-logits))
    terms = -weights * (targets * np.log(p) + (1 - targets) * np.log(1 - p))
    return terms.mean(1), weights * (p - targets) / logits.shape[1]


def over_threshold(logits, targets, weights):
    return sigmoid_loss(logits, (targets > 0.3).astype(float), weights)


FORMULAS = {
    ("cross_entropy", None, None): softmax_loss(0),
    ("focal", "focal_gamma", 2.0): softmax_loss(2.0),
    ("focal", "focal_gamma", 0.5): softmax_loss(0.5),
    ("focal", "focal_gamma", 0.0): softmax_loss(0),
    ("binary_cross_entropy", None, None): sigmoid_loss,
    ("binary_cross_entropy", "target_threshold", 0.3): over_threshold,
}


def test_every_loss_has_a_formula():
    assert {name for name, *_ in FORMULAS} == LOSSES.keys()


@pytest.mark.parametrize("dtype,tolerance", [("float64", 1e-8), ("bfloat16", 8e-3)])
@pytest.mark.parametrize("is_soft,smoothing", [(False, 0.0), (False, 0.1), (True, 0.1)])
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("name,option,value", FORMULAS)
def test_a_loss_and_its_gradient_equal_their_formulas(
    name, option, value, is_plain, smoothing, is_soft, dtype, tolerance
):
    """With weights of the classes and numbers added to their logits, or plain."""
    logits, labels = example()
    weights, adjustment = np.random.default_rng(2).uniform(size=(2, 7))
    targets = soft_labels().astype(np.float64) if is_soft else np.eye(7)[labels]
    options = {"label_smoothing": smoothing} | ({option: value} if option else {})
    if is_plain:
        weights, adjustment = np.ones(7), np.zeros(7)
    else:
        options |= {"class_weights": weights, "logit_adjustment": adjustment}
    loss_fn, logits = losses.create_loss(name, **options), tf.cast(logits, dtype)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        found = loss_fn(logits, soft_labels() if is_soft else labels)
    gradient, exact = tape.gradient(found, logits), tf.cast(logits, tf.float64).numpy()
    assert gradient.dtype == dtype and found.dtype.size >= 4
    expected, gradients = FORMULAS[name, option, value](
        exact + adjustment, (1 - smoothing) * targets + smoothing / 7, weights
    )
    np.testing.assert_allclose(found, expected, rtol=min(tolerance, 1e-5), atol=1e-6)
    gradient = tf.cast(gradient, tf.float64)
    np.testing.assert_allclose(gradient, gradients, atol=tolerance)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_focal_losses_of_certain_images_have_finite_gradients(gamma):
    logits = tf.constant([[200.0, -200.0], [0.0, 50.0]])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        found = losses.focal(logits, [0, 0], focal_gamma=gamma)
    np.testing.assert_allclose(found, [0, 50])
    np.testing.assert_allclose(tape.gradient(found, logits), [[0, 0], [-1, 1]])


@pytest.mark.parametrize("name", LOSSES)
def test_the_training_alone_has_weights_shares_and_a_sampler(
    monkeypatch, tmp_path, name
):
    """The loss of evaluations is the chosen one without them."""
    small_runs.use(monkeypatch)
    weights = dict(zip("abcde", (3.0, 0.5, 1.0, 2.0, 0.0), strict=True))
    (tmp_path / "weights.json").write_text(json.dumps(weights))
    options = {"label_smoothing": 0.2, "focal_gamma": 1.5, "target_threshold": 0.4}
    in_training = {"logit_adjustment": 2.0, "sampler": "balanced"}
    in_training["class_weights"] = str(tmp_path / "weights.json")
    config = small_config(
        loss=name, **options, **in_training, weight_decay=0.0, augment="none"
    )
    parts = builder.build(config)
    trainer = assembly.create_trainer(config, parts, Devices("CPU", ("/CPU:0",)))
    source, test = parts.data.train, parts.data.test
    step = tf.constant(0, tf.int64)
    batch = parts.train_batches(step)
    drawn = BalancedOrder(source.labels)(config.seed, step)[:10]
    np.testing.assert_array_equal(batch["labels"], source.labels[drawn])
    shares = np.log(np.bincount(source.labels) / source.num_examples)
    weighted = losses.create_loss(
        name,
        **options,
        class_weights=tuple(weights.values()),
        logit_adjustment=2 * shares,
    )
    expected = weighted(parts.model(batch["images"]), batch["labels"])
    feed = assembly.create_eval_feed(EvalBatches(test, parts.augment, 10), trainer)
    counts = trainer.evaluate(feed, 3, heartbeat=lambda: None).reported
    images, labels = test.read(tf.range(test.num_examples, dtype=tf.int64))
    plain_fn = losses.create_loss(name, **options)
    plain = plain_fn(parts.model(parts.augment.evaluate(images)), labels)
    assert counts["loss"] == pytest.approx(np.sum(plain), rel=1e-5)
    assert float(trainer.train(1)["loss"]) == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.parametrize("threshold,fits", [(0.1, 0), (0.2, 1), (0.75, 1), (0.85, 0)])
def test_a_threshold_that_all_smoothed_labels_pass_or_miss_is_refused(threshold, fits):
    """The targets of two classes are 0.15 and 0.85."""
    loss_fn = losses.create_loss(
        "binary_cross_entropy", label_smoothing=0.3, target_threshold=threshold
    )
    logits = tf.constant([[1.0, -2.0]])
    if fits:
        np.testing.assert_allclose(
            loss_fn(logits, [0]), [np.log1p(np.exp([-1, -2])).mean()], rtol=1e-6
        )
    else:
        with pytest.raises(ConfigError, match=r"the targets are 0\.15 and 0\.85"):
            loss_fn(logits, [0])


# Distillation.


def test_a_distillation_equals_its_formula():
    """The gradient is that of the cross-entropy with soft targets, times T ** 2."""
    logits, labels = example()
    teacher, target = 2 * example(seed=3)[0], np.eye(7)[labels]
    loss_fn = losses.distillation(cross_entropy, 4.0, 0.7)
    with tf.GradientTape() as tape:
        tape.watch(variable := tf.constant(logits))
        found = loss_fn(variable, labels, tf.constant(teacher))
    soft, taught = softmax(logits / 4), softmax(teacher / 4)
    divergence = (taught * np.log(taught / soft)).sum(1)
    plain = -(target * np.log(softmax(logits))).sum(1)
    np.testing.assert_allclose(found, 0.3 * plain + 0.7 * 16 * divergence)
    expected = 0.3 * (softmax(logits) - target) + 0.7 * 4 * (soft - taught)
    np.testing.assert_allclose(tape.gradient(found, variable), expected, atol=1e-12)


@pytest.fixture
def teacher(monkeypatch, tmp_path):
    """The folder of a run of three steps."""
    small_runs.use(monkeypatch)
    train(tmp_path / "teacher", small_config(learning_rate=0.5, max_steps=3, seed=5))
    return str(tmp_path / "teacher")


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "replicated", "num_towers": 2, "accumulate_steps": 2},
        slow({"strategy": "model_parallel", "num_towers": 2, "group_size": 2}),
        slow({"strategy": "async_towers", "num_towers": 1}),
        slow({"early_sizes": "6:0.5", "model": "resnet20"}),
    ],
)
def test_towers_follow_the_teacher_on_their_images(teacher, options):
    weight = {"distillation_weight": 1.0, "distillation_temperature": 2.0}
    config = small_config(
        teacher=teacher, weight_decay=0.0, device="cpu", **weight, **options
    )
    parts, trainer = build_run(config, assembly.configure_devices(config))
    run = load_run(teacher)
    batch = parts.train_batches(tf.constant(0, tf.int64))
    model, images = parts.model, batch["images"]
    if parts.phases:
        model, images = parts.phases[0].model, downscale(images, 6, 6)
    soft = softmax(model(images, training=True).numpy().astype(np.float64) / 2)
    taught = softmax(run.model_ema(batch["images"]).numpy().astype(np.float64) / 2)
    expected = 4 * (taught * np.log(taught / soft)).sum(1).mean()
    assert expected > 0.01
    assert float(trainer.train(1)["loss"]) == pytest.approx(expected, rel=1e-5)


# Weight decay.

MARKED = {"decayed/kernel", "decayed_bias/bias"}


def decayed_network(weight):
    dense, regularizer = keras.layers.Dense, keras.regularizers.L2(weight)
    return keras.Sequential(
        [
            keras.Input((4,)),
            dense(3, kernel_regularizer=regularizer, name="decayed"),
            dense(2, name="free"),
            dense(2, bias_regularizer=regularizer, name="decayed_bias"),
        ]
    )


def with_decay(variables, params, gradients):
    """The penalty, and per parameter the gradient with weight decay."""
    layout = Layout({v.path: v for v in variables})
    vectors = [layout.pack([tf.constant(x) for x in xs]) for xs in (params, gradients)]
    decay, found = WeightDecay(variables, layout)(*vectors)
    return float(decay), list(layout.read([x.numpy() for x in found]).values())


def random_values(variables, seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=v.shape).astype(np.float32) for v in variables]


@pytest.mark.parametrize("weight", [0.25, 0.0])
def test_weight_decay_is_that_of_keras_until_it_is_taken(weight):
    """By default that of the loss; an optimizer may take it."""
    model = decayed_network(weight)
    variables = model.trainable_variables
    params, gradients = (random_values(variables, seed) for seed in (0, 1))
    for variable, value in zip(variables, params, strict=True):
        variable.assign(value)
    decay, found = with_decay(variables, params, gradients)
    np.testing.assert_allclose(decay, sum(model.losses), rtol=1e-6)
    coefficients = pop_weight_decay(variables)
    names = ["/".join(v.path.split("/")[-2:]) for v in variables]
    assert dict(zip(names, coefficients, strict=True)) == {
        name: 2 * weight if name in MARKED else 0.0 for name in names
    }
    for c, p, g, ours in zip(coefficients, params, gradients, found, strict=True):
        np.testing.assert_allclose(ours, g + c * p, rtol=1e-5)
    decay, found = with_decay(variables, params, gradients)
    assert decay == 0 and model.losses == []
    for ours, gradient in zip(found, gradients, strict=True):
        np.testing.assert_array_equal(ours, gradient)
