"""Exports: what other programs load is the run's network, whole or not there."""

import dataclasses
import io
import json
import os
import textwrap
import types
import zipfile

import keras
import numpy as np
import pytest
import small_runs
import tensorflow as tf
from exported import PAGE, draw_odd_photos, programs, random_images, random_run
from marks import slow
from networks import KINDS
from pictures import chunk, file_of
from PIL import ExifTags, Image, ImageOps
from safetensors import safe_open
from safetensors.numpy import load_file
from sklearn.metrics import f1_score
from small_runs import CLASS_NAMES, IMAGE_SHAPE, arrays, numpy_logits, small_config
from tensorflow.lite.tools import flatbuffer_utils

from towers import load_run
from towers.config.choices import AUGMENTS, MODELS
from towers.data.files.image import read_image
from towers.data.sets import synthetic
from towers.errors import ConfigError, DataError, DoubtfulExport
from towers.exporting import comparison, load_in_new_process, staging, writers
from towers.exporting.comparison import images_of
from towers.exporting.encoded_images import decode_image
from towers.exporting.export import export
from towers.exporting.formats import FORMATS
from towers.exporting.stock import stock_network, with_preprocessing
from towers.exporting.writers import write_keras, write_safetensors, write_saved_model
from towers.models.create import without_noise
from towers.models.layers.blocks import Builder
from towers.models.variables import keras_settings
from towers.models.zoo import vit
from towers.pretrained import initial, torch_names
from towers.training.train import train

NETWORKS = [*KINDS, "keras:ResNet50", "keras:ConvNeXtTiny", "keras:MobileNetV3Small"]
FAST_NETWORKS = ("cnn", "resnet20")


def predict_here(format, path, images):
    """`comparison.predict_in_new_process` without the time that a process takes."""
    with pytest.warns() if format == "tflite" else tf.init_scope():
        names, predict = getattr(load_in_new_process, format)(str(path))
    return np.asarray(predict(images)), tuple(names)


@pytest.fixture
def same_process(monkeypatch):
    monkeypatch.setattr(comparison, "predict_in_new_process", predict_here)


# What is inside.


@pytest.mark.row(51)
def test_an_export_stays_until_it_is_overwritten(
    half_way, same_process, capsys, monkeypatch
):
    images = arrays(small_runs.NUM_TEST, 1)[0]
    monkeypatch.setenv("HOME", str(half_way.parent))
    path = export(f"~/{half_way.name}", "keras")
    earlier = numpy_logits(half_way, images)
    assert np.abs(earlier - numpy_logits(half_way, images, "params")).max() > 1e-2
    first, last = capsys.readouterr().out.splitlines()
    assert "the EMA weights of step 5" in first
    assert "on 23 test images: largest difference" in last
    train(half_way, small_config())
    with pytest.raises(ConfigError, match="exists; --overwrite replaces it"):
        export(half_way, "keras")
    for is_new, expected in enumerate([earlier, numpy_logits(half_way, images)]):
        if is_new:
            export(half_way, "keras", overwrite=True)
        logits, names = predict_here("keras", path, images)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
        assert names == CLASS_NAMES
    assert os.listdir(half_way / "export") == [path.name]


@pytest.mark.row(53)
def test_files_of_the_user_stay_in_a_saved_model(half_way, same_process, capsys):
    path = export(half_way, "saved_model")
    mine = ["assets.extra/tf_serving_warmup_requests", "notes.txt", "variables/a.txt"]
    for name in mine:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(name)
    written = {p for p in path.rglob("*") if p.is_file()}
    # Another process was killed when the export had lost its name.
    path.rename(path.with_name(".tmp-replaced-saved_model"))
    train(half_way, small_config())
    capsys.readouterr()
    export(half_way, "saved_model", overwrite=True)
    stay = [x for x in capsys.readouterr().out.splitlines() if " stays: " in x]
    named = "assets.extra", "notes.txt", "variables/a.txt"
    assert [x.split()[0] for x in stay] == [f"{path / name}" for name in named]
    assert all((path / name).read_text() == name for name in mine)
    assert {p for p in path.rglob("*") if p.is_file()} == written
    images = arrays(small_runs.NUM_TEST, 1)[0]
    logits, _ = predict_here("saved_model", path, images)
    expected = numpy_logits(half_way, images)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.row(51, 53)
