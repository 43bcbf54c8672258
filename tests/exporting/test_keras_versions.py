"""Keras files in older versions: their keys here, their logits in `make test-keras`.

`TOWERS_TEST_KERAS` has the Python programs of environments with older versions.
"""

import json
import os
import pathlib
import subprocess
import zipfile

import keras
import numpy as np
import pytest
from exported import random_images, random_run
from marks import slow
from networks import KINDS

from towers.exporting import comparison
from towers.exporting.stock import stock_network
from towers.exporting.writers import write_keras

PROGRAMS = os.environ.get("TOWERS_TEST_KERAS", "").split()

# Class -> arguments of its constructor in Keras 3.4.1.
OLDEST = json.loads(pathlib.Path(__file__).with_name("keras_3_4_1.json").read_text())

CASES = {name: (name, {}) for name in KINDS}
CASES["cnn"] = "cnn", {"augment": "tutorial"}
CASES |= {
    f"{name}, {shape}": (name, {"image_shape": shape})
    for name in ("resnet20", "tf_efficientnet_lite0", "deit_tiny")
    for shape in ((48, 40, 1), (64, 80, 3))
}
CASES |= {
    f"{name}, dropout": (name, {"dropout": 0.1, "weight_decay": 1e-4})
    for name in ("resnet50", "vit_tiny", "convnext_tiny")
}
for case in ("keras:ResNet50", "keras:ConvNeXtTiny", "keras:MobileNetV3Small"):
    CASES[case] = case, {"width": 1.0}

LOAD = """
import pathlib, sys
import keras, numpy
for path in pathlib.Path(sys.argv[1]).glob("*.keras"):
    images = numpy.load(path.with_suffix(".images.npy"))
    try:
        logits = keras.ops.convert_to_numpy(keras.saving.load_model(path)(images))
    except Exception as error:
        print(path.name, error)
    else:
        numpy.save(f"{sys.argv[2]}/{path.name}.npy", logits)
"""


def run_of(case):
    name, options = CASES[case]
    width = 0.34 if "small" in name else 0.1
    return random_run(name, **{"width": width, **options})


def objects_in(config):
    """All serialized objects, at any depth."""
    if isinstance(config, list):
        for x in config:
            yield from objects_in(x)
    elif isinstance(config, dict):
        if config.get("module"):
            yield config
        yield from objects_in(list(config.values()))


def config_in(path):
    return json.loads(zipfile.ZipFile(path).read("config.json"))


@pytest.mark.parametrize(
    "case",
    ["cnn", "alexnet_two_columns", slow("mobilenet_v3_small"), slow("deit_tiny")],
)
def test_files_have_only_arguments_of_an_old_keras(case, tmp_path):
    run = run_of(case)
    write_keras(tmp_path / "a.keras", stock_network(run.network()), run)
    found = list(objects_in(config_in(tmp_path / "a.keras")))
    for x in found:
        module = x["module"].rpartition(".")[2]
        known = OLDEST[f"{module}.{x['class_name']}"]
        assert set(x["config"]) <= set(known), x
    assert len(found) > 20


def test_an_argument_that_was_set_is_written(tmp_path):
    """And an operation keeps a name if the one that it gets could be a layer's."""
    run, x = random_run("lenet"), keras.Input((32, 32, 3))
    y = keras.layers.BatchNormalization(renorm=True, name="norm")(x)
    y = keras.layers.Add(name="add_0")([y, x]) + x
    y = keras.layers.GlobalAveragePooling2D(name="pool")(keras.ops.square(y))
    network = keras.Model(x, keras.layers.Dense(10, name="logits")(y))
    write_keras(tmp_path / "a.keras", network, run)
    configs = {}
    for x in objects_in(config_in(tmp_path / "a.keras")):
        configs[x["class_name"]] = x["config"]
        if x["class_name"] == "Add" and "ops" in x["module"]:
            assert "name" in x["config"]
    assert configs["BatchNormalization"]["renorm"] is True
    assert configs["Square"] == {}
    keras.backend.clear_session()
    images = random_images(run)
    logits = keras.saving.load_model(tmp_path / "a.keras").predict(images, verbose=0)
    expected = network(run.preprocess(images))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with a file and images for each case, and the expected logits."""
    folder, expected = tmp_path_factory.mktemp("files"), {}
    for number, case in enumerate(CASES):
        run, path = run_of(case), folder / f"{number}.keras"
        trained, images = run.network(), random_images(run)
        write_keras(path, stock_network(trained), run)
        np.save(path.with_suffix(".images.npy"), images)
        expected[case] = comparison.logits_of(run, trained, images)
    return folder, expected


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_older_versions_compute_the_same_logits(written, program, tmp_path):
    folder, expected = written
    command = [program, "-P", "-c", LOAD, folder, tmp_path]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == ""
    for number, case in enumerate(CASES):
        logits, wanted = np.load(tmp_path / f"{number}.keras.npy"), expected[case]
        largest = np.abs(wanted).max()
        assert np.abs(logits - wanted).max() < 1e-4 * largest, case
