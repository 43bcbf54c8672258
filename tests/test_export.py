"""Exports: what other programs load is the run's network, whole or not there."""

import importlib
import io
import os
import pathlib
import shutil
import types

import keras
import numpy as np
import pytest
import small_runs
import tensorflow as tf
from exported import random_images, random_run
from keras import layers
from marks import slow
from pictures import png
from PIL import Image
from small_runs import CLASS_NAMES, IMAGE_SHAPE, NUM_TRAIN, arrays, saved, small_config

from towers import export as exports
from towers.config import Config
from towers.config.choices import AUGMENTS, FAMILY, MODELS
from towers.data import pixels, resizing, synthetic
from towers.errors import ConfigError, DataError, ExportError
from towers.export import (
    FORMATS,
    check,
    export,
    keras_file,
    outside,
    saved_model,
    staging,
    story,
    tflite_file,
)
from towers.export.examples import images_of
from towers.export.stock import stock_network, with_preprocessing
from towers.models.inference import without_noise
from towers.models.layers import BatchNormalization, GroupedConv2D
from towers.run import initial
from towers.run.weights import open_weights
from towers.training import train

DEPENDABLE = [name for name, row in FORMATS.items() if not row.packages]
NETWORKS = [name for name in MODELS if not name.endswith(FAMILY)]
NETWORKS += ["keras:ResNet50", "keras:ConvNeXtTiny", "keras:MobileNetV3Small"]
FAST_NETWORKS = ("cnn", "convmixer_256_8", "resnet20", "speedrun")


@pytest.fixture
def half_way(tmp_path, monkeypatch):
    """A run of the linear network, whose moving averages are not its parameters."""
    small_runs.use(monkeypatch)
    return small_runs.half_way(tmp_path / "run")


def loaded(format, path):
    """Class names and logits as the program outside loads them, in this process."""
    with pytest.warns() if format == "tflite" else tf.init_scope():
        return getattr(outside, format)(str(path))


def predict_here(format, path, images):
    """`check.predict` without the time that a new process takes to import."""
    names, predict = loaded(format, path)
    return np.asarray(predict(images)), tuple(names)


@pytest.fixture
def same_process(monkeypatch):
    monkeypatch.setattr(check, "predict", predict_here)


def numpy_logits(workdir, images, kind="averages"):
    """Those of the linear network, in float64."""
    axes, tensors = (0, 1, 2), saved(workdir).tensors
    train_images = arrays(NUM_TRAIN, 0)[0] / 1.0
    inputs = (images - train_images.mean(axes)) / train_images.std(axes)
    kernel, bias = (tensors[f"{kind}/logits/{name}"] for name in ("kernel", "bias"))
    return inputs.reshape(len(images), -1) @ kernel + bias


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# What is inside.


@pytest.mark.parametrize("format", DEPENDABLE)
def test_an_export_gives_the_logits_of_numpy(half_way, format, capsys):
    path = export(half_way, format)
    assert path.parent == half_way / "export" and os.listdir(path.parent) == [path.name]
    first, last = capsys.readouterr().out.splitlines()
    assert "the moving averages of the parameters of step 5" in first
    assert "in a new process" in last and last.endswith("on 23 test images")
    images = np.random.default_rng(2).integers(0, 256, (7, *IMAGE_SHAPE), np.uint8)
    names, predict = loaded(format, path)
    assert tuple(names) == CLASS_NAMES
    expected = numpy_logits(half_way, images)
    for count in (7, 1):  # the size of a batch is free
        logits = predict(images[:count])
        np.testing.assert_allclose(logits, expected[:count], rtol=1e-4, atol=1e-5)
    assert np.abs(expected - numpy_logits(half_way, images, "params")).max() > 1e-2


@pytest.mark.parametrize("precision,most", [slow("float16", 0.01), ("int8", 0.05)])
def test_fewer_bits_change_the_logits_a_little(half_way, same_process, precision, most):
    path = export(half_way, "tflite", precision=precision)
    assert path.name == f"model-{precision}.tflite"
    images = arrays(small_runs.NUM_TEST, 1)[0]
    logits = predict_here("tflite", path, images)[0]
    expected = numpy_logits(half_way, images)
    assert 0 < np.abs(logits - expected).max() < most * np.abs(expected).max()