def test_what_killed_exports_left_is_removed(half_way, same_process, capsys):
    """Not what a living process, or another program, has there."""
    folder = half_way / "export"
    left = ".tmp-99999999-model.keras", ".tmp-99999999-model.keras-a1b2c3d4"
    others = f".tmp-{os.getppid()}-model.keras", ".tmp-99999999-mine"
    for name in (*left, *others):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("1234")
    export(half_way, "keras")
    assert {*os.listdir(folder)} == {"model.keras", *others}
    assert capsys.readouterr().out.count("left by an interrupted export: 4 bytes") == 2


@pytest.mark.parametrize("precision,most", [slow("float16", 0.01), ("int8", 0.05)])
def test_fewer_bits_change_the_logits_a_little(half_way, same_process, precision, most):
    path = export(half_way, "tflite", precision=precision)
    assert path.name == f"model-{precision}.tflite"
    images = arrays(small_runs.NUM_TEST, 1)[0]
    logits, _ = predict_here("tflite", path, images)
    expected = numpy_logits(half_way, images)
    assert 0 < np.abs(logits - expected).max() < most * np.abs(expected).max()


@pytest.mark.parametrize(
    "name", [name if name in FAST_NETWORKS else slow(name) for name in NETWORKS]
)
def test_stock_layers_compute_what_ours_do(name):
    width = 1.0 if ":" in name else 0.34 if name == "vit_small" else 0.1
    trained = random_run(name, width=width).network()
    network = stock_network(trained)
    assert all(type(x).__module__.startswith("keras.") for x in network.layers)
    inputs = np.random.default_rng(1).normal(0, 1, (3, 32, 32, 3)).astype(np.float32)
    expected = without_noise(trained)(inputs, training=False).numpy()
    logits = network(inputs, training=False).numpy()
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(expected).max() > 0.01


@pytest.mark.parametrize("axis", [-1, [1, 2, 3]])
def test_stock_layers_normalize_images_of_one_pixel_as_keras(axis):
    images = keras.Input((1, 2, 8), name="images")
    layer = keras.layers.LayerNormalization(axis=axis, name="norm")
    model = keras.Model(images, layer(images))
    rng = np.random.default_rng(0)
    layer.set_weights([rng.normal(size=x.shape) for x in layer.weights])
    inputs = rng.normal(size=(3, 1, 2, 8)).astype(np.float32)
    logits = stock_network(model)(inputs)
    np.testing.assert_allclose(logits, model(inputs), rtol=1e-5, atol=1e-6)


def test_stock_layers_have_the_positions_and_the_token_that_were_learned():
    options = MODELS["deit_tiny"].options | {"channels": 8, "depth": 1, "heads": 2}
    with keras_settings():
        trained = vit.create_model(Builder((8, 12, 3), num_classes=5), **options)
    rng = np.random.default_rng(0)
    for variable in trained.variables:
        variable.assign(rng.normal(size=variable.shape))
    images = rng.normal(size=(3, 8, 12, 3)).astype(np.float32)
    network = stock_network(trained)
    np.testing.assert_allclose(network(images), trained(images), rtol=1e-4, atol=1e-4)
    values = {x.path: x.numpy() for x in trained.variables}
    parts = [values[f"block1_{x}/kernel"].T for x in ("query", "key", "value")]
    theirs = torch_names.state_dict(trained, vit.torch_names({})[0])
    qkv = theirs["blocks.0.attn.qkv.weight"]
    np.testing.assert_array_equal(qkv, np.concatenate(parts))
    assert all(x.trainable for x in network.layers)
    counts = {
        sum(v.numpy().size for v in x.trainable_variables) for x in (trained, network)
    }
    assert len(counts) == 1


@pytest.mark.parametrize("augment", AUGMENTS)
def test_stock_layers_preprocess_as_an_evaluation(augment):
    """Also a channel that is the same in all images."""
    for image_shape in (32, 32, 3), (27, 30, 1):
        run = random_run("lenet", augment, image_shape, std=(0.0, 62.1, 66.7))
        network, images = stock_network(run.network()), random_images(run)
        images[0] = 77  # without any contrast
        expected = network(run.preprocess(images))
        logits = with_preprocessing(network, run)(images)
        assert np.abs(expected).max() > 0.01
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-6)


def test_keras_drops_whole_images_where_the_network_does():
    run = random_run("resnet20", width=0.1, stochastic_depth=0.9)
    network = stock_network(run.network())
    drops = [x for x in network.layers if isinstance(x, keras.layers.Dropout)]
    assert [x.rate for x in drops] == pytest.approx([0.1 * i for i in range(1, 10)])
    dropped = drops[4](np.ones((200, 2, 2, 3), np.float32), training=True).numpy()
    assert set(np.unique(dropped)) == {0.0, 2.0}
    assert np.all(dropped == dropped[:, :1, :1, :1])


