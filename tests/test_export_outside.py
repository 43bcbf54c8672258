"""Exports in processes without towers: every network, training on, the page's lines."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from exported import CLASS_NAMES, random_images, random_run
from PIL import Image

from towers import load_run
from towers.config import Config
from towers.config.choices import FAMILY, MODELS
from towers.data.decoding import Decoding
from towers.data.pixels import read_image
from towers.export import FORMATS, TOLERANCES, comparison
from towers.export.stock import stock_network
from towers.export.writers import WRITERS, write_keras
from towers.training import train

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "export.md"
pytestmark = pytest.mark.slow

# One of each family; `test_stock_layers_compute_what_ours_do` has them all.
FAMILIES = {x.rstrip("0123456789"): x for x in MODELS if not x.endswith(FAMILY)}


def need(format):
    for package in FORMATS[format].packages:
        pytest.importorskip(package)


def outside(script, folder):
    """What a script prints in a process that has never imported towers."""
    script += "\nimport sys\nassert 'towers' not in sys.modules\n"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", FAMILIES.values())
def test_every_network_in_every_format(tmp_path, name, format):
    need(format)
    run = random_run(name, "tutorial" if name == "cnn" else "none", width=0.1)
    trained, images = run.network(), random_images(run, 8)
    expected = comparison.logits_of(run, trained, images)
    for precision in FORMATS[format].precisions:
        path, network = tmp_path / f"{precision}.{format}", stock_network(trained)
        WRITERS[format](path, network, run, precision, random_images(run, 30))
        logits, names = comparison.predict_in_new_process(format, path, images)
        most = TOLERANCES[precision] * np.abs(expected).max()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=most)
        assert len(names) == len(CLASS_NAMES) and names[2] == "größer als"


TRAINING = """
import keras
import numpy as np

keras.utils.set_random_seed(1)
model = keras.saving.load_model("model.keras")
with np.load("data.npz") as data:
    images, labels = data["images"], data["labels"]
network = model.layers[-1]
fixed = {v.path: v.numpy() for v in network.non_trainable_variables}
model.compile(
    optimizer=keras.optimizers.SGD(LEARNING_RATE, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
losses = model.fit(images, labels, batch_size=32, epochs=6, verbose=0).history["loss"]
moved = [v.path for v in network.variables if v.path in fixed
         and not np.array_equal(fixed[v.path], v)]
several = [np.asarray(model(images[:4], training=True)) for _ in range(2)]
model.save("again.keras")
again = keras.saving.load_model("again.keras")
print(losses[-1] / losses[0])
print(sum("moving" in path for path in moved), sum("kernel" in path for path in moved))
print(float(np.abs(several[0] - several[1]).max()))
print(float(np.abs(np.asarray(again(images)) - np.asarray(model(images))).max()))
"""


@pytest.mark.parametrize(
    "name,norms,drops,rate",
    [
        ("cnn", 0, False, 0.01),
        ("alexnet_two_columns", 0, True, 0.01),
        ("resnet20", 38, False, 0.02),
        ("convmixer_256_8", 34, False, 0.02),
        ("speedrun", 12, False, 0.02),
    ],
)
def test_a_keras_file_trains_on(tmp_path, name, norms, drops, rate):
    """The images of a class have a color of their own."""
    options = {"width": 0.25, "weight_decay": 1e-4, "augment": "none"}
    options |= {"model": name, "batch_size": 32, "learning_rate": 1e-4}
    run = trained(tmp_path / "run", max_steps=1, **options)  # as drawn, and whitened
    write_keras(tmp_path / "model.keras", stock_network(run.network()), run)
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 10, 256)
    images = rng.integers(0, 60, (256, *run.image_shape))
    images = images + 15 * labels[:, None, None, None]
    np.savez(tmp_path / "data.npz", images=images.astype(np.uint8), labels=labels)
    script = TRAINING.replace("LEARNING_RATE", str(rate))
    ratio, moved, noise, again = outside(script, tmp_path).splitlines()
    assert float(ratio) < 0.8
    assert moved == f"{norms} 0"  # and no fixed kernel
    assert (float(noise) > 1e-3) == drops
    assert float(again) == 0


def trained(workdir, **options):
    settings = {"dataset": "embedded", "device": "cpu", "ema_decay": 0.0}
    settings |= {"eval_every_epochs": 0.0, "summary_every_steps": 0}
    train(workdir, Config(**settings | options))
    return load_run(workdir)


# The lines of the page, and the command.


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A folder in which the page's commands work."""
    folder = tmp_path_factory.mktemp("quickstart")
    trained(folder / "runs" / "quickstart", width=0.2, batch_size=50, max_steps=3)
    return folder


def blocks(heading):
    """The indented blocks of a section of the page that are programs."""
    sections = re.split(r"^##? ", PAGE.read_text(), flags=re.MULTILINE)
    [section] = [x for x in sections if x.startswith(f"{heading}\n")]
    texts = re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, re.MULTILINE)
    texts = [textwrap.dedent(text).strip() for text in texts]
    return [text for text in texts if text.startswith("import ")]


def run_export(folder, format, output):
    program, run = ROOT / "run_export.py", "--workdir=runs/quickstart"
    return subprocess.Popen(
        [sys.executable, program, run, f"--format={format}", f"--output={output}"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "heading,format",
    [
        ("SavedModel", "saved_model"),
        ("Keras", "keras"),
        ("TFLite", "tflite"),
        ("ONNX", "onnx"),
    ],
)
def test_the_lines_of_the_page_predict_elsewhere(quickstart, tmp_path, heading, format):
    need(format)
    suffix = FORMATS[format].suffix
    output = tmp_path / (f"model{suffix}" if suffix else format)
    process = run_export(quickstart, format, output)
    printed, errors = process.communicate()
    assert process.returncode == 0 and errors == ""
    assert printed.splitlines()[-1].startswith(f"{output}: ")
    outside(blocks("Using a trained network elsewhere")[0], tmp_path)
    [script] = blocks(heading)
    if format == "tflite":
        line = "from ai_edge_litert.interpreter import Interpreter"
        theirs = "import tensorflow; Interpreter = tensorflow.lite.Interpreter"
        script = (
            f"try: {line}\nexcept ImportError: {theirs}\n{script.replace(line, '')}"
        )
    lines = outside(script, tmp_path).splitlines()
    names = load_run(quickstart / "runs" / "quickstart").class_names
    assert len([x for x in lines if x.split()[0] in names]) == 2, lines
    if format == "keras":
        assert len([line for line in lines if "loss: " in line]) == 2


def test_the_lines_of_the_page_bring_a_photo_to_the_size(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    image, exif = Image.fromarray(pixels).resize((40, 50)), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(tmp_path / "photo.jpg", quality=100, subsampling=0, exif=exif)
    outside(blocks("Using a trained network elsewhere")[1], tmp_path)
    [result] = np.load(tmp_path / "images.npy")
    content = (tmp_path / "photo.jpg").read_bytes()
    expected = read_image(content, (32, 32, 3), Decoding(image_size=32))
    # Two decoders of JPEG differ by some of the 256 values.
    assert np.abs(result.astype(int) - expected).mean() < 2
    assert np.abs(result.astype(int) - expected[::-1]).mean() > 20


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_row_45_a_signal_leaves_nothing(quickstart, tmp_path, name):
    process = run_export(quickstart, "saved_model", tmp_path / "model")
    while not list(tmp_path.glob(".tmp-*")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate()
    assert process.returncode == 75
    words = f"stopped by {name}, nothing is written; start it again"
    assert errors == f"run_export.py: {words}\n"
    assert os.listdir(tmp_path) == []