@pytest.mark.slow
def test_in_int8_an_image_of_little_contrast_is_as_good_as_another(tmp_path):
    """Each is standardized by itself: these go into the network alike."""
    run, path = random_run("lenet", "tutorial"), tmp_path / "model.tflite"
    drawn = np.random.default_rng(0).integers(0, 256, (64, 32, 32, 3), np.uint8)
    network = story.trained_network(run)
    tflite_file.write(path, network, run, "int8", drawn)
    dull = 100 + (drawn[:8] > 127).astype(np.uint8)
    for images in (drawn[:8], dull, np.full_like(dull, 100)):
        logits, expected = (
            predict_here("tflite", path, images)[0],
            story.logits_of(run, network, images),
        )
        assert check.largest_difference(logits, expected) < 0.05


@pytest.mark.parametrize(
    "name",
    [name if name in FAST_NETWORKS else slow(name) for name in NETWORKS],
)
def test_stock_layers_compute_what_ours_do(name):
    run = random_run(name, width=1.0 if ":" in name else 0.1)
    trained = run.network()
    network = stock_network(trained)
    assert all(type(x).__module__.startswith("keras.") for x in network.layers)
    assert [x.name for x in network.inputs] == ["images"]
    inputs = np.random.default_rng(1).normal(0, 1, (3, 32, 32, 3)).astype(np.float32)
    expected = without_noise(trained)(inputs, training=False).numpy()
    logits = network(inputs, training=False).numpy()
    assert check.largest_difference(logits, expected) < 1e-5
    assert np.abs(expected).max() > 0.01
    ours, theirs = (
        sum(
            np.prod(v.shape)
            for v in model.trainable_variables
            if "whitening" not in v.path
        )
        for model in (trained, network)
    )
    assert ours == theirs


@pytest.mark.parametrize("image_shape", [(32, 32, 3), (27, 30, 1)])
@pytest.mark.parametrize("augment", AUGMENTS)
def test_stock_layers_preprocess_as_an_evaluation(augment, image_shape):
    run = random_run("lenet", augment, image_shape)
    network = stock_network(run.network())
    images = random_images(run)
    images[0] = 77  # without any contrast
    expected = network(run.preprocess(images))
    logits = with_preprocessing(network, run)(images)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-6)


def test_stock_layers_preprocess_a_channel_that_is_the_same_everywhere():
    run = random_run("lenet", deviation=(0.0, 62.1, 66.7))
    network, images = stock_network(run.network()), random_images(run)
    logits = with_preprocessing(network, run)(images)
    np.testing.assert_allclose(logits, network(run.preprocess(images)), rtol=1e-4)


def frozen_network(*, image_shape, num_classes, width, regularizer):
    """A depthwise convolution, which an export replaces, normalization of ours, and a
    layer of Keras."""
    x = images = keras.Input(image_shape, name="images")
    for name in ("stem", "body"):
        x = GroupedConv2D(3, 3, groups=3, use_bias=False, name=f"{name}_conv")(x)
        x = BatchNormalization(momentum=0.5, name=f"{name}_norm")(x)
    x = layers.Flatten(name="flatten")(x)
    return keras.Model(images, layers.Dense(num_classes, name="logits")(x))


def test_what_was_frozen_stays_when_keras_trains_the_export(tmp_path, monkeypatch):
    small_runs.use(monkeypatch, frozen_network)
    run = random_run("cnn", "none", IMAGE_SHAPE, freeze="stem*,body_norm/beta")
    path = tmp_path / "model.keras"
    keras_file.write(path, stock_network(story.trained_network(run)), run)
    model = keras.saving.load_model(path)
    network = model.layers[-1]
    before = {v.path: v.numpy() for v in network.variables}
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    model.fit(random_images(run), np.ones((4, 10)), verbose=0)
    kept = {v.path for v in network.variables if np.array_equal(v, before[v.path])}
    parts = ("gamma", "beta", "moving_mean", "moving_variance")
    norm = {f"stem_norm/{part}" for part in parts}
    assert kept == {"stem_conv/kernel"} | norm and len(before) == 12


