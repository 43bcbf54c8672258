"""Exports in processes without towers: every network, training on, the page's lines."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from exported import CLASS_NAMES, random_images, random_run, trained

from towers import load_run
from towers.config.choices import FAMILY, MODELS
from towers.exporting import comparison, writers
from towers.exporting.export import export
from towers.exporting.formats import FORMATS, TOLERANCES
from towers.exporting.stock import fold_normalizations, stock_network

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "export.md"
pytestmark = pytest.mark.slow

RUNNABLE = [name for name, row in FORMATS.items() if row.has_network]

# The first of each family.
NETWORKS = [name for name in MODELS if not name.endswith(FAMILY)]
FAMILIES = {name.rstrip("0123456789"): name for name in reversed(NETWORKS)}


def need(format):
    for package in FORMATS[format].packages:
        pytest.importorskip(package)


def outside(script, folder):
    """What a script prints in a process that has never imported towers."""
    script += "\nimport sys\nassert 'towers' not in sys.modules\n"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    options = {"env": environment, "capture_output": True, "text": True}
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, cwd=folder, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("format", RUNNABLE)
@pytest.mark.parametrize("name", FAMILIES.values())
def test_every_network_in_every_format(tmp_path, name, format):
    need(format)
    if "mobilenet" in name and format == "tflite":
        pytest.skip("XNNPACK of TensorFlow 2.21 prepares no such narrow network")
    run = random_run(name, "tutorial" if name == "cnn" else "none", width=0.1)
    trained, images = run.network(), random_images(run, 8)
    expected = comparison.logits_of(run, trained, images)
    for precision in FORMATS[format].precisions:
        if precision == "int8" and name.startswith(("vit", "deit")):
            continue  # which that does not hold: see docs/export.md
        path, network = tmp_path / f"{precision}.{format}", stock_network(trained)
        if not FORMATS[format].is_trainable:
            network = fold_normalizations(network)
        write = getattr(writers, f"write_{format}")
        write(path, network, run, precision, random_images(run, 30))
        logits, names = comparison.predict_in_new_process(format, path, images)
        # int8 is coarser here: random parameters, a tenth of the channels.
        factor = 1.5 if precision == "int8" else 1
        most = factor * TOLERANCES[precision] * np.abs(expected).max()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=most)
        assert len(names) == len(CLASS_NAMES) and names[2] == "größer als"


def test_normalizations_are_folded_but_in_formats_that_train(tmp_path):
    trained(tmp_path, model="resnet20", width=0.1, max_steps=1)
    model = keras.saving.load_model(export(tmp_path, "keras"))
    assert str([v.path for v in model.variables]).count("moving_mean") == 19
    archive = tf.saved_model.load(export(tmp_path, "saved_model"))
    variables = archive.signatures["serving_default"].variables
    assert len(variables) == 2 * 20  # a kernel and a bias of each layer


# The lines of the page, and the command.


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A folder in which the page's commands work."""
    folder = tmp_path_factory.mktemp("quickstart")
    trained(folder / "runs" / "quickstart", width=0.2, batch_size=50, max_steps=3)
    return folder


HEADINGS = dict(saved_model="SavedModel", keras="Keras", tflite="TFLite", onnx="ONNX")


def blocks(heading):
    """The indented blocks of a section of the page that are programs."""
    sections = re.split(r"^##? ", PAGE.read_text(), flags=re.MULTILINE)
    [section] = [x for x in sections if x.startswith(f"{heading}\n")]
    texts = re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, re.MULTILINE)
    texts = [textwrap.dedent(text).strip() for text in texts]
    return [text for text in texts if text.startswith("import ")]


def run_export(folder, format, output):
    run = ["--workdir=runs/quickstart", f"--format={format}", f"--output={output}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, ROOT / "run_export.py", *run]
    return subprocess.Popen(command, cwd=folder, **pipes)


@pytest.mark.parametrize("format", RUNNABLE)
def test_the_lines_of_the_page_predict_elsewhere(quickstart, tmp_path, format):
    need(format)
    suffix = FORMATS[format].suffix
    output = tmp_path / (f"model{suffix}" if suffix else format)
    process = run_export(quickstart, format, output)
    printed, errors = process.communicate()
    assert process.returncode == 0 and errors == ""
    assert printed.splitlines()[-1].startswith(f"{output}: ")
    outside(blocks("Exports")[0], tmp_path)
    [script] = blocks(HEADINGS[format])
    if format == "tflite" and not importlib.util.find_spec("ai_edge_litert"):
        script = script.replace(
            "from ai_edge_litert.interpreter import Interpreter",
            "import tensorflow, warnings; Interpreter = tensorflow.lite.Interpreter\n"
            "warnings.filterwarnings('ignore', '.*tf.lite.Interpreter is deprecated')",
        )
    lines = outside(script, tmp_path).splitlines()
    names = load_run(quickstart / "runs" / "quickstart").class_names
    assert len([x for x in lines if x.split()[0] in names]) == 2, lines
    if format == "keras":
        assert len([line for line in lines if "loss: " in line]) == 2
