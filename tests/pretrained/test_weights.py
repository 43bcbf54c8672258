"""--init_from: weights in files that Keras and TensorFlow have written."""

import shutil
import zipfile

import h5py
import keras
import numpy as np
import pytest
from keras import layers
from marks import slow
from written_weights import (
    IMAGE_SHAPE,
    NUM_CLASSES,
    WRITERS,
    create_theirs,
    empty_state,
    fill,
    zeros,
)

from towers.errors import CheckpointError
from towers.models.create import create_model
from towers.pretrained import initial


@pytest.fixture(scope="module")
def theirs():
    return create_theirs()


@pytest.fixture(scope="module")
def written(tmp_path_factory, theirs):
    """A folder with a file of each kind."""
    folder = tmp_path_factory.mktemp("written")
    for name, write in WRITERS.items():
        write(theirs, folder / name)
    return folder


@pytest.mark.parametrize("name", WRITERS)
def test_variables_are_found_and_a_head_of_other_classes_is_drawn(
    name, written, theirs
):
    state = empty_state()
    taken, missing, drawn = fill(written / name, state)
    assert not missing and not drawn and len(taken) == 10
    for variable in theirs.variables:
        key = variable.path.rpartition("block/")[2]
        kind = "state" if "moving" in key else "params"
        if "seed" not in key:
            np.testing.assert_array_equal(state[f"{kind}/{key}"], variable)
    average = state["averages/conv1/kernel"]
    np.testing.assert_array_equal(average, state["params/conv1/kernel"])
    state = empty_state(num_classes=3)
    taken, missing, drawn = fill(written / name, state)
    shapes = {key: stored.shape for key, stored in drawn.items()}
    assert shapes == {"params/logits/kernel": (4, 5), "params/logits/bias": (5,)}
    assert len(taken) == 8 and not missing


# Files that are damaged or lead elsewhere.

PLACES = {
    "model.h5": "model_weights/conv1/conv1/kernel",
    "model.weights.h5": "layers/conv2d/vars/0",
}


@pytest.mark.parametrize("name", ["model.keras", *PLACES])
def test_a_link_to_another_file_is_not_followed(name, written, tmp_path):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["data"] = np.ones((3, 3, 3, 4))
    inside = "model.weights.h5" if name == "model.keras" else name
    shutil.copy(written / inside, tmp_path)
    with h5py.File(tmp_path / inside, "r+") as file:
        del file[PLACES[inside]]
        file[PLACES[inside]] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "data")
    if name == "model.keras":
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.write(tmp_path / inside, inside)
    with pytest.raises(CheckpointError, match="link to another file"):
        fill(tmp_path / name, empty_state())


def test_an_archive_that_could_be_of_any_size_is_refused(tmp_path):
    path = tmp_path / "bomb.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.weights.h5", bytes(10**6))
    with pytest.raises(CheckpointError, match="is compressed"):
        fill(path, empty_state())


def test_half_a_file_is_refused(written, tmp_path):
    for name in ("model.keras", "model.h5"):
        content = (written / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(CheckpointError, match="cannot be read"):
            fill(tmp_path / name, empty_state())


def test_a_file_of_keras_2_is_to_be_saved_as_hdf5(tmp_path):
    """As tf_keras 2.21 writes it: layers are numbered by class and have no names."""
    with h5py.File(tmp_path / "model.weights.h5", "w") as file:
        file["layers/conv2d/vars/0"] = np.ones((3, 3, 3, 4))
    with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
        archive.write(tmp_path / "model.weights.h5", "model.weights.h5")
    for name in ("model.keras", "model.weights.h5"):
        with pytest.raises(CheckpointError, match=r"tf_keras.* as FILE\.h5"):
            fill(tmp_path / name, empty_state())


# Layers with automatic names.


def OfAutomaticNames(  # noqa: N802, as in keras.applications
    weights=None, input_shape=IMAGE_SHAPE, classes=NUM_CLASSES, **_
):
    """A network whose layers are not called in the order in which they are made."""
    images = x = keras.Input(input_shape)
    convolutions = [layers.Conv2D(3, 3) for _ in range(3)]
    norms = [layers.BatchNormalization() for _ in range(3)]
    for conv, norm in zip(convolutions[::-1], norms[::-1], strict=True):
        x = norm(conv(x))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(classes, name="predictions")(x))


def preprocess_input(x):
    return x / 255.0


def saved_later(path, offset):
    """Save the network with random values after other layers were named.

    Returns name -> value as if none had been.
    """
    keras.backend.clear_session()
    for _ in range(offset):
        layers.Conv2D(3, 3), layers.BatchNormalization()
    model, rng, expected = OfAutomaticNames(), np.random.default_rng(0), {}
    for variable in model.variables:
        variable.assign(rng.uniform(size=variable.shape))
    WRITERS[path.name](model, path)
    for stem in ("conv2d", "batch_normalization", "predictions"):
        own = [x for x in model.layers if x.name.startswith(stem)]
        own.sort(key=lambda x: (len(x.name), x.name))  # 9 before 10
        for place, layer in enumerate(own):
            name = f"{stem}_{place}" if place else stem
            expected |= {f"{name}/{v.name}": np.array(v) for v in layer.variables}
    return expected


@pytest.mark.parametrize(
    "name,offset",
    [("model.h5", 1), ("by_name", 8), slow("model.h5", 0)]
    + [slow(name, 8) for name in WRITERS if name != "by_name"],
)
def test_automatic_names_of_any_numbers_are_those_of_the_network(
    name, offset, tmp_path, monkeypatch
):
    cls = OfAutomaticNames
    monkeypatch.setattr(keras.applications, cls.__name__, cls, raising=False)
    choice = f"keras:{cls.__name__}"
    model = create_model(choice, image_shape=IMAGE_SHAPE, num_classes=NUM_CLASSES)
    state = zeros(model)
    expected = saved_later(tmp_path / name, offset)
    with initial.open_source(str(tmp_path / name), choice, state, None) as weights:
        taken, missing, drawn = initial.match_variables(state, weights)
        initial.fill(state, taken)
    assert len(taken) == len(expected) == 20 and not missing and not drawn
    for key, value in state.items():
        np.testing.assert_array_equal(value, expected[key.partition("/")[2]])
