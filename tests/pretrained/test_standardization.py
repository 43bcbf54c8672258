"""Preprocessing of images: --standardize, wherever a network is used, and the resize of
trained weights."""

import dataclasses
import itertools
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from pictures import png, random_pixels
from scipy import special
from sklearn.metrics import log_loss
from small_runs import NUM_TEST, NUM_TRAIN, arrays, saved, small_config, small_data

from towers import evaluate, load_run, predict
from towers.build import builder
from towers.config.choices import MODELS
from towers.errors import ConfigError
from towers.exporting import comparison, load_in_new_process
from towers.exporting.export import export
from towers.models.keras.applications import correct_variances
from towers.models.variables import keras_settings
from towers.pretrained.standardization import standardize, with_options_of_weights
from towers.run.dataset_info import DatasetInfo
from towers.training.train import train

pytestmark = pytest.mark.usefixtures("small")
TRAIN, (TEST, LABELS) = arrays(NUM_TRAIN, 0)[0] / 1.0, arrays(NUM_TEST, 1)
IMAGENET = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # torchvision's, x 255
FORMS = {
    "auto": (TRAIN.mean((0, 1, 2)), TRAIN.std((0, 1, 2))),
    "data": (TRAIN.mean((0, 1, 2)), TRAIN.std((0, 1, 2))),
    "imagenet": IMAGENET,
    "-1..1": (127.5, 127.5),
    "0..1": (0, 255),
    "none": (0, 1),
    "0.5:0.25": (127.5, 63.75),
    "0.2:0.1,0.4,1": (51, (25.5, 102, 255)),
}


def standardized(mean, std):
    return (TEST - np.asarray(mean)) / np.asarray(std)


def logits_of(tensors, inputs, kind="params"):
    """Those of the linear network, in float64."""
    flat = inputs.reshape(len(inputs), -1)
    return flat @ tensors[f"{kind}/logits/kernel"] + tensors[f"{kind}/logits/bias"]


@pytest.mark.parametrize("form", FORMS)
def test_images_are_standardized_by_the_numbers_of_each_form(form):
    parts = builder.build(small_config(standardize=form))
    inputs = parts.augment.evaluate(TEST)
    expected = standardized(*FORMS[form])
    np.testing.assert_allclose(inputs, expected, rtol=1e-5, atol=1e-5)


def test_all_uses_of_a_run_standardize_as_its_training(tmp_path, monkeypatch):
    config = small_config(standardize="imagenet", ema_decay=0.0, max_steps=3)
    train(tmp_path, config)
    expected = logits_of(saved(tmp_path).tensors, standardized(*IMAGENET))
    probabilities = special.softmax(expected, axis=1)
    loss = log_loss(LABELS, probabilities, labels=range(5))
    assert evaluate(tmp_path)["test_loss"] == pytest.approx(loss, rel=1e-4)
    ours = predict(tmp_path, TEST).probabilities
    np.testing.assert_allclose(ours, probabilities, rtol=1e-4, atol=1e-5)
    run = load_run(tmp_path)
    logits = run.model(run.preprocess(TEST))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(comparison, "predict_in_new_process", exported)
    for kind in ("saved_model", "keras"):
        logits, _ = exported(kind, export(tmp_path, kind), TEST)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def exported(kind, path, images):
    names, call = getattr(load_in_new_process, kind)(str(path))
    return np.asarray(call(images)), tuple(names)


def test_a_run_that_starts_from_a_run_has_its_standardization(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    train(first, small_config(standardize="0.5:0.25", max_steps=1))
    train(second, small_config(init_from=str(first), max_steps=2))
    shutil.rmtree(first)  # is not needed any more
    train(second, small_config(init_from=str(first), max_steps=4))
    assert saved(second).step == 4
    inputs = load_run(second).preprocess(TEST)
    np.testing.assert_allclose(inputs, standardized(127.5, 63.75), atol=1e-5)
    other = small_config(init_from=str(first), standardize="imagenet")
    with pytest.raises(ConfigError, match="standardize was 'auto' and is 'imagenet'"):
        train(second, other)
    train(second, other, allow_change=("standardize",))
    inputs = load_run(second).preprocess(TEST)
    np.testing.assert_allclose(inputs, standardized(*IMAGENET), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [k for k, row in MODELS.items() if row.pretrained])
def test_published_weights_bring_their_preprocessing(name):
    config = small_config(model=name, init_from="weights.safetensors")
    data = standardize(config, small_data(), model=None)
    moments = np.array([data.mean, data.std]) / 255
    row = MODELS[name].pretrained
    np.testing.assert_allclose(moments, [row.mean, row.std])
    on_files = dataclasses.replace(config, dataset="image_folder", image_size=64)
    resize = with_options_of_weights(on_files, None)
    assert resize.interpolation == row.interpolation
    assert resize.center_crop == row.crop
    for left in (config, dataclasses.replace(on_files, init_from="")):
        assert with_options_of_weights(left, None) == left
    given = dataclasses.replace(on_files, interpolation="bilinear", center_crop=0.5)
    assert with_options_of_weights(given, None) == given


@pytest.fixture
def files(tmp_path):
    """Options of a data set of photos of different sizes."""
    for name, number in itertools.product(("cat", "dog"), range(6)):
        path = tmp_path / "photos" / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(random_pixels(number, 40 + number, 30)))
    return {"dataset": "image_folder", "data_dir": str(tmp_path / "photos")}


