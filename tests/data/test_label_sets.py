"""Images with several labels, compared with scikit-learn, Keras and NumPy."""

import concurrent.futures
import csv
import dataclasses
import json
import threading

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from marks import slow
from recipes import Recipe, create_trainer
from sklearn import metrics

import towers
from towers import Config
from towers.build import assembly
from towers.data import classes
from towers.data.augment.augmentation import create_augment
from towers.data.batches import EvalBatches, hold_out
from towers.data.orders import BalancedOrder
from towers.data.share import Share
from towers.data.sources import ArraySource, split_off_test
from towers.errors import ConfigError, DataError
from towers.metrics.metrics import (
    average_precision,
    best_thresholds,
    figures,
    read_thresholds,
)
from towers.metrics.predictions import LabelSets
from towers.metrics.results import figures_of_counts
from towers.optim.losses import create_loss
from towers.parallel.evaluator import Evaluator
from towers.parallel.strategies.towers import towers as one_copy

NAMES = ("cat", "dog", "outdoor", "night")


def random_sets(num_images, num_classes, seed=0):
    """Labels, some classes being rare, and logits that know something of them."""
    rng = np.random.default_rng(seed)
    labels = rng.random((num_images, num_classes)) < rng.uniform(0.05, 0.6, num_classes)
    logits = rng.standard_normal((num_images, num_classes)) + 1.5 * labels
    return labels, np.round(logits, 1).astype(np.float32)  # some are equal


def figures_of(labels, logits, thresholds=None):
    names = [f"class {i}" for i in range(labels.shape[1])]
    losses_of_images = losses_by_numpy(labels, np.nan_to_num(logits))
    predictions = LabelSets(labels, logits, losses_of_images)
    return figures(predictions, names, thresholds)


def losses_by_numpy(labels, logits):
    logits = logits.astype(np.float64)
    return np.mean(np.logaddexp(0, logits) - labels * logits, 1)


# Figures.


def test_with_a_nan_logit_no_set_is_right():
    logits = np.array([[np.nan, np.nan], [np.nan, 1], [-1, 1], [-1, -1]], np.float32)
    labels = np.array([[0, 0], [0, 1], [0, 1], [0, 0]], bool)
    assert figures_of(labels, logits)["correct"] == 2


@pytest.mark.parametrize("num_images, num_classes", [(1, 2), (60, 3), (400, 30)])
def test_figures_equal_sklearn(num_images, num_classes):
    labels, logits = random_sets(num_images, num_classes, seed=num_images)
    computed = figures_of(labels, logits)
    assert json.loads(json.dumps(computed)) == computed
    has_images, predicted = labels.any(0), logits >= 0
    rows, expected = computed["classes"], np.zeros(num_classes)
    for i in np.flatnonzero(has_images):
        expected[i] = metrics.average_precision_score(labels[:, i], logits[:, i])
    np.testing.assert_allclose([x["average_precision"] for x in rows], expected)
    mean = expected[has_images].mean() if has_images.any() else 0
    assert computed["map"] == pytest.approx(mean)
    if has_images.any():
        micro = metrics.average_precision_score(labels, logits, average="micro")
        assert computed["map_micro"] == pytest.approx(micro)
    columns = metrics.precision_recall_fscore_support(
        labels, predicted, zero_division=0, average=None
    )
    names = ("precision", "recall", "f1", "images")
    for name, column in zip(names, columns, strict=True):
        np.testing.assert_allclose([x[name] for x in rows], column, err_msg=name)
    kept = np.flatnonzero(has_images | predicted.any(0))
    for average in ("macro", "micro"):
        f1 = metrics.f1_score(
            labels, predicted, labels=kept, average=average, zero_division=0
        )
        assert computed[f"{average}_f1"] == pytest.approx(f1)
    assert computed["accuracy"] == pytest.approx(
        metrics.accuracy_score(labels, predicted)
    )
    probabilities = 1 / (1 + np.exp(-logits.astype(float)))
    log_losses = [
        metrics.log_loss(*both, labels=[0, 1])
        for both in zip(labels.T, probabilities.T, strict=True)
    ]
    assert computed["loss"] == pytest.approx(np.mean(log_losses))


