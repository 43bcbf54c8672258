"""What towers does in the cases of `findings/`, by the tables of its README."""

import json
import math
import pathlib
import re
import struct

import numpy as np
import pytest
import small_runs
import tensorflow as tf
from exported import random_images, random_run
from pictures import file_of, png
from PIL import Image
from prepared_sets import all_of
from sklearn.metrics import average_precision_score

from towers import data
from towers.data.augment.augmentation import create_augment
from towers.data.files.image import read_image
from towers.data.randomness import Draw
from towers.exporting.stock import stock_network
from towers.exporting.writers import decode_image, write_tflite
from towers.metrics.predictions import predictions_of_logits
from towers.models.zoo import cnn
from towers.optim.losses import create_loss
from towers.pretrained.torch_files import open_safetensors
from towers.run.progress import Progress

ROOT = pathlib.Path(__file__).resolve().parent.parent
HERE = "tests/test_findings.py::test_"
# Script -> the test of what the last column of its row says.
TESTS = {
    "fsspec_file_cache_ignores_etags": "tests/data/test_reading.py::"
    "test_row_59_a_remote_file_that_changes_is_never_read_with_old_labels",
    "imageio_reads_all_frames_of_gif_and_one_of_webp": f"{HERE}first_frames",
    "keras_auc_of_small_scores_is_chance": f"{HERE}small_scores",
    "keras_checkpoint_of_the_best_forgets_it_when_restored": f"{HERE}best_step",
    "keras_data_parallel_on_tensorflow_uses_one_device": "tests/parallel/"
    "test_strategies.py::"
    "test_each_tower_computes_on_its_own_device_and_variables_stay_on_theirs",
    "keras_fit_validates_raw_weights_and_ends_with_averages": "tests/evaluation/"
    "test_evaluation.py::test_row_24_every_test_image_counts_once",
    "keras_image_folder_skips_formats_in_silence": f"{HERE}formats_of_a_folder",
    "keras_quantize_leaves_convolutions_and_freezes_kernels": f"{HERE}int8_kernels",
    "keras_random_crop_enlarges_small_images": f"{HERE}small_images_are_padded",
    "keras_top_k_accuracy_counts_ties_as_right": f"{HERE}ties",
    "mlflow_writes_a_database_into_the_working_folder": "tests/test_callbacks.py::"
    "test_a_folder_of_mlflow_may_be_in_the_home",
    "rasterio_fourth_band_of_bytes_becomes_alpha": f"{HERE}a_fourth_band",
    "safetensors_for_numpy_needs_ml_dtypes_imported": f"{HERE}bfloat16",
    "skimage_as_gray_keeps_gray_files_as_bytes": f"{HERE}gray_files",
    "sklearn_log_loss_depends_on_the_dtype": f"{HERE}certain_mistakes",
    "tensorflow_cast_saturates_under_xla_alone": f"{HERE}pixels_out_of_range",
    "tflite_dynamic_range_keeps_small_kernels_in_float": f"{HERE}int8_kernels",
    "webdataset_loses_hard_links": "tests/data/test_tar_shards.py::"
    "test_links_are_read_as_gnu_tar_writes_them",
}


def test_scripts_rows_and_tests_belong_together():
    folder = ROOT / "findings"
    rows = re.findall(r"\n\| \[(\w+)\]\(\1\.sh\), (.+?) \|", text(folder / "README.md"))
    assert [name for name, _ in rows] == sorted(x.stem for x in folder.glob("*.sh"))
    assert dict(rows).keys() == TESTS.keys()
    for name, version in rows:
        script = text(folder / f"{name}.sh")
        assert script.startswith(f"#!/bin/sh\n# {version}: ") and "set -e" in script
        [packages] = re.findall("pip install --quiet (.+)", script)
        assert all("==" in x for x in packages.split()) and "this has changed" in script
        path, function = TESTS[name].split("::")
        assert f"\ndef {function}(" in text(ROOT / path)


def text(path):
    return path.read_text()


def read(content, channels=3):
    return read_image(content, (8, 9, channels), resize=False)


def gray_image(value):
    return Image.fromarray(np.full((8, 9), value, np.uint8))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_first_frames(kind):
    frames = [gray_image(value) for value in (60, 120, 180)]
    lossless = {"lossless": True} if kind == "WEBP" else {}
    content = file_of(
        frames[0], kind, save_all=True, append_images=frames[1:], **lossless
    )
    np.testing.assert_array_equal(read(content), np.full((8, 9, 3), 60))


def test_small_scores():
    scores = np.linspace(1e-6, 1e-3, 1001)
    labels = scores > 7.5e-4
    shuffled = np.random.default_rng(0).permutation(scores)
    for values, expected in (
        (scores, 1.0),
        (shuffled, average_precision_score(labels, shuffled)),
    ):
        logits = np.log(values / (1 - values))[:, None]
        found = predictions_of_logits(logits, labels[:, None])
        assert found.average_precisions[0] == pytest.approx(expected)


def test_best_step():
    progress, is_best = Progress(), []
    for step, loss in enumerate([1.0, 0.5, 0.9, 0.8]):
        if step == 2:  # a restart
            progress = Progress.from_json(json.loads(json.dumps(progress.to_json())))
        progress.step = step
        is_best.append(progress.add_evaluation(0.5, loss, -loss, "loss"))
    assert is_best == [True, True, False, False] and progress.best["step"] == 1