def test_a_run_keeps_the_resize_of_its_weights(tmp_path, files):
    first, second = tmp_path / "first", tmp_path / "second"
    options = {"image_size": 16, "interpolation": "bicubic", "center_crop": 0.75}
    train(first, small_config(**files, **options, max_steps=1))
    config = small_config(**files, image_size=16, init_from=str(first))
    train(second, dataclasses.replace(config, max_steps=1))
    shutil.rmtree(first)  # is not needed any more
    train(second, dataclasses.replace(config, max_steps=2))
    stored = load_run(second).config
    assert (stored.interpolation, stored.center_crop) == ("bicubic", 0.75)
    padded = dataclasses.replace(config, fit="pad", init_from=str(second), max_steps=1)
    train(first, padded)
    stored = load_run(first).config
    assert (stored.interpolation, stored.center_crop) == ("bicubic", 0.0)
    train(
        tmp_path / "third",
        dataclasses.replace(padded, fit="auto", init_from=str(first)),
    )
    assert load_run(tmp_path / "third").config.fit == "pad"
    other = dataclasses.replace(config, interpolation="bilinear")
    with pytest.raises(ConfigError, match="interpolation was 'bicubic' and is"):
        train(second, other)


def test_files_of_different_sizes_get_the_size_of_the_weights(files):
    for init_from, size in (("imagenet", 224), ("", 64)):
        config = small_config(**files, model="deit_tiny", init_from=init_from)
        data = builder.load_data_set(config)
        assert data.image_shape == (size, size, 3)
        again = builder.load_data_set(config, DatasetInfo.of(data), test_only=True)
        for source in (data, again):
            image = source.test.read(tf.constant([0], tf.int64))[0]
            assert image.shape == (1, size, size, 3)


def test_a_network_that_rescales_gets_the_pixels(tmp_path):
    with keras_settings():
        images = keras.Input((8, 8, 3))
        x = layers.Rescaling(1 / 127.5, -1.0)(images)
        x = layers.GlobalMaxPooling2D()(layers.Conv2D(4, 3, activation="relu")(x))
        model = keras.Model(images, layers.Dense(5)(x))
    config = small_config(learning_rate=1e-30, weight_decay=0.0, max_steps=1)
    train(tmp_path, config, model=model)
    run = load_run(tmp_path)
    expected = model(TEST.astype(np.float32))
    ours = run.model(run.preprocess(TEST))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options,words",
    [
        ({"standardize": "imagnet"}, "did you mean 'imagenet'"),
        ({"standardize": "0.5"}, "MEAN:STD"),
        ({"standardize": "0.5:0"}, "MEAN:STD"),
        ({"standardize": "123.7:58.4"}, "divided by 255"),
        ({"standardize": "nan:0.5"}, "MEAN:STD"),
        ({"standardize": "none", "augment": "tutorial"}, "each image by itself"),
    ],
)
def test_what_does_not_standardize_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        small_config(**options)


def test_variances_of_keras_for_imagenet_become_those_of_pixels():
    """(x - mean) / sqrt(variance) with that of torchvision, and no other is changed."""
    std = np.array([0.229, 0.224, 0.225])
    for name, values, expected in (
        ("EfficientNetB3", std, std**2),
        ("EfficientNetB3", std**2, std**2),
        ("EfficientNetV2B0", std, std),
    ):
        state = {"state/normalization/variance": values, "step": np.int64()}
        correct_variances(name, state)
        np.testing.assert_allclose(state["state/normalization/variance"], expected)