def test_what_a_run_has_frozen_is_not_trainable_in_keras():
    run = random_run("lenet", freeze="conv1/*")
    network = stock_network(comparison.trained_network(run))
    assert [x.name for x in network.layers if not x.trainable] == ["conv1"]


@pytest.mark.parametrize(
    "name",
    ["speedrun", "alexnet_two_columns"]
    + [
        slow(x)
        for x in (
            "deit_tiny",
            "convnext_tiny",
            "convnextv2_atto",
            "keras:ConvNeXtTiny",
            "tiny_vit_5m",
            "dinov2_small_reg",
            "dinov3_small",
        )
    ],
)
def test_a_run_starts_from_all_of_a_keras_file_but_columns(name, tmp_path, capsys):
    run = random_run(name, width=1.0 if ":" in name else 0.1)
    write_keras(tmp_path / "a.keras", stock_network(run.network()), run)
    tensors = {k: v for k, v in run.tensors.items() if not k.startswith("averages/")}
    state = {key: np.zeros_like(value) for key, value in tensors.items()}
    trainer = types.SimpleNamespace(state=lambda: state, load=lambda state: None)
    initial.start_from(trainer, str(tmp_path / "a.keras"), run.config.model)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    missing = {line[2] for line in lines if line[-3:] == ["is", "not", "there"]}
    columns = ("conv2", "conv4", "conv5") if "columns" in name else ()
    assert missing == {f"params/{x}/{y}" for x in columns for y in ("kernel", "bias")}
    for key in set(state) - missing:
        np.testing.assert_array_equal(state[key], tensors[key], err_msg=key)


def test_a_saved_model_takes_files_of_images(tmp_path):
    run = random_run("lenet", image_size=32, center_crop=0.83, interpolation="bicubic")
    write_saved_model(tmp_path / "model", stock_network(run.network()), run)
    signatures = tf.saved_model.load(tmp_path / "model").signatures
    rng, contents, images = np.random.default_rng(0), [], []
    for *size, kind in (32, 32, "BMP"), (50, 90, "PNG"), (31, 20, "JPEG"):
        drawn = rng.integers(0, 256, (*size, 3), np.uint8)
        contents.append(file_of(Image.fromarray(drawn), kind))
        for share, name, fit in (
            (1.0, "bilinear", "crop"),
            (1.0, "bicubic", "pad"),
            (1.0, "bilinear", "stretch"),
            (0.83, "bicubic", "auto"),
        ):
            options = {"center_crop": share, "interpolation": name, "fit": fit}
            image = decode_image(tf.constant(contents[-1]), (32, 32, 3), **options)
            image = image.numpy()
            by_pillow = read_image(contents[-1], (32, 32, 3), **options)
            differences = np.abs(image.astype(int) - by_pillow)
            assert differences.max() <= 1 and differences.mean() < 0.05
        images.append(image)
    encoded = signatures["encoded_images"](tf.constant(contents))
    results = signatures["serving_default"](tf.constant(np.stack(images)))
    logits = results["logits"].numpy()
    np.testing.assert_allclose(encoded["logits"], logits, rtol=1e-4, atol=1e-6)
    classes = [name.decode() for name in encoded["class"].numpy()]
    assert classes == [run.class_names[i] for i in logits.argmax(1)]
    sums = results["probabilities"].numpy().sum(1)
    np.testing.assert_allclose(sums, np.ones(3), rtol=1e-5)


