"""Images of no class: in training, in evaluations, and in a run."""

import json
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from scipy.special import log_softmax

import towers
from towers import Config, data
from towers.build.builder import split_images
from towers.build.restored import read_run
from towers.data.augment.mixing import create_mix
from towers.data.randomness import Draw
from towers.errors import ConfigError
from towers.exporting import writers
from towers.exporting.stock import stock_network
from towers.optim import losses
from towers.run.dataset_info import DatasetInfo
from towers.training.linear_probe import logistic_regression

OPTIONS = {"validation_fraction": 0.5, "device": "cpu", "num_towers": 1}
NAMES = "cat", "unknown", "dog"


@pytest.fixture
def photos(tmp_path):
    """20 photos of each class, whose gray is the number of the class, and of none."""
    for number, name in enumerate(NAMES):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for i in range(20):
            Image.new("RGB", (8, 8), (100 * number, 3 * i, 7)).save(folder / f"{i}.png")
    return str(tmp_path / "photos")


def grays(source):
    """Red of the images, and their labels."""
    images, labels = source.read(tf.range(source.num_examples, dtype=tf.int64))
    return images.numpy()[:, 0, 0, 0], labels.numpy()


def test_images_of_no_class_are_set_apart(photos):
    data_set = data.load("image_folder", photos, unknown_class="unknown")
    assert data_set.class_names == ("cat", "dog")
    train, (split, held_out), unknown = split_images(Config(**OPTIONS), data_set)
    red_of = {0: 0, 1: 200, 2: 100}
    for source, labels in (
        (train, {0, 1, 2}),
        (held_out, {0, 1}),
        (data_set.test, {0, 1}),
    ):
        red, own = grays(source)
        assert red.tolist() == [red_of[x] for x in own] and {*own} == labels
        assert source.labels.tolist() == own.tolist()
    counts = [x.num_examples for x in (train, held_out, data_set.test)]
    assert (split, counts) == ("validation", [27, 18, 4])
    assert {k: grays(x)[0].tolist() for k, x in unknown.items()} == {
        "validation": [100] * 9,
        "test": [100] * 2,
    }
    options = {"unknown_class": "unknown", "trained": DatasetInfo.of(data_set)}
    again = data.load("image_folder", photos, **options)  # as an evaluation does
    assert again.class_names == data_set.class_names
    assert grays(again.test)[0].tolist() == grays(data_set.test)[0].tolist()
    assert grays(again.unknown["test"])[0].tolist() == [100] * 2
    lines = dict(data_set.inventory.lines(data_set))
    assert lines["classes"] == "2: cat 18, dog 18"
    assert "18 training images, 2 test images of unknown" in lines["unknown"]


def test_a_folder_called_unknown_is_a_class_and_a_line_says_so(photos):
    data_set = data.load("image_folder", photos)
    assert data_set.class_names == ("cat", "dog", "unknown")
    hint = data_set.inventory.inferred["unknown"]
    assert "is a class" in hint and "--unknown_class=unknown" in hint


@pytest.mark.parametrize("name, words", [("dgo", "did you mean dog"), ("cat", "fewer")])
def test_a_class_that_cannot_be_set_apart_is_refused(photos, name, words, tmp_path):
    if name == "cat":
        (tmp_path / "photos" / "unknown").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"unknown_class={name}.*"):
        data.load("image_folder", photos, unknown_class=name)


@pytest.mark.parametrize("mixed", [False, True])
def test_their_loss_is_the_cross_entropy_to_the_uniform_distribution(mixed):
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((6, 3)), np.array([0, 3, 2, 3, 3, 1])
    targets = np.concatenate([np.eye(3), np.full((1, 3), 1 / 3)])[labels]
    given = tf.constant(labels)
    if mixed:
        mix = create_mix(0.4, 0.0, 3)
        draw = Draw(0, tf.constant(3, tf.int64), tf.range(6), tf.range(6))
        batch = {"images": tf.eye(6)[:, None, None, :], "labels": given}
        batch = mix(batch, draw)
        targets = batch["images"].numpy()[:, 0, 0] @ targets  # the shares of images
        given = batch["labels"]
    loss_fn = losses.with_uniform_targets(losses.create_loss("cross_entropy"))
    expected = -(targets * log_softmax(logits, 1)).sum(1)
    np.testing.assert_allclose(loss_fn(tf.constant(logits), given), expected, rtol=1e-6)