def test_degenerate_figures():
    """A class without images, one that all images have, and equal scores."""
    labels = np.array([[1, 1, 0], [0, 1, 0], [0, 1, 0], [1, 1, 0]], bool)
    equal = np.zeros((4, 3), np.float32)
    computed = figures_of(labels, equal)
    assert [x["average_precision"] for x in computed["classes"]] == [0.5, 1.0, 0.0]
    assert computed["map"] == 0.75 and computed["accuracy"] == 0
    assert computed["map_micro"] == pytest.approx(
        metrics.average_precision_score(labels, equal, average="micro")
    )
    nothing = figures_of(np.zeros((4, 3), bool), equal - 1)
    assert nothing["map"] == nothing["macro_f1"] == 0 and nothing["accuracy"] == 1
    unknown = figures_of(labels, np.full((4, 3), np.nan, np.float32))
    assert unknown["map"] == 0.75  # as equal scores
    assert average_precision(np.array([True, False]), np.array([np.inf, -np.inf])) == 1


def test_thresholds_have_the_highest_f1():
    labels, logits = random_sets(300, 12, seed=5)
    labels[:, 3] = False
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    thresholds = best_thresholds(labels, probabilities)
    assert thresholds[3] == 0.5
    for number in range(12):
        if number != 3:
            precision, recall, _ = metrics.precision_recall_curve(
                labels[:, number], probabilities[:, number]
            )
            best = (2 * precision * recall / np.maximum(precision + recall, 1e-9)).max()
            chosen = probabilities[:, number] >= thresholds[number]
            f1 = metrics.f1_score(labels[:, number], chosen)
            assert f1 == pytest.approx(best)
    computed = figures_of(labels, logits, thresholds)
    rows = [x for i, x in enumerate(computed["classes"]) if i != 3]
    assert [x["threshold"] for x in rows] == np.delete(thresholds, 3).tolist()
    chosen = probabilities >= thresholds
    for average in ("macro", "micro"):
        present = np.flatnonzero(labels.any(0) | chosen.any(0))
        expected = metrics.f1_score(labels, chosen, labels=present, average=average)
        assert computed[f"{average}_f1_at_thresholds"] == pytest.approx(expected)
    assert computed["macro_f1_at_thresholds"] > computed["macro_f1"]


def test_a_threshold_lies_above_the_next_lower_probability():
    """Halfway between neighbours of float64 is one of the two."""
    low = 0.75
    for _ in range(4):
        high = np.nextafter(low, 1)
        labels, probabilities = np.array([[True], [False]]), np.array([[high], [low]])
        thresholds = best_thresholds(labels, probabilities)
        assert low < thresholds[0] <= high
        low = high


@pytest.mark.parametrize("value", ["2", "-1", "NaN", "[0.5]", "null"])
def test_thresholds_that_are_not_probabilities_are_refused(value, tmp_path):
    path = tmp_path / "thresholds.json"
    path.write_text(f'{{"a": {value}, "b": 0.5}}')
    with pytest.raises(ConfigError, match=r"thresholds\.json.*remove it"):
        read_thresholds(path, ("a", "b"))


# Loss.


def test_the_loss_equals_keras_and_its_positive_weights_the_formula():
    labels, logits = random_sets(20, 5)
    targets = labels.astype(np.float32)
    for smoothing in (0.0, 0.2):
        options = {"label_smoothing": smoothing}
        loss_fn = create_loss("cross_entropy", multi_label=True, **options)
        expected = keras.losses.binary_crossentropy(
            targets, logits, from_logits=True, **options
        )
        np.testing.assert_allclose(loss_fn(logits, targets), expected, rtol=1e-5)
    weights = [0.5, 1.0, 2.0, 3.0, 4.0]
    loss_fn = create_loss("binary_cross_entropy", multi_label=True, pos_weights=weights)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = -(weights * labels * np.log(p) + ~labels * np.log(1 - p)).mean(1)
    np.testing.assert_allclose(loss_fn(logits, targets), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name, options", [("focal", {}), ("cross_entropy", {"pos_weights": [1.0] * 3})]
)
def test_what_is_of_one_label_is_refused(name, options):
    with pytest.raises(ConfigError, match="one label"):
        create_loss(name, multi_label=name == "focal", **options)(
            tf.zeros([2, 3]), tf.zeros([2], tf.int32)
        )


# Data.


def source_of(labels):
    images = np.zeros((len(labels), 2, 2, 1), np.uint8)
    return ArraySource(images, labels.astype(np.uint8))


def test_balanced_weights_equal_the_counts():
    labels, _ = random_sets(500, 6)
    labels[:, 2], labels[:, 4] = False, True
    positive = labels.sum(0)
    given = "balanced", source_of(labels), "abcdef"
    expected = (500 - positive) / np.maximum(positive, 1)
    expected[[2, 4]] = 1
    np.testing.assert_allclose(classes.class_weights(*given, "pos_weights"), expected)
    weights = np.array(classes.class_weights(*given))
    present = positive > 0  # equal in sum, and 1 on the average over the labels
    np.testing.assert_allclose((weights * positive)[present], positive.sum() / 5)


