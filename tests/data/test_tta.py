"""Test-time augmentation against NumPy."""

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from marks import slow
from recipes import Recipe, create_trainer

from towers.config import factories
from towers.config.choices import TTA
from towers.models.variables import build_network
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.reduce import shares
from towers.parallel.strategies.model_parallel import model_parallel
from towers.parallel.strategies.replicated import replicated
from towers.parallel.strategies.towers import towers


def moved(images, rows, columns):
    """By whole pixels; what comes in is mirrored at the edge."""
    height, width = images.shape[1:3]
    padded = np.pad(images, [(0, 0), (1, 1), (1, 1), (0, 0)], "reflect")
    return padded[:, 1 - rows : 1 - rows + height, 1 - columns : 1 - columns + width]


def of_numpy(name, images):
    """[(weight, images)]: half of the weight to the image and its mirror image."""
    shown = [(1.0, images)]
    if name != "mirror":
        shown = [(0.5, images)]
        shown += [(0.25, moved(images, by, by)) for by in (1, -1)]
    return [(w / 2, x) for w, y in shown for x in (y, y[:, :, ::-1])]


@pytest.mark.parametrize("name", ["mirror", "translate"])
def test_transforms_are_those_of_numpy(name):
    images = np.random.default_rng(0).normal(size=(2, 5, 6, 3)).astype(np.float32)
    expected = of_numpy(name, images)
    transforms = factories.create("tta", name)
    assert len(transforms) == len(expected) == (2 if name == "mirror" else 6)
    for (weight, transform), (wanted_weight, wanted) in zip(
        transforms, expected, strict=True
    ):
        assert weight == wanted_weight
        shown = images if transform is None else transform(tf.constant(images))
        np.testing.assert_array_equal(shown, wanted)


def linear_network():
    """To which a pixel's place matters."""

    def create():
        images = keras.Input(networks.IMAGE_SHAPE, name="images")
        x = keras.layers.Flatten(name="flatten")(images)
        logits = keras.layers.Dense(networks.NUM_CLASSES, name="logits")(x)
        return keras.Model(images, logits)

    return networks.Network(build_network(create, seed=1), [], {})


PLACES = [
    (towers, 3, {}),
    (replicated, 2, {}),
    (AsynchronousTrainer, 2, {}),
    (towers, 5, {}),
    (model_parallel, 4, {"group_size": 2}),
]


FAST = [("mirror", *PLACES[0]), ("translate", *PLACES[1])]


@pytest.mark.parametrize(
    "name,cls,num_devices,options",
    [
        case if case in FAST else slow(*case)
        for case in ((name, *place) for name in TTA for place in PLACES)
    ],
)
def test_the_mean_logits_over_the_transforms_decide(name, cls, num_devices, options):
    network = linear_network()
    batches = networks.random_batches(2, 13)
    for number, batch in enumerate(batches):
        batch["mask"] = np.ones(13, np.float32)
        batch["positions"] = 13 * number + np.arange(13)
    batches[1]["mask"][5:] = 0
    options = options | {"tta": factories.create("tta", name)}
    trainer = create_trainer(cls, network, Recipe(), batches, num_devices, **options)
    lead_devices = trainer.devices[:: trainer.strategy.num_shards]
    feed = networks.feed_of(batches, shares(13, len(lead_devices)), lead_devices)
    counts = trainer.evaluate(feed, len(batches)).reported
    correct, changed, predicted = [], 0, []
    for batch, size in zip(batches, (13, 5), strict=True):
        images, labels = batch["images"][:size], batch["labels"][:size]
        plain = network.model(images, training=False).numpy()
        answers = [np.argmax(plain, 1)] * 2
        predicted.append(np.stack([labels, answers[0]], 1))
        if name != "none":
            shown = of_numpy(name, images)
            logits = sum(w * network.model(x, training=False).numpy() for w, x in shown)
            answers[1] = np.argmax(logits, 1)
            changed += np.sum(answers[0] != answers[1])
        correct.append([np.sum(answer == labels) for answer in answers])
    plain, by_tta = np.sum(correct, 0)
    assert (counts["correct"], counts["images"]) == (plain, 18)
    np.testing.assert_array_equal(
        counts["predictions"][:, :2], np.concatenate(predicted)
    )
    if name == "none":
        assert "correct_tta" not in counts
    else:
        assert changed, "the transforms change nothing"
        assert counts["correct_tta"] == by_tta