RETURNING = ["convmixer_256_8", "speedrun", "alexnet", "alexnet_two_columns"]


@pytest.mark.parametrize("name", [*RETURNING, slow("keras:ConvNeXtTiny")])
def test_a_keras_file_comes_back_whole_but_for_columns(name, tmp_path):
    run = random_run(name, width=1.0 if ":" in name else 0.1)
    path = tmp_path / "model.keras"
    keras_file.write(path, stock_network(run.network()), run)
    kinds = ("params", "state")
    tensors = {k: v for k, v in run.tensors.items() if k.partition("/")[0] in kinds}
    state = {k: np.zeros_like(v) for k, v in tensors.items()}
    with open_weights(str(path)) as weights:
        taken, missing, drawn = initial._fill(state, weights)
    columns = ("conv2", "conv4", "conv5") if "columns" in name else ()
    assert not drawn
    assert set(missing) == {
        f"params/{column}/{part}" for column in columns for part in ("kernel", "bias")
    }
    for key in taken:
        np.testing.assert_array_equal(state[key], tensors[key], err_msg=key)


def test_a_saved_model_takes_files_of_images(tmp_path):
    run = random_run("lenet")
    saved_model.write(tmp_path / "model", stock_network(run.network()), run)
    signatures = tf.saved_model.load(tmp_path / "model").signatures
    sizes = ((32, 32), (32, 32), (50, 90), (31, 20))
    rng = np.random.default_rng(0)
    files, images = [], []
    for size, kind in zip(sizes, ("PNG", "BMP", "PNG", "JPEG"), strict=True):
        file = io.BytesIO()
        drawn = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(drawn).save(file, kind)
        files.append(file.getvalue())
        images.append(saved_model.decode(tf.constant(files[-1]), (32, 32, 3)).numpy())
        fitted = resizing.fit(pixels.decode(files[-1], 3), (32, 32), 32)
        differences = np.abs(images[-1].astype(int) - fitted)
        assert differences.max() <= 1 and differences.mean() < 0.05
    logits = signatures["encoded_images"](encoded_images=tf.constant(files))["logits"]
    results = signatures["serving_default"](images=tf.constant(np.stack(images)))
    np.testing.assert_allclose(logits, results["logits"], rtol=1e-4, atol=1e-6)
    sums = results["probabilities"].numpy().sum(1)
    np.testing.assert_allclose(sums, np.ones(4), rtol=1e-5)


# What is refused.


def test_without_memory_it_is_not_the_disk_that_is_named(tmp_path):
    with pytest.raises(tf.errors.ResourceExhaustedError):
        with staging.writing(tmp_path):
            tf.zeros([2**30, 2**30])


def test_what_gives_other_logits_is_removed(half_way, same_process, monkeypatch):
    """Here the raw parameters in place of the moving averages."""
    run = story.read_run(half_way)
    monkeypatch.setattr(story, "stock_network", lambda _: stock_network(run.network()))
    with pytest.raises(ExportError, match="differ from those of the run by 0.* of the"):
        export(half_way, "keras")
    assert files_in(half_way / "export") == []


def test_what_another_process_cannot_load_is_removed(half_way, monkeypatch):
    monkeypatch.setattr(keras_file, "write", lambda path, *_: path.write_text("no"))
    with pytest.raises(ExportError, match="in a new process it ends with .*Error: "):
        export(half_way, "keras")
    assert files_in(half_way / "export") == []


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name,make,words",
    [
        ("a.keras", lambda p: p.symlink_to("/etc"), "is a symbolic link"),
        ("a.keras", os.mkfifo, "is a FIFO"),
        ("a.keras", os.mkdir, "is a folder and no such export"),
        ("a", lambda p: shutil.copytree("docs", p), "is a folder and no such export"),
        ("a", lambda p: p.write_text("mine"), "is a file and no such export"),
        ("a.h5", lambda p: None, "must end with .keras"),
        ("a/b.keras", lambda p: p.parent.write_text("mine"), "a is a file"),
    ],
)
def test_row_45_what_stands_there_is_not_touched(
    tmp_path, name, make, words, overwrite
):
    output = tmp_path / name
    make(output)
    before = small_runs.snapshot(tmp_path)
    with pytest.raises(ConfigError, match=words):
        staging.check_output(output, ".keras" if "." in name else "", overwrite)
    assert small_runs.snapshot(tmp_path) == before