def test_a_balanced_order_draws_every_class_alike():
    labels, _ = random_sets(400, 4, seed=1)
    labels[:, 3] &= labels[:, 2]
    order = BalancedOrder(labels.astype(np.uint8))
    drawn = np.concatenate([order(7, tf.constant(e, tf.int64)) for e in range(100)])
    assert drawn.shape == (40_000,)
    # Each class, and the images without any, are drawn equally often.
    with_none = np.column_stack([labels, ~labels.any(1)])
    expected = (with_none / with_none.sum(0)).mean(1) * 40_000
    counts = np.bincount(drawn, minlength=400)
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected.max())
    assert np.corrcoef(counts, expected)[0, 1] > 0.9


def test_every_class_has_its_share_of_what_is_held_out():
    labels, _ = random_sets(1000, 8, seed=2)
    rare = np.arange(1000)[:, np.newaxis] // 10 == np.arange(3)
    labels[:, 5:] = rare  # ten images each
    for rest, part in (
        split_off_test(source_of(labels), labels, "here"),
        hold_out(source_of(labels), 0.1),
    ):
        assert part.labels[:, 5:].sum(0).tolist() == [1, 1, 1]
        ratio = part.labels.sum(0) / labels.sum(0)
        assert ratio.min() > 0.05 and ratio.max() < 0.17
        both = part.labels.sum(0) + rest.labels.sum(0)
        np.testing.assert_array_equal(both, labels.sum(0))


# Evaluation over workers and strategies.


class Peer:
    """One of two workers in threads of this process."""

    size, devices = 2, ["CPU:0"]

    def __init__(self, index, shared):
        self.index, self.is_chief, self._shared = index, index == 0, shared
        self._barrier = shared.setdefault("barrier", threading.Barrier(2, timeout=60))

    def _exchange(self, value):
        self._shared[self.index] = value
        self._barrier.wait()
        values = self._shared[0], self._shared[1]
        self._barrier.wait()
        return values

    def broadcast(self, values):
        return self._exchange(values)[0]

    def add(self, values):
        return np.sum(self._exchange(values), 0)


def test_two_workers_count_every_image_once():
    """23 images in batches of 7, of which one worker has 4 images and the other 3."""
    rng = np.random.default_rng(3)
    images = rng.integers(0, 256, (23, 8, 8, 3), np.uint8)
    labels, _ = random_sets(23, networks.NUM_CLASSES, seed=3)
    source = ArraySource(images, labels.astype(np.uint8))
    augment = create_augment("none", (8, 8, 3), (120.0,) * 3, (60.0,) * 3)
    loss_fn = create_loss("cross_entropy", multi_label=True)
    network = networks.residual_network()
    recipe, batches = Recipe(), networks.random_batches(1, 8, noise_shapes={})
    trainer = create_trainer(one_copy, network, recipe, batches, 1)
    shared = {}

    def count(index, share):
        parts = trainer.strategy.fetch, trainer.towers, loss_fn, trainer.devices, []
        evaluator = Evaluator(*parts, Peer(index, shared))
        eval_batches = EvalBatches(source, augment, 7, share)
        feed = assembly.create_eval_feed(eval_batches, trainer)
        return evaluator.counts(feed, len(eval_batches)).reported

    with concurrent.futures.ThreadPoolExecutor() as pool:
        results = list(pool.map(count, (0, 1), (Share(0, 4, 7), Share(4, 3, 7))))
    logits = network.model(augment.evaluate(images), training=False).numpy()
    losses = losses_by_numpy(labels, logits)
    for counts in results:
        np.testing.assert_array_equal(counts["labels"], labels)
        np.testing.assert_allclose(counts["logits"], logits, rtol=1e-4, atol=1e-5)
        assert counts["images"] == 23
        assert counts["correct"] == ((logits >= 0) == labels).all(1).sum()
        assert counts["loss"] == pytest.approx(losses.sum(), rel=1e-4)
        expected = metrics.average_precision_score(labels, counts["logits"])
        assert figures_of_counts(counts)["map"] == pytest.approx(expected)


def small_set(num_images=120, seed=0):
    """Images with a bright stripe for each label."""
    rng = np.random.default_rng(seed)
    labels = (rng.random((num_images, 4)) < 0.4).astype(np.uint8)
    images = rng.integers(0, 90, (num_images, 8, 8, 3))
    images += 130 * labels.repeat(2, axis=1)[:, :, None, None]
    return images.astype(np.uint8), labels