def drawn_image(width, height, mode="RGB"):
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(0, 256, (9, 7, 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height))).astype(np.uint8)
    noise = rng.integers(0, 64, smooth.shape, np.uint8)
    return Image.fromarray(smooth // 2 + noise).convert(mode)


def by_pillow(content, channels):
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    pixels = np.asarray(image.convert("RGB" if channels == 3 else "L"))
    return pixels.reshape(*pixels.shape[:2], channels).astype(int)


def cmyk_jpegs():
    """With black, and without the segment of Adobe that Pillow writes."""
    colors, black = drawn_image(83, 61), drawn_image(83, 61, "L")
    content = file_of(Image.merge("CMYK", (*colors.split(), black)), "JPEG")
    start = content.index(b"\xff\xee")
    assert content[start + 2 : start + 9] == b"\0\x0eAdobe"
    return content, content[:start] + content[start + 16 :]


def turned_jpegs():
    for turn in range(2, 9):
        exif = Image.Exif()
        exif.endian = "<" if turn % 2 else ">"
        exif[ExifTags.Base.Make] = "camera"
        exif[ExifTags.Base.Orientation] = turn
        yield file_of(drawn_image(83, 61), "JPEG", exif=exif)
    yield file_of(drawn_image(83, 61), "JPEG", xmp=b'<a tiff:Orientation="8"/>')


@pytest.mark.parametrize("channels", [3, 1])
def test_encoded_images_have_the_pixels_of_pillow(channels):
    options = {"quality": 20}, {"subsampling": "4:2:2"}, {"progressive": True}
    options += {"keep_rgb": True}, {"restart_marker_blocks": 2}
    files = {file_of(drawn_image(83, 61), "JPEG", **x): 0 for x in options}
    files |= {file_of(drawn_image(83, 61, "L"), "JPEG"): 0}
    files |= dict.fromkeys(turned_jpegs(), 0) | dict.fromkeys(cmyk_jpegs(), 1)
    assert len(files) == 16
    for content, most in files.items():
        expected = by_pillow(content, channels)
        image = decode_image(tf.constant(content), expected.shape).numpy()
        assert np.abs(image - expected).max() <= most


def test_gray_of_a_png_does_not_depend_on_its_gamma():
    """As TensorFlow's `decode_png(channels=1)` does, which gives 137."""
    content = file_of(Image.new("RGB", (8, 8), (200, 100, 50)), "PNG")
    content = content[:33] + chunk(b"gAMA", (45455).to_bytes(4)) + content[33:]
    assert tf.io.decode_png(content, channels=1)[0, 0, 0] == 137
    assert np.unique(decode_image(tf.constant(content), (8, 8, 1))) == [124]


@pytest.mark.parametrize(
    "width,height", [(270, 300), (600, 520), (901, 1100), (135, 500)]
)
def test_encoded_images_are_reduced_and_resized_as_by_pillow(width, height):
    """Decoded at the scales 1, 1/2, 1/4 and 1, the height first in the last one."""
    content, shape = file_of(drawn_image(width, height), "JPEG"), (100, 90, 3)
    expected = read_image(content, shape).astype(int)
    image = decode_image(tf.constant(content), shape).numpy()
    assert np.abs(image - expected).max() <= 1
    assert np.mean(image != expected) < 0.02


@pytest.mark.parametrize(
    "shape,center_crop,interpolation,fit",
    [
        ((160, 160, 3), 0.875, "bicubic", "auto"),
        ((48, 40, 1), 0.0, "auto", "crop"),
        ((48, 40, 3), 0.0, "auto", "pad"),
        ((48, 40, 3), 0.0, "auto", "stretch"),
    ],
)
def test_the_page_makes_the_pixels_of_predictions(
    tmp_path, shape, center_crop, interpolation, fit
):
    options = {"center_crop": center_crop, "interpolation": interpolation, "fit": fit}
    run = random_run("lenet", image_shape=shape, image_size=shape[0], **options)
    preprocessing, page = json.loads(writers.preprocessing_json(run)), {}
    [function] = programs("From photos to images")
    exec(function, page)
    copy = textwrap.indent(function[function.index("def pixels") :], "    ")
    assert copy in (PAGE.parent / "own_images.md").read_text()
    for photo in draw_odd_photos(tmp_path):
        expected = read_image(photo.read_bytes(), shape, **options)
        pixels = page["pixels"](photo, **preprocessing).astype(int)
        assert pixels.shape == shape
        differences = np.abs(pixels - expected)
        assert differences.max() <= 3 and differences.mean() < 0.7, photo.name


@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
def test_tflite_has_the_metadata_of_the_standard(tmp_path):
    """MediaPipe reads it in `test_export_outside.py`, and needs outputs of one type."""
    run, path = random_run("lenet"), tmp_path / "a.tflite"
    info = dataclasses.replace(run.dataset_info, multi_label=True)
    run, images = dataclasses.replace(run, dataset_info=info), random_images(run, 1)
    writers.write_tflite(path, stock_network(run.network()), run)
    interpreter = tf.lite.Interpreter(str(path))
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], images)
    interpreter.invoke()
    outputs = interpreter.get_output_details()
    assert len(outputs) == 3
    assert {x["dtype"] for x in outputs} == {np.float32}
    logits = comparison.logits_of(run, run.network(), images)
    first = interpreter.get_tensor(outputs[0]["index"])
    np.testing.assert_allclose(first, run.to_probabilities(logits), rtol=1e-4)
    model = flatbuffer_utils.read_model(str(path))
    [entry] = [x for x in model.metadata if x.name == b"TFLITE_METADATA"]
    data = bytes(model.buffers[entry.buffer].data)
    assert data[4:8] == b"M001" and b"labels.txt" in data
    labels = zipfile.ZipFile(path).read("labels.txt").decode().splitlines()
    assert labels == [name.replace("\t", "\\t") for name in run.class_names]