@pytest.mark.parametrize("format", ["saved_model", slow("keras")])
def test_row_45_an_earlier_export_is_replaced_if_that_is_wanted(
    half_way, same_process, format
):
    path = export(half_way, format)
    before = small_runs.snapshot(path.parent)
    with pytest.raises(ConfigError, match="exists; --overwrite replaces it"):
        export(half_way, format)
    assert small_runs.snapshot(path.parent) == before
    train(half_way, small_config())
    export(half_way, format, overwrite=True)
    assert os.listdir(path.parent) == [path.name]
    images = arrays(3, 1)[0]
    logits = predict_here(format, path, images)[0]
    np.testing.assert_allclose(
        logits, numpy_logits(half_way, images), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("format", ["saved_model", "keras"])
def test_row_45_what_appears_meanwhile_is_not_touched(half_way, monkeypatch, format):
    output = half_way / f"mine{FORMATS[format].suffix}"

    def predict(*args):
        output.write_text("mine")
        return predict_here(*args)

    monkeypatch.setattr(check, "predict", predict)
    with pytest.raises(ConfigError, match=f"{output} (exists|is a file)"):
        export(half_way, format, output)
    assert output.read_text() == "mine"


def test_row_45_an_export_that_gets_no_name_leaves_the_earlier_one(
    tmp_path, monkeypatch
):
    output = tmp_path / "model"
    output.mkdir()
    (output / "saved_model.pb").write_text("earlier")
    before, rename = small_runs.snapshot(tmp_path), os.rename

    def fail_once(source, target):
        if target == output:
            monkeypatch.setattr(os, "rename", rename)
            raise OSError("no name")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail_once)
    with pytest.raises(ExportError, match="no name"), staging.staged(output) as path:
        path.mkdir()
    assert small_runs.snapshot(tmp_path) == before


@pytest.mark.parametrize("format", DEPENDABLE)
def test_row_45_on_a_full_disk_nothing_is_left(small_disk, format):
    run = random_run("lenet", width=2.0)  # of 2 MB
    network, row = stock_network(run.network()), FORMATS[format]
    output = small_disk / f"export/model{row.suffix}"
    writer = importlib.import_module(f"towers.export.{row.writer}")
    with pytest.raises(ExportError, match="cannot be written: .*bytes are free"):
        with staging.staged(output) as path, staging.writing(output):
            writer.write(path, network, run)
    assert files_in(small_disk) == ["export"]


def test_row_45_a_folder_that_cannot_be_written_is_refused(half_way):
    with pytest.raises(ConfigError, match="cannot be written: .*another --output"):
        export(half_way, "keras", "/proc/none/model.keras")


@pytest.mark.parametrize("format,precision", [("onnx", "int8"), ("keras", "float16")])
def test_a_precision_of_another_format_is_refused(tmp_path, format, precision):
    with pytest.raises(ConfigError, match=f"precision={precision} .*--format=tflite"):
        export(tmp_path, format, precision=precision)


def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path, monkeypatch):
    row = exports.Format("onnx_file", ".onnx", packages=("no_onnx",), extra="onnx")
    monkeypatch.setitem(FORMATS, "onnx", row)
    with pytest.raises(ConfigError, match=r"needs no_onnx.* pip install '\.\[onnx\]'"):
        export(tmp_path, "onnx")


# Images to compare with.


def lose_the_data(monkeypatch, error=DataError):
    def load(data_dir):
        raise error("moved away")

    monkeypatch.setattr(synthetic, "load", load)