CONFIG = Config(
    model="cnn",
    width=0.1,
    augment="none",
    mixup=0.2,
    device="cpu",
    batch_size=20,
    num_epochs=3.0,
    optimizer="adamw",
    learning_rate=3e-3,
    ema_decay=0.0,
    pos_weights="balanced",
    label_smoothing=0.05,
    validation_fraction=0.25,
    num_towers=1,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of images with several labels."""
    path = tmp_path_factory.mktemp("label_sets") / "run"
    return towers.train(path, CONFIG, data=small_set(), class_names=NAMES)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "replicated", "num_towers": 2},
        slow({"num_towers": 2, "accumulate_steps": 2, "batch_size": 10}),
        slow({"strategy": "model_parallel", "num_towers": 2, "group_size": 2}),
    ],
)
def test_strategies_train_alike(run, tmp_path, options):
    config = dataclasses.replace(CONFIG, **options)
    other = towers.train(tmp_path, config, data=small_set(), class_names=NAMES)
    for name, values in run.state.items():
        np.testing.assert_allclose(other.state[name], values, rtol=2e-3, atol=2e-4)
    for name in ("validation_map", "validation_macro_f1", "epoch_accuracy"):
        values = other.history[name].values, run.history[name].values
        np.testing.assert_allclose(*values, atol=1e-3, err_msg=name)


@pytest.mark.slow
def test_a_run_is_evaluated_predicted_and_exported(run, tmp_path):
    images, labels = small_set(50, seed=9)
    result = towers.evaluate(run.path, report=True)
    content = json.loads((run.path / "report" / "report.json").read_text())
    page = (run.path / "report" / "index.html").read_text()
    assert "Heat maps" in page and "precision-recall curves" in page
    assert f"{result['test_map']:.4f} <small>test mAP" in page
    worst = min(result["test_classes"], key=lambda row: row["average_precision"])
    curve = content["precision_recall"][0]
    name = "test_macro_f1_at_thresholds"
    assert content["result"][name] == result[name]
    assert curve["name"] == worst["name"] and curve["recall"][-1] == 1
    area = np.diff(curve["recall"], prepend=0) @ np.array(curve["precision"])
    assert area == pytest.approx(worst["average_precision"])
    predicted = towers.predict(run.path, images)
    best = towers.load_run(run.path)
    logits = best.model(best.preprocess(images)).numpy().astype(np.float64)
    probabilities = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(predicted.probabilities, probabilities, rtol=1e-4)
    thresholds = json.loads((run.path / "thresholds.json").read_text())
    assert tuple(thresholds) == NAMES
    expected = [
        [n for n, p in zip(NAMES, row, strict=True) if p >= thresholds[n]]
        for row in predicted.probabilities
    ]
    assert predicted.present() == expected and any(len(x) > 1 for x in expected)
    of_new = towers.evaluate(run.path, data=(images, labels))
    expected_map = metrics.average_precision_score(labels, predicted.probabilities)
    assert of_new["test_map"] == pytest.approx(expected_map)
    is_right = ((predicted.probabilities >= 0.5) == labels).all(1)
    assert of_new["test_accuracy"] == is_right.mean()
    assert [x["threshold"] for x in result["test_classes"]] == [*thresholds.values()]
    with open(run.path / "mistakes.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 50 - of_new["test_correct"]
    assert {n for row in rows for n in row["label"].split(", ")} <= {*NAMES, "none"}
    lines = tmp_path / "lines.json"
    towers.write_predictions(run.path, images, form="json", output=lines)
    written = [json.loads(line)["present"] for line in lines.read_text().splitlines()]
    assert written == expected
    path = towers.export(run.path, "saved_model", tmp_path / "exported")
    serve = tf.saved_model.load(path).signatures["serving_default"]
    outputs, probabilities = serve(images=tf.constant(images)), predicted.probabilities
    np.testing.assert_allclose(outputs["probabilities"], probabilities, atol=1e-4)
    is_present = probabilities >= [*thresholds.values()]
    np.testing.assert_array_equal(outputs["present"], is_present)


@pytest.mark.parametrize(
    "labels, test_labels, class_names, message",
    [
        (np.ones((8, 3), int), np.zeros(2, int), (), "differ in shape"),
        (np.ones((8, 3), int), np.ones((2, 4), int), (), "differ in shape"),
        (np.ones((8, 3), int), np.ones((2, 3), int), ("a", "b"), "3 columns"),
        (np.full((8, 3), 2), np.ones((2, 3), int), (), "0 and 1"),
    ],
)
def test_wrong_sets_are_refused(tmp_path, labels, test_labels, class_names, message):
    images = np.zeros((10, 8, 8, 3), np.uint8)
    given = (images[:8], labels), (images[8:], test_labels)
    with pytest.raises(DataError, match=message):
        towers.train(tmp_path, CONFIG, data=given, class_names=class_names)
