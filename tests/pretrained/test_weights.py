"""--init_from: weights in files that Keras and TensorFlow have written."""

import shutil
import zipfile

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from marks import slow

from towers.errors import CheckpointError
from towers.models.create import create_model
from towers.pretrained import initial
from towers.pretrained.weights import open_weights

IMAGE_SHAPE, NUM_CLASSES = (8, 8, 3), 5


def create_network(*, image_shape, num_classes, width=1.0, regularizer=None):
    """The network to be trained: elementary layers alone."""
    images = keras.Input(image_shape, name="images")
    x = layers.Conv2D(4, 3, name="conv1")(images)
    x = layers.BatchNormalization(name="norm1")(x)
    x = layers.Conv2D(4, 1, name="inner")(x)
    x = layers.GlobalAveragePooling2D(name="pool1")(x)
    return keras.Model(images, layers.Dense(num_classes, name="logits")(x))


def create_theirs(num_classes=NUM_CLASSES):
    """The same with a nested model, an operator, a Lambda, an optimizer, and values."""
    images = keras.Input(IMAGE_SHAPE)
    x = layers.Conv2D(4, 3, name="conv1")(images)
    x = layers.BatchNormalization(name="norm1")(x) + 1.0
    x = layers.Lambda(lambda x: x - 1.0, output_shape=x.shape[1:])(x)
    x = keras.Sequential([layers.Conv2D(4, 1, name="inner")], name="block")(x)
    x = layers.Dropout(0.5)(x)
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(images, layers.Dense(num_classes, name="logits")(x))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(0)
    for variable in model.variables:
        if variable.dtype == "float32":
            variable.assign(rng.uniform(size=variable.shape))
    return model


def save_by_name(model, path):
    """As a program for TensorFlow 1 does."""
    by_name = {v.path: v.value for v in model.variables if "seed" not in v.path}
    tf.compat.v1.train.Saver(by_name).save(None, str(path), write_meta_graph=False)


WRITERS = {
    "model.keras": lambda model, path: model.save(path),
    "model.h5": lambda model, path: model.save(path),
    "model.weights.h5": lambda model, path: model.save_weights(path),
    "exported": lambda model, path: model.export(path, verbose=False),
    "saved_model": lambda model, path: tf.saved_model.save(model, str(path)),
    "checkpoint-1": lambda model, path: tf.train.Checkpoint(net=model).write(path),
    "by_name": save_by_name,
}


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


def zeros(model):
    kinds = {True: "params", False: "state"}
    return {f"{kinds[v.trainable]}/{v.path}": np.zeros(v.shape) for v in model.weights}


def empty_state(num_classes=NUM_CLASSES):
    state = zeros(create_network(image_shape=IMAGE_SHAPE, num_classes=num_classes))
    return state | {"averages/conv1/kernel": np.zeros((3, 3, 3, 4)), "step": np.int64()}


def fill(path, state):
    with open_weights(str(path)) as weights:
        match = initial.match_variables(state, weights)
        initial.fill(state, match.taken)
        return match


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
