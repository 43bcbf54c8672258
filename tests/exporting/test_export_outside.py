"""Exports in processes without towers: every network, training on, the page's lines."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from exported import (
    CLASS_NAMES,
    draw_odd_photos,
    programs,
    random_images,
    random_run,
    trained,
)
from networks import KINDS

from towers import predict
from towers.exporting import comparison, writers
from towers.exporting.formats import FORMATS
from towers.exporting.stock import stock_network

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

# For 24 odd photos, of which `run_predict.py` decodes large ones at a reduced scale.
MAX_PROBABILITY_DIFFERENCE = 0.01

RUNNABLE = [name for name, row in FORMATS.items() if row.has_network]


def need(format):
    for package in FORMATS[format].packages:
        pytest.importorskip(package)


def outside(script, folder, arguments):
    """What a script prints in a process that has never imported towers."""
    script += "\nimport sys\nassert 'towers' not in sys.modules\n"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    options = {"env": environment, "capture_output": True, "text": True}
    command = [sys.executable, "-W", "error", "-c", script, *arguments]
    done = subprocess.run(command, cwd=folder, check=False, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("format", RUNNABLE)
@pytest.mark.parametrize("name", KINDS)
def test_every_network_in_every_format(tmp_path, name, format):
    need(format)
    if "mobilenet" in name and format == "tflite":
        pytest.skip("XNNPACK of TensorFlow 2.21 prepares no such narrow network")
    run = random_run(name, "tutorial" if name == "cnn" else "none", width=0.1)
    trained, images = run.network(), random_images(run, 8)
    expected = comparison.logits_of(run, trained, images)
    for precision in FORMATS[format].precisions:
        if precision == "int8" and name.startswith(("vit", "deit", "dinov", "bit")):
            continue  # which that does not hold: see docs/export.md
        path, network = tmp_path / f"{precision}.{format}", stock_network(trained)
        write = getattr(writers, f"write_{format}")
        write(path, network, run, precision, random_images(run, 30))
        logits, names = comparison.predict_in_new_process(format, path, images)
        # Random parameters and a tenth of the channels are coarse: rounding the
        # weights of bit_resnet50x1 alone changes logits by 0.03.
        most = {"float32": 1e-4, "float16": 0.06, "int8": 0.4}[precision]
        most *= np.abs(expected).max()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=most)
        assert len(names) == len(CLASS_NAMES) and names[2] == "größer als"


# The programs of the page, and the command.

PREDICT = {
    "saved_model": "SavedModel",
    "keras": "Keras",
    "tflite": "TFLite",
    "mediapipe": "MediaPipe",
    "onnx": "ONNX",
    "safetensors": "timm",
}
PACKAGES = {"mediapipe": ["mediapipe"], "safetensors": ["timm"]}


@pytest.fixture(scope="module")
def predicted(request, tmp_path_factory):
    """A folder with a run and odd photos, and its predictions for them, by a `fit`."""
    folder = tmp_path_factory.mktemp("run")
    for name in ("cat", "dog", "eel"):
        (folder / "photos" / name).mkdir(parents=True)
        draw_odd_photos(folder / "photos" / name)
    trained(
        folder / "run",
        dataset="image_folder",
        data_dir=str(folder / "photos"),
        model="resnet18_imagenet",
        image_size=64,
        center_crop=0.8 if request.param == "crop" else 1.0,
        fit=request.param,
        interpolation="bicubic",
        learning_rate=0.02,
        warmup_epochs=0.0,
        batch_size=24,
        max_steps=6,
    )
    return folder, predict(folder / "run", folder / "photos" / "cat")


@pytest.mark.parametrize(
    "name,predicted",
    [(name, "crop") for name in PREDICT]
    + [(name, fit) for fit in ("pad", "stretch") for name in ("onnx", "safetensors")],
    indirect=["predicted"],
)
def test_the_programs_of_the_page_predict_as_towers_does(predicted, tmp_path, name):
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)
    format = "tflite" if name == "mediapipe" else name
    need(format)
    folder, expected = predicted
    suffix = FORMATS[format].suffix
    output = tmp_path / (f"model{suffix}" if suffix else format)
    options = [f"--workdir={folder / 'run'}", f"--format={format}"]
    command = [sys.executable, ROOT / "run_export.py", *options, f"--output={output}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith(f"{output}: ")

    [function], [script] = programs("From photos to images"), programs(PREDICT[name])
    (tmp_path / "pixels.py").write_text(function)
    script = script.replace('"resnet50"', '"resnet18"')
    if name == "tflite" and not importlib.util.find_spec("ai_edge_litert"):
        script = script.replace(
            "from ai_edge_litert.interpreter import Interpreter",
            "import tensorflow, warnings; Interpreter = tensorflow.lite.Interpreter\n"
            "warnings.filterwarnings('ignore', '.*tf.lite.Interpreter is deprecated')",
        )
    lines = outside(script, tmp_path, expected.paths).splitlines()
    found = [x.split() for x in lines if x.split()[0] in expected.class_names]
    best = [row[0] for row in expected.top()]
    assert [name for name, _ in found] == [name for name, _ in best]
    probabilities = np.array([float(x) for _, x in found])
    differences = np.abs(probabilities - [x for _, x in best])
    assert differences.max() <= MAX_PROBABILITY_DIFFERENCE
    if name == "keras":
        assert len([line for line in lines if "loss: " in line]) == 2


@pytest.mark.parametrize("predicted", ["crop"], indirect=True)
def test_several_formats_are_written_with_flags_of_either_form(predicted):
    run = predicted[0] / "run"
    formats = ["--format=keras,saved_model", "--format=tflite"]
    command = [sys.executable, ROOT / "run_export.py", f"--workdir={run}", *formats]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    written = {"model.keras", "saved_model", "model.tflite"}
    assert set(os.listdir(run / "export")) == written
    done = subprocess.run(
        [*command, "--output=x"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "omit --output" in done.stderr