@pytest.mark.parametrize("error", [DataError, ConfigError])
def test_without_the_data_set_images_are_drawn_and_said_so(
    half_way, same_process, monkeypatch, capsys, error
):
    """It may be in a file of the user that is missing: a ConfigError."""
    lose_the_data(monkeypatch, error)
    export(half_way, "keras")
    assert "on 64 drawn images, as the data set cannot be" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="precision=int8 .*--images"):
        export(half_way, "tflite", precision="int8")
    with pytest.raises(DataError, match="moved away"):
        export(half_way, "saved_model", data_dir="elsewhere")


@pytest.mark.slow
def test_files_of_images_take_the_place_of_the_data_set(
    half_way, same_process, monkeypatch, tmp_path, capsys
):
    lose_the_data(monkeypatch)
    folder = tmp_path / "images"
    folder.mkdir()
    for index, image in enumerate(arrays(9, 1)[0]):
        Image.fromarray(image.repeat(3, 0).repeat(3, 1)).save(folder / f"{index}.png")
    export(half_way, "tflite", precision="int8", images=[str(folder)])
    assert "on 9 of the given images" in capsys.readouterr().out
    (folder / "8.png").write_text("no image")
    with pytest.raises(DataError, match="images: .*8.png: "):
        export(half_way, "saved_model", images=[str(folder)])
    (folder / "8.png").unlink()
    os.mkfifo(folder / "8.png")
    with pytest.raises(DataError, match="images: .*8.png: is no file"):
        export(half_way, "saved_model", images=folder)


def test_of_many_files_some_of_every_folder_are_taken(tmp_path):
    """Each image has its number in the list in its colors."""
    for index in range(600):
        folder = tmp_path / ("cats" if index < 300 else "dogs" if index < 500 else "x")
        folder.mkdir(exist_ok=True)
        pixels = np.full((2, 2, 3), [0, *divmod(index, 256)], np.uint8)
        (folder / f"{index:03}.png").write_bytes(png(pixels))
    (tmp_path / "cats" / "001.png").write_text("not chosen, so it is not read")
    run = types.SimpleNamespace(image_shape=(2, 2, 3), config=Config())
    compared, calibration, _ = images_of(run, paths=tmp_path)
    for images, count in ((compared, 64), (calibration, 256)):
        numbers = images[:, 0, 0] @ [0, 256, 1]
        assert len(numbers) == count and numbers[0] == 0 and numbers[-1] == 599
        places = np.arange(count) * 599 / (count - 1)
        assert np.abs(numbers - places).max() < 4


# Files of the user.

OWN = """
    import keras
    from towers.data.augment import Augment, none

    class Twice(keras.layers.Layer):
        def call(self, x):
            return x + x

    def create_model(*, image_shape, num_classes):
        images = keras.Input(image_shape, name="images")
        x = keras.ops.relu(Twice(name="twice")(images))
        x = keras.layers.Flatten(name="flatten")(x)
        return keras.Model(images, keras.layers.Dense(num_classes, name="logits")(x))
"""


@pytest.mark.parametrize("option", ["model", "augment"])
def test_what_is_no_stock_layer_goes_to_other_formats(
    tmp_path, monkeypatch, same_process, option
):
    small_runs.use(monkeypatch)
    monkeypatch.chdir(tmp_path)
    pathlib.Path("own.py").write_text("\n".join(x[4:] for x in OWN.splitlines()))
    name = {"model": "create_model", "augment": "none"}[option]
    train("run", small_config(**{option: f"own.py:{name}"}, max_steps=1))
    with pytest.raises(ConfigError, match="no stock layer of Keras.*saved_model"):
        export("run", "keras")
    assert export("run", "saved_model").is_dir()


def test_the_formats_are_those_of_the_page_and_of_the_program_outside():
    page = pathlib.Path(__file__).parents[1] / "docs" / "export.md"
    for name, row in FORMATS.items():
        assert f"\n| `{name}` |" in page.read_text()
        assert hasattr(outside, name) and hasattr(
            importlib.import_module(f"towers.export.{row.writer}"), "write"
        )