def test_the_linear_probe_is_unsure_of_them():
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 50)  # the third is of no class
    features = (np.eye(3)[labels] + 0.1 * rng.standard_normal((150, 3))).astype("f4")
    kernel, bias, _ = logistic_regression(features, labels, 2)
    margins = np.abs(np.diff(np.eye(3) @ kernel + bias, axis=1))[:, 0]
    assert margins[2] < 0.2 * min(margins[:2])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose images are the brighter the higher the label; 1 is of no class."""
    rng, options = np.random.default_rng(0), {"model": "lenet", "width": 0.5}
    labels = np.repeat(np.arange(4), 40)
    images = rng.integers(0, 60, (160, 28, 28, 3)) + 60 * labels[:, None, None, None]
    options |= {"augment": "none", "batch_size": 20, "num_epochs": 4.0}
    options |= {"optimizer": "adamw", "learning_rate": 3e-3, "ema_decay": 0.0}
    config = Config(**OPTIONS, **options, unknown_class="x")
    path, names = tmp_path_factory.mktemp("unknown") / "run", ("a", "x", "b", "c")
    images = images.astype(np.uint8)
    towers.train(path, config, data=(images, labels), class_names=names, report=False)
    return path, images, labels


def test_python_and_commands_answer_unknown(run, tmp_path, capsys):
    path, images, _ = run
    result = towers.reject(path, coverage_at=0.8)
    assert result["unknown_images"] == 18 and result["test"]["unknown_images"] == 4
    loaded = towers.load_run(path)
    logits = loaded.model(loaded.preprocess(images)).numpy().astype(np.float64)
    scaled = log_softmax(logits / result["temperature"], 1)
    confidences, top = np.exp(scaled.max(1)), scaled.argmax(1)
    names = np.append(["a", "b", "c"], "unknown")
    is_answered = confidences >= result["threshold"]
    expected = names[np.where(is_answered, top, 3)].tolist()
    assert 20 < expected.count("unknown") < 140
    predicted = towers.predict(path, images)
    assert predicted.answers == expected
    present = [[x] if x != "unknown" else [] for x in expected]
    assert predicted.present() == present
    np.testing.assert_allclose(predicted.probabilities.max(1), confidences, rtol=1e-4)
    output = tmp_path / "lines"
    towers.write_predictions(path, images, form="json", output=output)
    lines = map(json.loads, output.read_text().splitlines())
    assert [x["prediction"] for x in lines] == expected
    options = {"form": "csv", "top": 1, "rank": "diverse", "output": output}
    towers.write_predictions(path, images, **options)
    capsys.readouterr()
    header, *rows = [x.split(",") for x in output.read_text().splitlines()]
    assert header == ["path", "label", "prediction", "class_1", "probability_1"]
    order = [int(row[0]) for row in rows]
    assert [row[2] for row in rows] == [expected[number] for number in order]
    assert sorted(order) == [*range(160)]
    assert towers.predict(path, images, rank="diverse").paths == [*map(str, order)]
    with Image.open(tmp_path / "lines.png") as sheet:
        assert sheet.width == 1280


@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
def test_exports_answer_unknown(run, tmp_path):
    path, images, _ = run
    towers.reject(path, precision_at=0.5)
    answers = towers.predict(path, images).answers
    expected = [[name == x for name in "abc"] for x in answers]
    restored = read_run(path)
    network = stock_network(restored.network())
    writers.write_saved_model(tmp_path / "saved", network, restored)
    signatures = tf.saved_model.load(tmp_path / "saved").signatures
    outputs = signatures["serving_default"](images=tf.constant(images))
    assert outputs["present"].numpy().tolist() == expected
    contents = [tf.io.encode_png(image) for image in images]
    classes = signatures["encoded_images"](encoded_images=tf.stack(contents))["class"]
    assert [x.decode() for x in classes.numpy()] == answers
    writers.write_tflite(tmp_path / "a.tflite", network, restored)
    runner = tf.lite.Interpreter(str(tmp_path / "a.tflite")).get_signature_runner()
    assert (runner(images=images)["present"] > 0).tolist() == expected
    writers.write_keras(tmp_path / "a.keras", network, restored)
    with zipfile.ZipFile(tmp_path / "a.keras") as archive:
        stored = json.loads(archive.read("rejection.json"))
    result = json.loads((path / "rejection.json").read_text())
    assert stored == {name: result[name] for name in ("temperature", "threshold")}


def test_the_threshold_is_of_a_step_and_of_weights(run, capsys, tmp_path):
    path, images, _ = run
    result = towers.reject(path, coverage_at=0.8)
    other = result | {"step": result["step"] + 1}
    (path / "rejection.json").write_text(json.dumps(other))
    predicted = towers.predict(path, images)
    assert "unknown" not in predicted.answers
    assert "rejection.json is not used (it is of the raw" in capsys.readouterr().err
    (path / "rejection.json").unlink()
    with pytest.raises(ConfigError, match="give one of them"):
        towers.reject(path, coverage_at=0.9, precision_at=0.9)
