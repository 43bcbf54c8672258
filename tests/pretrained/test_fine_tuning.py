"""The linear probe as a first head, and normalization with its trained values."""

import dataclasses
import functools
import json
import os
import zipfile

import keras
import numpy as np
import pytest
from keras import layers
from marks import slow
from scipy import optimize
from sklearn.linear_model import LogisticRegression
from small_runs import CLASS_NAMES, NUM_TRAIN, small_config, small_data, use

from towers.build import assembly
from towers.data.sources import ArraySource
from towers.models.layers.normalization import BatchNormalization
from towers.training import linear_probe
from towers.training.train import train


def scikit_learn(features, labels):
    """Return the probabilities of a logistic regression of scikit-learn."""
    centered = features.astype(np.float64) - features.mean(0)
    scaled = centered / np.sqrt(np.square(centered).sum(1).mean())
    options = {"C": 1 / linear_probe.L2_PENALTY, "max_iter": 5000, "tol": 1e-8}
    return LogisticRegression(**options).fit(scaled, labels).predict_proba(scaled)


@pytest.mark.parametrize(
    "num_images,num_features,is_wide",
    [(300, 20, False), (30, 50, False), (2000, 200, True)],
)
def test_a_probe_is_the_logistic_regression_of_scikit_learn(
    num_images, num_features, is_wide
):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, num_images)
    features = rng.normal(3, 7, (num_images, num_features)).astype(np.float32)
    features[:, :4] += 9 * np.eye(4, dtype=np.float32)[labels]
    if is_wide:
        features *= np.exp(rng.normal(0, 3, num_features)).astype(np.float32)
    kernel, bias, correct = linear_probe.logistic_regression(features, labels, 4)
    logits = features @ kernel + bias
    ours = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(ours, scikit_learn(features, labels), atol=0.001)
    assert correct == np.mean(logits.argmax(1) == labels)


def test_a_probe_of_label_sets_is_a_logistic_regression_for_each_class():
    rng = np.random.default_rng(0)
    features = rng.normal(2.0, 3.0, [200, 10]).astype(np.float32)
    noise = rng.normal(0.0, 2.0, [200, 3])
    labels = (features[:, :3] - 2.0 + noise > 1.0).astype(np.int64)
    kernel, bias, correct = linear_probe.logistic_regression(features, labels, 3)
    logits = features @ kernel + bias
    expected = [scikit_learn(features, x)[:, 1] for x in labels.T]
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)).T, expected, atol=0.01)
    assert correct == np.mean((logits > 0) == labels)


@pytest.mark.parametrize("num_images", [300, 12])
def test_a_new_output_is_fitted_next_to_known_ones(num_images):
    rng = np.random.default_rng(0)
    labels = np.arange(num_images) % 4
    features = rng.normal(2, 3, (num_images, 20)).astype(np.float32)
    features[:, :4] += 4 * np.eye(4, dtype=np.float32)[labels]
    offsets = features @ rng.normal(0, 0.1, (20, 4)).astype(np.float32)
    offsets[:, 1] = 0
    kernel, bias, correct = linear_probe.logistic_regression(
        features, labels, 4, known=[0, 2, 3], offsets=offsets
    )
    assert not kernel[:, [0, 2, 3]].any() and not bias[[0, 2, 3]].any()
    logits = offsets + features @ kernel + bias
    assert correct == np.mean(logits.argmax(1) == labels)
    scaled = features.astype(np.float64) - features.mean(0)
    scaled /= np.sqrt(np.square(scaled).sum(1).mean())

    def loss(values):
        column = scaled @ values[:-1] + values[-1]
        others = np.logaddexp.reduce(offsets[:, [0, 2, 3]].astype(np.float64), 1)
        sums = np.logaddexp(others, column)
        penalty = linear_probe.L2_PENALTY / 2 * np.square(values[:-1]).sum()
        return sums.sum() - column[labels == 1].sum() + penalty

    best = optimize.minimize(loss, np.zeros(21), tol=1e-9).x
    np.testing.assert_allclose(logits[:, 1], scaled @ best[:-1] + best[-1], atol=0.02)


def create_network(*, image_shape, num_classes, width, regularizer, norm="norm"):
    images = keras.Input(image_shape, name="images")
    x = layers.Conv2D(6, 3, use_bias=False, name="conv")(images)
    x = BatchNormalization(momentum=0.9, name=norm)(x)
    x = layers.GlobalAveragePooling2D(name="pool")(layers.ReLU(name="relu")(x))
    return keras.Model(images, layers.Dense(num_classes, name="logits")(x))


def fewer_classes():
    """The small data with three other classes in place of five."""
    data = small_data()

    def changed(source):
        images, labels = source.read(np.arange(source.num_examples))
        return ArraySource(images.numpy(), labels.numpy() % 3)

    sources = {"train": changed(data.train), "test": changed(data.test)}
    return dataclasses.replace(data, class_names=tuple("xyz"), **sources)


STILL = {"learning_rate": 1e-9, "weight_decay": 0.0, "max_steps": 1}


SHARDED = {"strategy": "model_parallel", "num_towers": 2, "group_size": 2}