def test_formats_of_a_folder(tmp_path):
    names = "cat/a.png cat/b.webp cat/c.tif cat/d.avif cat/f.jfif dog/e.webp dog/g.jpe"
    for value, name in enumerate(names.split()):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        kind = "JPEG" if name.endswith(("jfif", "jpe")) else None
        gray_image(30 * value).convert("RGB").save(tmp_path / name, kind)
    (tmp_path / "cat" / "notes.txt").write_text("words")
    data_set = data.load("image_folder", str(tmp_path))
    parts = [all_of(source) for source in data_set.sources.values()]
    images, labels = (np.concatenate(x) for x in zip(*parts, strict=True))
    order = images.mean((1, 2, 3)).argsort()
    values = images[order].astype(int) - 30 * np.arange(7)[:, None, None, None]
    assert np.abs(values).max() <= 2 and labels[order].tolist() == [0] * 5 + [1] * 2
    assert data_set.inventory.names["other files"] == [f"{tmp_path}/cat/notes.txt"]


def test_int8_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(cnn, "create_model", small_runs.full_network)
    run = random_run("cnn", image_shape=(8, 8, 3))
    network, path = run.network(), tmp_path / "a.tflite"
    write_tflite(path, stock_network(network), run, "int8", random_images(run, 8))
    sizes = [math.prod(x.shape) for x in network.weights if x.path.endswith("kernel")]
    assert sizes == [3 * 3 * 3 * 4, 36 * 10]
    with pytest.warns(match="deprecated"):
        interpreter = tf.lite.Interpreter(str(path))
    dtypes = {
        math.prod(x["shape"]): np.dtype(x["dtype"]).name
        for x in interpreter.get_tensor_details()
        if math.prod(x["shape"]) in sizes
    }
    assert dtypes == dict.fromkeys(sizes, "int8")


def test_small_images_are_padded():
    image = np.random.default_rng(0).integers(0, 256, (4, 4, 3), np.uint8)
    train = create_augment("pad_crop_flip", image.shape, (9.0,) * 3, (1.0,) * 3).train
    draw = Draw(0, tf.constant(0, tf.int64), *[tf.range(20, dtype=tf.int64)] * 2)
    found = train(tf.constant(image[None].repeat(20, 0)), draw).numpy() + 9
    wide = np.pad(image, ((4, 4), (4, 4), (0, 0)), constant_values=9)
    windows = np.lib.stride_tricks.sliding_window_view(wide, (4, 4, 3)).reshape(-1, 48)
    both = {x.tobytes() for y in windows for x in (y, y.reshape(4, 4, 3)[:, ::-1])}
    assert {x.astype(np.uint8).tobytes() for x in found} <= both


def test_ties():
    rng = np.random.default_rng(0)
    logits, labels = rng.integers(0, 3, (500, 7)), rng.integers(0, 7, 500)
    found = predictions_of_logits(logits, labels)
    ranked = np.argsort(-logits, axis=1, kind="stable")
    np.testing.assert_array_equal(found.correct, ranked[:, 0] == labels)
    top = (ranked[:, :5] == labels[:, None]).any(1)
    np.testing.assert_array_equal(found.in_top, top)


def test_a_fourth_band():
    """The tags are those of GDAL: color, and a fourth band of unassociated alpha."""
    bands = np.random.default_rng(0).integers(0, 256, (8, 9, 4), np.uint8)
    content = file_of(Image.fromarray(bands), "TIFF")
    np.testing.assert_array_equal(read(content), bands[..., :3])


def test_bfloat16(tmp_path):
    tensor = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
    header = json.dumps({"a": tensor}).encode()
    content = struct.pack("<Q", len(header)) + header + b"\x80\x3f\x00\x40"
    (tmp_path / "a.safetensors").write_bytes(content)
    with open_safetensors(str(tmp_path / "a.safetensors")) as (tensors, _):
        assert tensors["a"].read().astype(np.float32).tolist() == [1, 2]


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
def test_gray_files(mode):
    channels = Image.new(mode, (1, 1)).getbands()
    content = png(np.full((8, 9, len(channels)), 128, np.uint8))
    assert (read(content, channels=1) == 128).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("labels", [np.int32([1, 1]), np.float32([[0, 1]] * 2)])
def test_certain_mistakes(dtype, labels):
    logits, several = np.array([[1000, -1000], [50, -50]], dtype), labels.ndim == 2
    expected = [1000, 50] if several else [2000, 100]
    loss = create_loss("cross_entropy", multi_label=several)
    np.testing.assert_allclose(loss(tf.constant(logits), labels), expected)
    found = predictions_of_logits(logits, labels > 0 if several else labels)
    np.testing.assert_allclose(found.losses, expected)


def test_pixels_out_of_range():
    """The bicubic filter exceeds 0 and 255 at edges."""
    stripes = np.uint8([0, 255]).repeat(4)[None, :, None].repeat(8, 0).repeat(3, 2)
    image = Image.fromarray(stripes)
    expected = np.asarray(image.resize((16, 16), Image.Resampling.BICUBIC))
    content = tf.constant(png(stripes))
    found = decode_image(content, (16, 16, 3), interpolation="bicubic").numpy()
    assert np.abs(found.astype(int) - expected).max() <= 1
