"""Test-time augmentation against NumPy."""

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from marks import slow
from recipes import Recipe, create_trainer

from towers.config.choices import TTA
from towers.data.tta import create_tta
from towers.models import build_network
from towers.parallel import strategies
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.evaluator import RAW, least_confident
from towers.parallel.reduce import shares


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
    transforms = create_tta(name).transforms
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
    (strategies.towers, 3, {}),
    (strategies.replicated, 2, {}),
    (AsynchronousTrainer, 2, {}),
    (strategies.towers, 5, {}),  # more than images of which it is unsure
    (strategies.model_parallel, 4, {"group_size": 2}),
]


FAST = [("mirror", *PLACES[0]), ("translate_unsure", *PLACES[3])]


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
        batch["weights"] = np.ones(13, np.float32)
        batch["positions"] = 13 * number + np.arange(13)
    batches[1]["weights"][5:] = 0
    trainer = create_trainer(
        cls, network, Recipe(), batches, num_devices, tta=create_tta(name), **options
    )
    lead_devices = trainer.devices[:: trainer.strategy.num_shards]
    feed = networks.feed_of(batches, shares(13, len(lead_devices)), lead_devices)
    counts = trainer.evaluate(feed, len(batches))[RAW]
    correct, changed, predicted = [], 0, []
    for batch, size in zip(batches, (13, 5), strict=True):
        images, labels = batch["images"][:size], batch["labels"][:size]
        plain = network.model(images, training=False).numpy()
        answers = [np.argmax(plain, 1)] * 2
        predicted.append(np.stack([labels, answers[0]], 1))
        if name != "none":
            shown = of_numpy(name, images)
            logits = sum(w * network.model(x, training=False).numpy() for w, x in shown)
            by_tta = np.argmax(logits, 1)
            answers[1] = by_tta
            if name == "translate_unsure":
                lowest_first = np.sort(plain, 1)
                lead = lowest_first[:, -1] - lowest_first[:, -2]
                unsure = np.argsort(lead)[:4]  # a quarter of 13
                answers[1] = answers[0].copy()
                answers[1][unsure] = by_tta[unsure]
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


def test_of_a_batch_the_least_confident_images_are_chosen_and_none_that_is_not_meant():
    logits = tf.constant([[5.0, 4.0, 0.0], [1.0, 1.0, 0.0], [3.0, 0.0, 3.1], [9, 0, 0]])
    batch = {"weights": tf.constant([1.0, 0, 1, 1]), "labels": tf.range(4)}
    for share, labels in ((0.25, [2]), (0.3, [2, 0]), (0.75, [2, 0, 3])):
        found = least_confident(batch, logits, share)
        np.testing.assert_array_equal(found["labels"], labels)
        np.testing.assert_array_equal(found["weights"], np.ones(len(labels)))


@pytest.mark.parametrize("num_towers,num_images", [(1, 13), (8, 24), (4, 128)])
def test_workers_choose_as_one_device_does_whatever_their_parts(num_towers, num_images):
    """Of two workers; images that do not divide all go to the first towers."""
    logits = np.random.default_rng(num_images).normal(size=(num_images, 3))
    sizes = shares(num_images, 2 * num_towers)
    split = sum(sizes[:num_towers])
    places = slice(split), slice(split, num_images)
    for share in (0.1, 0.25, 0.5):
        one = least_confident(
            {"weights": np.ones(num_images), "place": np.arange(num_images)},
            tf.constant(logits),
            share,
        )
        chosen = []
        for index, part in enumerate(places):
            batch = {"weights": np.ones(num_images), "place": np.arange(num_images)}
            found = least_confident(
                {name: values[part] for name, values in batch.items()},
                tf.constant(logits[part]),
                share,
                Gathered(index, logits, split),
                num_towers,
            )
            kept = found["weights"].numpy() > 0
            chosen += found["place"].numpy()[kept].tolist()
        assert sorted(chosen) == sorted(one["place"].numpy().tolist())


class Gathered:
    """One of two workers, for which the margins of all are known."""

    size = 2

    def __init__(self, index, logits, split):
        self.index = index
        first, second = -np.sort(-logits)[:, :2].T
        owners = np.arange(len(logits)) >= split
        self._pairs = np.stack([first - second, owners], 1)

    def gather(self, pairs):
        np.testing.assert_allclose(
            pairs, self._pairs[self._pairs[:, 1] == self.index], rtol=1e-12
        )
        return tf.constant(self._pairs)