@pytest.mark.parametrize(
    "options,max_images,num_views",
    [
        ({}, 10_000, 1),
        ({"augment": "pad_crop_flip"}, 10_000, 2),
        slow({"augment": "pad_crop_flip"}, NUM_TRAIN, 1),
        slow(SHARDED, 10_000, 1),
    ],
)
def test_a_new_head_starts_as_the_probe_of_the_trained_network(
    tmp_path, monkeypatch, options, max_images, num_views
):
    """Mirror images count too if the augmentation mirrors and images are few."""
    monkeypatch.setattr(linear_probe, "MAX_IMAGES", max_images)
    use(monkeypatch, create_network)
    train(tmp_path / "first", small_config(ema_decay=0.0, max_steps=5))
    data_set = fewer_classes()
    use(monkeypatch, create_network, data_set)
    config = small_config(
        init_from=str(tmp_path / "first"),
        linear_probe=True,
        batch_norm="frozen",
        **STILL,
        **options,
    )
    result = train(tmp_path / "second", config)
    state = result.state

    images, labels = data_set.train.read(np.arange(data_set.train.num_examples))
    info = result.dataset_info
    inputs = (images.numpy() - np.array(info.mean)) / np.array(info.std)
    network = create_network(
        image_shape=(8, 8, 3), num_classes=3, width=1.0, regularizer=None
    )
    network.set_weights(
        [state[f"params/{n}"] for n in ("conv/kernel", "norm/gamma", "norm/beta")]
        + [state[f"state/norm/moving_{n}"] for n in ("mean", "variance")]
        + [np.zeros((6, 3)), np.zeros(3)]
    )
    inputs = np.concatenate([inputs, np.flip(inputs, 2)][:num_views])
    labels = np.tile(labels.numpy(), num_views)
    features = keras.Model(network.inputs, network.layers[-1].input)([inputs])
    expected = linear_probe.logistic_regression(features.numpy(), labels, 3)
    for kind in ("params", "averages"):
        kernel, bias = (state[f"{kind}/logits/{n}"] for n in ("kernel", "bias"))
        np.testing.assert_allclose(kernel, expected[0], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(bias, expected[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "kind,probe",
    [("run", False), ("keras", True), slow("run", True), slow("keras", False)],
)
@pytest.mark.row(61)
def test_row_61_the_outputs_of_a_head_follow_the_names_of_classes(
    kind, probe, tmp_path, monkeypatch, capfd
):
    """Reordered, and with another class, next to which they stay."""
    use(monkeypatch, create_network)
    first = train(tmp_path / "first", small_config(ema_decay=0.0, max_steps=5))
    source = str(tmp_path / "first")
    if kind == "keras":  # as an export writes it
        source = str(tmp_path / "model.keras")
        first.model.save(source)
        with zipfile.ZipFile(source, "a") as archive:
            archive.writestr("class_names.json", json.dumps(CLASS_NAMES))
    still = STILL | {"ema_decay": 0.0, "linear_probe": probe, "standardize": "data"}
    for names in ("edcba", "exca"):
        labels = np.arange(NUM_TRAIN) % len(names)
        data = small_data()
        images, _ = data.train.read(np.arange(NUM_TRAIN))
        train_source = ArraySource(images.numpy(), labels)
        change = {"train": train_source, "test": train_source}
        data = dataclasses.replace(data, class_names=tuple(names), **change)
        use(monkeypatch, create_network, data)
        config = small_config(init_from=source, **still)
        state = train(tmp_path / names, config).state
        places = [CLASS_NAMES.index(x) for x in names if x != "x"]
        ours = [index for index, x in enumerate(names) if x != "x"]
        same = [
            np.allclose(
                state[f"params/logits/{x}"][..., ours],
                first.state[f"params/logits/{x}"][..., places],
                atol=1e-6,
            )
            for x in ("kernel", "bias")
        ]
        assert same == [True, True]
        if "x" in names:  # begins as a probe
            fitted = state["params/logits/kernel"][:, names.index("x")]
            assert np.abs(fitted).max() > 0
        said = capfd.readouterr().out
        assert ("new: x" in said) == ("x" in names)
        assert ("follow the class names" in said) == (names == "edcba")


def test_a_head_with_trained_values_stays(tmp_path, monkeypatch, capfd):
    use(monkeypatch, create_network)
    first = train(tmp_path / "first", small_config(max_steps=5)).state
    use(monkeypatch, functools.partial(create_network, norm="another"))
    source = str(tmp_path / "first")
    config = small_config(init_from=source, linear_probe=True, **STILL)
    second = train(tmp_path / "second", config).state
    name = "params/logits/kernel"
    np.testing.assert_allclose(second[name], first[name], atol=1e-6)


def test_frozen_normalization_keeps_all_its_values(tmp_path, monkeypatch):
    use(monkeypatch, create_network)
    config = small_config(batch_norm="frozen", num_towers=2, weight_decay=0.5)
    one, more = (
        train(tmp_path / str(n), dataclasses.replace(config, max_steps=n)).state
        for n in (1, 4)
    )
    names = {k for k in one if k.startswith(("params/", "state/"))}
    kept = {k for k in names if np.array_equal(one[k], more[k])}
    assert kept == {k for k in names if "/norm/" in k} and len(kept) == 4


@pytest.mark.parametrize(
    "options,per_core",
    [
        ({"batch_norm": "frozen"}, True),
        ({"batch_norm": "frozen", "num_towers": 1}, False),
        ({"batch_norm": "frozen", "strategy": "async_towers"}, False),
        ({"batch_norm": "frozen", "batch_size": 2}, False),
        ({}, False),
    ],
)
def test_frozen_normalization_takes_a_tower_for_each_core(
    options, per_core, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    options = {"batch_size": 16, "num_towers": 0, "device": "cpu"} | options
    devices = assembly.configure_devices(small_config(**options))
    assert len(devices.towers) == (2 if per_core else 1)
