"""What towers does in the cases of `findings/`, by the tables of its README."""

import io
import math
import pathlib
import re
import tarfile

import keras
import numpy as np
import pyarrow.parquet
import pytest
import small_runs
import tensorflow as tf
from exported import random_images, random_run
from pictures import file_of, png, tiff
from PIL import Image
from prepared_sets import all_of
from sklearn.metrics import average_precision_score

from towers import data
from towers.data.files.image import read_image
from towers.errors import DataError
from towers.exporting.stock import stock_network
from towers.exporting.writers import decode_image, write_tflite
from towers.metrics.predictions import predictions_of_logits
from towers.models.layers.normalization import BatchNormalization
from towers.models.zoo import cnn
from towers.optim.losses import create_loss
from towers.pretrained.initial import read_variables

TESTS_FOLDER = pathlib.Path(__file__).resolve().parent
# Script -> the test of the last column of its row, here or in another file.
LIST = (TESTS_FOLDER / "findings.txt").read_text()
TESTS = dict(line.split() for line in LIST.splitlines())


def test_scripts_rows_and_tests_belong_together():
    readme = (TESTS_FOLDER / "../findings/README.md").read_text()
    rows = re.findall(r"(?m)^\| \[(\w+)\]\(\1\.sh\), (.+?) \| .* \|(.*)\|$", readme)
    scripts = {x.stem: x.read_text() for x in TESTS_FOLDER.glob("../findings/*.sh")}
    assert [name for name, *_ in rows] == sorted(scripts)
    assert [*TESTS] == [name for name, _, towers in rows if towers.strip(" -")]
    for name, version, _ in rows:
        script = scripts[name]
        assert all(x in script for x in version.split(", ")) and "\nset -eu\n" in script
        [packages] = re.findall("pip install --quiet (.+)", script)
        assert all("==" in x for x in packages.split()) and "this has changed" in script
    for test in TESTS.values():
        path, _, function = test.rpartition("::")
        tests = (TESTS_FOLDER / (path or "test_findings.py")).read_text()
        assert f"\ndef {function}(" in tests


def read(content, channels=3):
    return read_image(content, (8, 9, channels), resize=False)


def test_small_scores():
    ranked = np.linspace(1e-6, 1e-3, 1001)
    shuffled, labels = np.random.default_rng(0).permutation(ranked), ranked > 7.5e-4
    for scores in (ranked, shuffled):
        logits = np.log(scores / (1 - scores))[:, None]
        [found] = predictions_of_logits(logits, labels[:, None]).average_precisions
        assert found == pytest.approx(average_precision_score(labels, scores))


def test_int8_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(cnn, "create_model", small_runs.full_network)
    run, path = random_run("cnn", image_shape=(8, 8, 3)), str(tmp_path / "a.tflite")
    network = stock_network(run.network())
    write_tflite(tmp_path / "a.tflite", network, run, "int8", random_images(run, 8))
    with pytest.warns(match="deprecated"):
        tensors = tf.lite.Interpreter(path).get_tensor_details()
    kernels = [x for x in tensors if math.prod(x["shape"]) in (3 * 3 * 3 * 4, 36 * 10)]
    assert [x["dtype"] for x in kernels] == [np.int8] * 2


def test_ties():
    rng = np.random.default_rng(0)
    logits, labels = rng.integers(0, 3, (500, 7)), rng.integers(0, 7, 500)
    found = predictions_of_logits(logits, labels)
    is_label = np.argsort(-logits, axis=1, kind="stable") == labels[:, None]
    assert (found.correct == is_label[:, 0]).all()
    assert (found.in_top == is_label[:, :5].any(1)).all()


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
    """The bicubic filter exceeds 0 and 255; `tf.cast` wraps in small images."""
    squares = 255 * np.kron(np.eye(2, dtype=np.uint8), np.ones((2, 2), np.uint8))
    expected = Image.fromarray(squares).resize((5, 5), Image.Resampling.BICUBIC)
    content = tf.constant(png(squares[..., None]))
    found = decode_image(content, (5, 5, 1), interpolation="bicubic").numpy()
    assert np.abs(found[..., 0].astype(int) - np.asarray(expected)).max() <= 1


def test_overviews():
    """As GDAL writes them: a smaller page that is marked as reduced."""
    image, reduced = Image.new("L", (9, 8), 200), Image.new("L", (4, 4), 50)
    reduced.encoderinfo = {"tiffinfo": {254: 1}}
    content = file_of(image, "TIFF", save_all=True, append_images=[reduced])
    for shape in ((8, 9, 1), (4, 4, 1)):
        assert (read_image(content, shape) == 200).all()


