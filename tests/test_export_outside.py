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

from towers.config import Config
from towers.config.choices import FAMILY, MODELS
from towers.data.decoding import Decoding
from towers.data.pixels import read_image
from towers.export import FORMATS, TOLERANCES, check, export, keras_file
from towers.export.stock import stock_network
from towers.export.story import logits_of
from towers.training import train

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "export.md"
pytestmark = pytest.mark.slow

# One of each family; `test_stock_layers_compute_what_ours_do` has them all.
NETWORKS = [
    *("cnn", "lenet", "alexnet", "alexnet_two_columns", "resnet18", "resnet20"),
    *("wide_resnet_28_10", "convmixer_256_8", "speedrun", "speedrun_deep"),
]


def need(format):
    for package in FORMATS[format].packages:
        pytest.importorskip(package)


def writer(format):
    return __import__(f"towers.export.{FORMATS[format].writer}", fromlist=["write"])


def outside(script, folder, **kwargs):
    """Runs a script in a process that has never imported towers."""
    script += "\nimport sys\nassert 'towers' not in sys.modules\n"
    (folder / "script.py").write_text(script)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        **kwargs,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_in_every_format(tmp_path, name, format):
    need(format)
    run = random_run(name, "tutorial" if name == "cnn" else "none", width=0.1)
    trained = run.network()
    images = random_images(run, 8)
    expected = logits_of(run, trained, images)
    for precision in FORMATS[format].precisions:
        path = tmp_path / f"{precision}{FORMATS[format].suffix}"
        network = stock_network(trained)
        writer(format).write(path, network, run, precision, random_images(run, 30))
        logits, names = check.predict(format, path, images)
        difference = check.largest_difference(logits, expected)
        assert difference < TOLERANCES[precision], precision
        assert len(names) == len(CLASS_NAMES) and names[2] == "größer als"


def test_the_networks_are_of_all_families():
    assert set(NETWORKS) <= set(MODELS)
    own = [name for name in MODELS if not name.endswith(FAMILY)]
    assert {name.rstrip("0123456789") for name in own} == {
        name.rstrip("0123456789") for name in NETWORKS
    }


TRAINING = """
import keras
import numpy as np

keras.utils.set_random_seed(1)
model = keras.saving.load_model("model.keras")
with np.load("data.npz") as data:
    images, labels = data["images"], data["labels"]
network = model.layers[-1]
fixed = {v.path: v.numpy() for v in network.non_trainable_variables}
before = np.asarray(model(images))
model.compile(
    optimizer=keras.optimizers.SGD(LEARNING_RATE, momentum=0.9),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
losses = model.fit(images, labels, batch_size=32, epochs=6, verbose=0).history["loss"]
moved = [
    v.path for v in network.non_trainable_variables
    if not np.array_equal(fixed[v.path], v)
]
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
    config = {"width": 0.25, "weight_decay": 1e-4}
    run = trained_a_little(tmp_path / "run", name, config)
    trained = run.network()
    keras_file.write(tmp_path / "model.keras", stock_network(trained), run)
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


def trained_a_little(workdir, name, options):
    """Values as they begin, and a whitening that has seen images."""
    from towers import load_run

    settings = {"dataset": "embedded", "augment": "none", "ema_decay": 0.0}
    config = Config(
        **settings,
        **options,
        model=name,
        device="cpu",
        batch_size=32,
        learning_rate=1e-4,
        max_steps=1,
        eval_every_epochs=0.0,
        summary_every_steps=0,
    )
    train(workdir, config)
    return load_run(workdir)


# The lines of the page, and the command.


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A folder in which the page's commands work."""
    folder = tmp_path_factory.mktemp("quickstart")
    config = Config(
        dataset="embedded",
        width=0.2,
        device="cpu",
        batch_size=50,
        max_steps=3,
        eval_every_epochs=0.0,
        summary_every_steps=0,
    )
    train(folder / "runs" / "quickstart", config)
    return folder


def blocks(heading):
    """The indented blocks of a section of the page."""
    text = PAGE.read_text()
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    [section] = [x for x in sections if x.splitlines()[0] == heading]
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, re.MULTILINE)
    return [textwrap.dedent(block).strip() for block in found]


def command(folder, *arguments):
    return [sys.executable, str(ROOT / "run_export.py"), *arguments]


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
    output = tmp_path / f"{'saved_model' if format == 'saved_model' else 'model'}"
    output = output.with_suffix(FORMATS[format].suffix)
    done = subprocess.run(
        command(
            quickstart,
            "--workdir=runs/quickstart",
            f"--format={format}",
            f"--output={output}",
        ),
        cwd=quickstart,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{output}: ")
    images, _ = array_blocks()
    outside(images, tmp_path)
    [script] = [x for x in blocks(heading) if x.startswith("import ")]
    if format == "tflite" and not has("ai_edge_litert"):
        line = "from ai_edge_litert.interpreter import Interpreter"
        assert line in script
        script = script.replace(
            line, "import tensorflow; Interpreter = tensorflow.lite.Interpreter"
        )
    lines = outside(script, tmp_path).splitlines()
    names = set(export_names(quickstart))
    predicted = [line for line in lines if line.split()[0] in names]
    assert len(predicted) == 2, lines
    if format == "keras":
        assert len([line for line in lines if "loss: " in line]) == 2


def test_the_lines_of_the_page_bring_a_photo_to_the_size(tmp_path):
    _, photo = array_blocks()
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 3), dtype=np.uint8)
    image, exif = Image.fromarray(pixels).resize((40, 50)), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    image.save(tmp_path / "photo.jpg", quality=100, subsampling=0, exif=exif)
    outside(photo, tmp_path)
    [result] = np.load(tmp_path / "images.npy")
    content = (tmp_path / "photo.jpg").read_bytes()
    expected = read_image(content, (32, 32, 3), Decoding(image_size=32))
    # Two decoders of JPEG differ by some of the 256 values.
    assert np.abs(result.astype(int) - expected).mean() < 2
    assert np.abs(result.astype(int) - expected[::-1]).mean() > 20


def array_blocks():
    """The lines that save `images.npy`: without a photo, and from one."""
    heading = PAGE.read_text().splitlines()[0]
    return [x for x in blocks(heading) if x.startswith("import numpy")]


def has(package):
    try:
        __import__(package)
    except ImportError:
        return False
    return True


def export_names(folder):
    from towers import load_run

    return load_run(folder / "runs" / "quickstart").class_names


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_row_45_a_signal_leaves_nothing(quickstart, tmp_path, name):
    process = subprocess.Popen(
        command(
            quickstart,
            "--workdir=runs/quickstart",
            "--format=saved_model",
            f"--output={tmp_path}/model",
        ),
        cwd=quickstart,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ends_at = time.monotonic() + 900
    while not list(tmp_path.glob(".tmp-*")) and time.monotonic() < ends_at:
        time.sleep(0.01)
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 75
    assert errors.splitlines() == [
        f"run_export.py: stopped by {name}, nothing is written; start it again"
    ]
    assert os.listdir(tmp_path) == []


def test_what_is_exported_is_of_the_step_that_is_asked_for(quickstart, tmp_path):
    with pytest.raises(Exception, match="step"):
        export(quickstart / "runs" / "quickstart", "keras", step=2)