# What is refused.


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.row(63)
def test_fewer_bits_are_judged_by_classes_and_accuracy(multi_label):
    """Not by logits, of which one differs by a quarter of the largest here."""
    rng, classes = np.random.default_rng(0), np.arange(5)
    expected = rng.normal(size=(40, 5))
    logits = expected + 0.25 * np.abs(expected).max() * np.eye(40, 5)
    labels = rng.integers(0, 5, 40)
    chosen = [x.argmax(1) for x in (logits, expected)]
    run = types.SimpleNamespace(thresholds=None, to_probabilities=lambda x: x)
    if multi_label:
        run.thresholds, labels = np.full(5, 0.5), rng.random((40, 5)) < 0.3
        chosen = [x >= 0.5 for x in (logits, expected)]
    figures = comparison.figures_of(run, logits, expected, labels)
    for name, pair in {
        "changed": chosen,
        "accuracy": (labels, chosen[0]),
        "accuracy_lost": (labels, chosen[1]),
    }.items():
        f1 = f1_score(*pair, average="micro")
        right = {"changed": 1 - f1, "accuracy_lost": f1 - figures["accuracy"]}
        assert figures[name] == pytest.approx(right.get(name, f1))
    assert figures["largest_difference"] == pytest.approx(0.25)
    assert not comparison.exceeded(figures, "int8", 40)
    assert comparison.exceeded(figures, "float32", 40)

    wrong = ~chosen[1]
    if not multi_label:
        wrong = classes == rng.permutation(chosen[1])[:, None]
    figures = comparison.figures_of(run, np.float64(wrong), expected, None)
    assert comparison.exceeded(figures, "int8", 40)
    figures = comparison.figures_of(run, expected * np.nan, expected, labels)
    assert all(comparison.exceeded(figures, x, 40) for x in ("float32", "int8"))


@pytest.mark.parametrize("difference,is_doubtful", [(4e-6, False), (4e-4, True)])
def test_rounding_of_small_logits_is_not_doubtful(difference, is_doubtful):
    run, expected = types.SimpleNamespace(thresholds=None), np.float32([[0.003, 0.001]])
    figures = comparison.figures_of(run, expected + difference, expected, None)
    assert bool(comparison.exceeded(figures, "float32", 1)) == is_doubtful


@pytest.mark.row(63)
def test_a_single_image_never_decides():
    figures = {"largest_difference": 0.3, "changed": 0.2, "accuracy_lost": 0.2}
    assert not comparison.exceeded(figures, "int8", 5)
    assert len(comparison.exceeded(figures, "int8", 50)) == 2
    figures = {"largest_difference": 0.3, "changed": 0.06, "accuracy_lost": 0.04}
    assert comparison.exceeded(figures, "int8", 50) == [
        "accuracy_lost 0.04 (at most 0.02)"
    ]


@pytest.mark.row(51, 63)
def test_what_is_not_the_network_is_kept_as_doubtful(
    half_way, same_process, monkeypatch
):
    def write_parameters(path, network, run, *_):
        """Not the moving averages."""
        write_keras(path, stock_network(run.network()), run)

    monkeypatch.setattr(writers, "write_keras", write_parameters)
    for _ in range(2):  # the second replaces nothing
        with pytest.raises(
            DoubtfulExport, match=r"keras export is doubtful.* kept as "
        ):
            export(half_way, "keras")
    assert os.listdir(half_way / "export") == ["doubtful"]
    kept = half_way / "export" / "doubtful"
    names = {"model.keras", "model-2.keras"}
    assert {*os.listdir(kept)} == names | {f"{name}.json" for name in names}
    images = arrays(small_runs.NUM_TEST, 1)[0]
    expected, logits = (
        numpy_logits(half_way, images, x) for x in ("averages", "params")
    )
    differences = np.abs(logits - expected).max() / np.abs(expected).max()
    for name in names:
        found, _ = predict_here("keras", kept / name, images)
        np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-5)
        figures = json.loads((kept / f"{name}.json").read_text())
        assert figures["largest_difference"] == pytest.approx(differences, rel=1e-3)
        changed = np.mean(logits.argmax(1) != expected.argmax(1))
        assert figures["changed"] == pytest.approx(changed)