def test_turned_gray_tiff(tmp_path):
    stored = np.arange(72, dtype=np.uint8).reshape(9, 8)
    tags = {262: [1], 258: [8], 259: [1], 277: [1], 274: [6]}
    for folder in ("cat", "dog"):
        (tmp_path / folder).mkdir()
        for name in "ab":
            content = tiff([stored.tobytes()], 8, 9, tags)
            (tmp_path / folder / f"{name}.tif").write_bytes(content)
    data_set = data.load("image_folder", str(tmp_path))
    for source in data_set.sources.values():
        images, _ = all_of(source)
        assert (images == np.rot90(stored, -1)[..., None]).all()


def test_extensions_of_a_shard(tmp_path):
    kinds = 10 * ["jpg"] + 5 * ["jpeg"] + 5 * ["png"]
    with tarfile.open(tmp_path / "train.tar", "w") as shard:
        for value, kind in enumerate(kinds):
            image = Image.new("RGB", (9, 8), (10 * value,) * 3)
            content = file_of(image, "PNG" if kind == "png" else "JPEG")
            for name, text in ((kind, content), ("cls", b"%d" % (value % 2))):
                member = tarfile.TarInfo(f"{value:02}.{name}")
                member.size = len(text)
                shard.addfile(member, io.BytesIO(text))
    data_set = data.load("webdataset", str(tmp_path))
    parts = [all_of(source) for source in data_set.sources.values()]
    images, labels = (np.concatenate(x) for x in zip(*parts, strict=True))
    values = np.rint(images.mean((1, 2, 3)) / 10).astype(int)
    assert sorted(values) == list(range(20)) and (values % 2 == labels).all()


def write_parquet(path, labels):
    path.parent.mkdir(exist_ok=True, parents=True)
    table = {"image": [file_of(Image.new("L", (9, 8)), "PNG")] * 24}
    pyarrow.parquet.write_table(pyarrow.table(table | labels), path)


def test_order_of_integers(tmp_path):
    labels = [11 - k % 12 for k in range(24)]
    write_parquet(tmp_path / "train.parquet", {"label": labels})
    names = data.load("parquet", str(tmp_path)).class_names
    assert [*names] == [str(k) for k in range(12)]


def test_order_of_categories(tmp_path):
    """Each row group numbers its categories by itself."""
    types = {"label": pyarrow.dictionary(pyarrow.int32(), pyarrow.string())}
    schema = pyarrow.schema({"image": pyarrow.binary()} | types)
    with pyarrow.parquet.ParquetWriter(tmp_path / "train.parquet", schema) as writer:
        for labels in (["owl", "dog"] * 6, ["dog", "cat"] * 6):
            values = {"owl": 30, "dog": 20, "cat": 10}
            images = [file_of(Image.new("L", (9, 8), values[x]), "PNG") for x in labels]
            writer.write_table(pyarrow.table([images, labels], schema=schema))
    data_set = data.load("parquet", str(tmp_path))
    assert [*data_set.class_names] == ["cat", "dog", "owl"]
    for source in data_set.sources.values():
        images, labels = all_of(source)
        assert (images == 10 * labels[:, None, None, None] + 10).all()


def test_labels_in_names_of_folders(tmp_path):
    for name in ("label=01", "label=02"):
        write_parquet(tmp_path / name / "0.parquet", {})
    with pytest.raises(DataError, match="has no label"):
        data.load("parquet", str(tmp_path))


def test_variance_of_large_means():
    inputs = 1000 + 0.1 * np.random.default_rng(0).normal(size=(256, 4, 4, 2))
    inputs = inputs.astype(np.float32)
    outputs = BatchNormalization(epsilon=1e-3)(inputs, training=True)
    exact = inputs.astype(np.float64)
    expected = exact.std((0, 1, 2)) / np.sqrt(exact.var((0, 1, 2)) + 1e-3)
    np.testing.assert_allclose(np.std(outputs, (0, 1, 2)), expected, rtol=1e-3)


def test_names_of_a_weights_file(tmp_path):
    def network(*names):
        layers = [keras.layers.Dense(3, name=name) for name in names]
        return keras.Sequential([keras.Input((3,)), *layers])

    written, ours = network("neck", "head"), network("head", "neck")
    written.save_weights(tmp_path / "a.weights.h5")
    values = read_variables(str(tmp_path / "a.weights.h5"), "cnn", ours)
    for name in ("head", "neck"):
        read = values[ours.get_layer(name).kernel.path]
        np.testing.assert_array_equal(read, written.get_layer(name).kernel)
