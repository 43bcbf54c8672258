"""What an evaluation looks at beside an image, against NumPy."""

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from recipes import Recipe, create_strategy

from towers import config
from towers.models import initialize, keras_settings
from towers.parallel.async_towers import AsyncTowers
from towers.parallel.model_parallel import ModelParallel
from towers.parallel.replicated import Replicated
from towers.parallel.towers import Towers
from towers.parallel.views import VIEWS


def moved(images, rows, columns):
    """By whole pixels; what comes in is mirrored at the edge."""
    height, width = images.shape[1:3]
    padded = np.pad(images, [(0, 0), (1, 1), (1, 1), (0, 0)], "reflect")
    return padded[:, 1 - rows : 1 - rows + height, 1 - columns : 1 - columns + width]


def of_numpy(name, images):
    """[(weight, images)]: half of the weight to the image and its mirror image."""
    shown = [(1.0, images)]
    if name == "six":
        shown = [(0.5, images)]
        shown += [(0.25, moved(images, by, by)) for by in (1, -1)]
    return [(w / 2, x) for w, y in shown for x in (y, y[:, :, ::-1])]


def test_the_names_are_those_of_the_config():
    assert tuple(VIEWS) == config.VIEWS


@pytest.mark.parametrize("name", ["mirror", "six"])
def test_views_are_those_of_numpy(name):
    images = np.random.default_rng(0).normal(size=(2, 5, 6, 3)).astype(np.float32)
    expected = of_numpy(name, images)
    assert len(VIEWS[name]) == len(expected) == (6 if name == "six" else 2)
    for (weight, view), (wanted_weight, wanted) in zip(
        VIEWS[name], expected, strict=True
    ):
        assert weight == wanted_weight
        shown = images if view is None else view(tf.constant(images))
        np.testing.assert_array_equal(shown, wanted)


def linear_network():
    """To which a pixel's place matters."""
    with keras_settings(), tf.device("CPU:0"):
        images = keras.Input(networks.IMAGE_SHAPE, name="images")
        x = keras.layers.Flatten(name="flatten")(images)
        logits = keras.layers.Dense(networks.NUM_CLASSES, name="logits")(x)
        model = keras.Model(images, logits)
        initialize(model, seed=1)
    return networks.Network(model, [], {})


@pytest.mark.parametrize(
    "cls,num_devices,options",
    [
        (Towers, 3, {}),
        (Replicated, 2, {}),
        (AsyncTowers, 2, {}),
        (ModelParallel, 4, {"group_size": 2}),
    ],
)
@pytest.mark.parametrize("name", list(VIEWS))
def test_the_mean_logits_of_the_views_decide(name, cls, num_devices, options):
    network = linear_network()
    batches = networks.random_batches(2, 13)
    for batch in batches:
        batch["weights"] = np.ones(13, np.float32)
    batches[1]["weights"][5:] = 0
    strategy = create_strategy(
        cls, network, Recipe(), batches, num_devices, views=VIEWS[name], **options
    )
    counts = strategy.evaluate(networks.stream_of(batches)(0))
    images = np.concatenate([b["images"] for b in batches])[: 13 + 5]
    labels = np.concatenate([b["labels"] for b in batches])[: 13 + 5]

    def logits_of(images):
        return network.model(images, training=False).numpy()

    correct = [np.argmax(logits_of(images), 1) == labels]
    if name == "plain":
        assert "correct_views" not in counts
    else:
        logits = sum(w * logits_of(x) for w, x in of_numpy(name, images))
        correct.append(np.argmax(logits, 1) == labels)
        assert np.any(correct[0] != correct[1]), "the views change nothing"
        assert counts["correct_views"] == np.sum(correct[1])
    assert (counts["correct"], counts["images"]) == (np.sum(correct[0]), 18)