def other_saved_model(path):
    """Of another program, which also stores names."""
    path.mkdir()
    (path / "saved_model.pb").write_bytes(b"class_names")


@pytest.mark.parametrize(
    "name,make,words",
    [
        ("a.keras", lambda p: p.symlink_to("/etc/passwd"), "is not such an export"),
        ("a", lambda p: p.write_text("mine"), "is not such an export"),
        ("a", other_saved_model, "is not such an export"),
        ("a.h5", lambda p: None, "must end with .keras"),
        ("a/b.keras", lambda p: p.parent.write_text("mine"), "a is a file"),
    ],
)
@pytest.mark.row(51)
def test_what_stands_there_is_not_touched(tmp_path, name, make, words):
    output = tmp_path / name
    make(output)
    before = small_runs.snapshot(tmp_path)
    format = FORMATS["keras" if "." in name else "saved_model"]
    with pytest.raises(ConfigError, match=words):
        staging.validate_output(output, format, True)
    assert small_runs.snapshot(tmp_path) == before


# Images to compare with.


@pytest.mark.parametrize("error", [DataError, ConfigError])
def test_without_the_data_set_images_are_drawn(half_way, monkeypatch, error):
    """It may be in a file of the user that is missing: a ConfigError."""

    def load(data_dir):
        raise error("moved away")

    monkeypatch.setattr(synthetic, "load", load)
    images, labels, calibration, origin = images_of(load_run(half_way), "int8")
    assert images.shape == (512, *IMAGE_SHAPE) and labels is calibration is None
    assert origin == "random images, because the data set cannot be read (moved away)"
    with pytest.raises(ConfigError, match=r"precision=int8 .*--images"):
        export(half_way, "tflite", precision="int8")
    with pytest.raises(DataError, match="moved away"):
        images_of(load_run(half_way), "int8", data_dir="elsewhere")


# Parameters alone, under the names of timm.


@pytest.mark.parametrize(
    "name",
    ["resnet20", *(slow(x) for x in ("deit_tiny", "tiny_vit_5m", "efficientnet_b0"))],
)
def test_a_file_of_parameters_has_their_names_and_layouts(name, tmp_path):
    run = random_run(name, width=0.1, ema_decay=0.9)
    trained, path = comparison.trained_network(run), tmp_path / "a.safetensors"
    write_safetensors(path, trained, run)
    values = {v.path: v.numpy() for v in trained.variables}
    theirs = load_file(path)
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    if name == "resnet20":
        kernel = values["stage2_block1_conv1/kernel"]
        expected = np.einsum("hwio->oihw", kernel)
        np.testing.assert_array_equal(theirs["layer2.0.conv1.weight"], expected)
        expected = values["stage2_block1_norm1/moving_variance"]
        np.testing.assert_array_equal(theirs["layer2.0.bn1.running_var"], expected)
    elif name == "deit_tiny":
        positions = values["tokens/positions"]
        np.testing.assert_array_equal(theirs["pos_embed"][0], positions)
    elif name == "tiny_vit_5m":
        biases = values["stage3_block2_attention/attention_biases"]
        theirs_biases = theirs["stages.2.blocks.1.attn.attention_biases"]
        np.testing.assert_array_equal(theirs_biases, biases.T)
    else:
        kernel = values["stage2_block1_depthwise/kernel"].reshape(3, 3, -1)
        depthwise = theirs["blocks.1.0.conv_dw.weight"]
        np.testing.assert_array_equal(depthwise[:, 0], np.moveaxis(kernel, 2, 0))
    assert tuple(json.loads(metadata["class_names"])) == run.class_names
    np.testing.assert_allclose(
        json.loads(metadata["mean"]), np.array(run.dataset_info.mean) / 255
    )
    options = json.loads(metadata["preprocessing"])
    assert (options["center_crop"], options["interpolation"]) == (1.0, "bilinear")
    images = random_images(run)
    logits, _ = comparison.predict_with_variables(path, run, images)
    expected = comparison.logits_of(run, trained, images)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
