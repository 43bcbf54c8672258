"""A batch is a pure function of (seed, step), however it is come by."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf
from marks import slow

from towers.config.choices import AUGMENTS
from towers.data.augment.augmentation import create_augment
from towers.data.augment.distortions import extend
from towers.data.augment.mixing import create_mix
from towers.data.batches import EvalBatches, TrainBatches, hold_out
from towers.data.files.cached import CachedSource
from towers.data.files.image_files import ImageOptions
from towers.data.files.index import index_of
from towers.data.share import Share
from towers.data.sources import ArraySource

MOMENTS = ((100.0,) * 3, (50.0,) * 3)
NOISE = {"dropout1_noise": (3,), "dropout2_noise": (2, 2)}


def source(num_examples, size=8):
    """Random images whose label is their index."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num_examples, size, size, 3), np.uint8)
    return ArraySource(images, np.arange(num_examples, dtype=np.int32))


def train_batches(num_examples, batch_size, augment="pad_crop_flip", seed=0, **kwargs):
    size = 26 if augment == "tutorial" else 8
    found = source(num_examples, size)
    augmented = create_augment(augment, found.image_shape, *MOMENTS)
    return TrainBatches(found, augmented, seed, batch_size, **kwargs)


def at(batches, step):
    return arrays_of(batches(tf.constant(step, tf.int64)))


def arrays_of(batch):
    return {name: values.numpy() for name, values in batch.items()}


def labels_of(batches, num_steps):
    compiled = tf.function(batches.indices)
    steps = (tf.constant(step, tf.int64) for step in range(num_steps))
    return np.concatenate([compiled(step) for step in steps])


def assert_same(actual, expected):
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


# num_examples, batch_size: batches that divide an epoch, straddle two or many, are as
# large as one, and of one image.
SIZES = [
    (3, 11),
    *[
        slow(*sizes)
        for sizes in [(7, 5), (12, 4), (10, 4), (5, 5), (3, 8), (4, 9), (1, 3), (6, 1)]
    ],
]


@pytest.mark.parametrize("num_examples,batch_size", SIZES)
def test_the_stream_from_any_step_is_the_function_of_the_step(num_examples, batch_size):
    batches = train_batches(num_examples, batch_size, "none")
    for first_step in (0, 4):
        stream = batches.stream(first_step).take(3).as_numpy_iterator()
        for step, actual in enumerate(stream, first_step):
            assert_same(actual, at(batches, step))


@pytest.mark.parametrize("num_examples,batch_size", SIZES)
def test_every_epoch_visits_each_example_once(num_examples, batch_size):
    num_epochs = 4
    batches = train_batches(num_examples, batch_size)
    labels = labels_of(batches, -(-num_epochs * num_examples // batch_size))
    epochs = labels[: num_epochs * num_examples].reshape(num_epochs, num_examples)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(num_examples))


def test_the_order_differs_from_epoch_to_epoch_and_from_seed_to_seed():
    orders = [
        tuple(epoch)
        for seed in (0, 1, 2)
        for epoch in labels_of(train_batches(50, 25, seed=seed), 6).reshape(3, 50)
    ]
    assert len(set(orders)) == 9
    assert tuple(range(50)) not in orders


def test_order_and_views_do_not_depend_on_the_batch_size():
    """Where they are drawn from example and epoch; flips alternate with the epoch."""
    views = []
    for size in (4, 16):
        batches = [
            at(train_batches(12, size, "translate_flip"), step)
            for step in range(48 // size)
        ]
        views.append(
            [np.concatenate([x[key] for x in batches]) for key in ("labels", "images")]
        )
    for small, large in zip(*views, strict=True):
        np.testing.assert_array_equal(small, large)


@pytest.mark.parametrize("num_examples,batch_size,repeats", [slow(7, 13, 3), (9, 8, 4)])
def test_repeated_images_come_from_fewer_places_each_in_a_view_of_its_own(
    num_examples, batch_size, repeats
):
    """Copy c of an image of epoch e is what a run without repeats sees in its epoch
    e * repeats + c. The last image may have fewer copies."""
    num_drawn = -(-batch_size // repeats)
    batches = train_batches(num_examples, batch_size, "translate_flip", repeats=repeats)
    plain = train_batches(num_examples, num_drawn, "none")
    epochs = train_batches(num_examples, num_examples, "translate_flip")
    views = [at(epochs, epoch) for epoch in range(4 * repeats)]
    streamed = batches.stream(1).take(3).as_numpy_iterator()
    for step, actual in enumerate(streamed, 1):
        assert_same(actual, at(batches, step))
        drawn = at(plain, step)["labels"]
        for j, (image, label) in enumerate(
            zip(actual["images"], actual["labels"], strict=True)
        ):
            copy, place = divmod(j, num_drawn)
            assert label == drawn[place]
            epoch = (step * num_drawn + place) // num_examples
            view = views[epoch * repeats + copy]
            [expected] = view["images"][view["labels"] == label]
            np.testing.assert_array_equal(image, expected)


@pytest.mark.parametrize("augment", ["pad_crop_flip", slow("translate_4_flip")])
def test_augmentation_is_drawn_anew_for_every_image_and_epoch(augment):
    """One image in 200 epochs: 81 places, mirrored or not."""
    stream = train_batches(1, 200, augment).stream(0).take(2).as_numpy_iterator()
    views = [{image.tobytes() for image in batch["images"]} for batch in stream]
    # 115 different ones of 162 are expected.
    assert min(map(len, views)) > 90 and views[0] != views[1]


@pytest.mark.parametrize("batch_size", [3, 10, 11])
def test_an_evaluation_counts_each_example_exactly_once(batch_size):
    examples = source(10)
    augment = create_augment("pad_crop_flip", examples.image_shape, *MOMENTS)
    stream = EvalBatches(examples, augment, batch_size).stream()
    batches = list(stream.as_numpy_iterator())
    assert len(batches) == -(-10 // batch_size)
    for batch in batches:
        assert batch["images"].shape == (batch_size, 8, 8, 3)
        assert batch["mask"].dtype == np.float32
    joined = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
    counts = joined["mask"] == 1
    np.testing.assert_array_equal(joined["labels"][counts], np.arange(10))
    np.testing.assert_array_equal(joined["mask"][~counts], 0)
    images, _ = examples.read(tf.range(10, dtype=tf.int64))
    np.testing.assert_array_equal(joined["images"][counts], augment.evaluate(images))
    assert np.all(np.isfinite(joined["images"]))


@pytest.mark.parametrize(
    "sizes,augment,policy",
    [
        ([7, 6], "random_resized_crop", "none"),
        slow([7, 6], "random_resized_crop", "rand_augment"),
        slow([13], "pad_crop_flip", "three_augment"),
        *(
            slow(*case, "none")
            for case in itertools.product([[13], [7, 6], [5, 4, 4], [1, 12]], AUGMENTS)
            if case != ([7, 6], "random_resized_crop")
        ),
    ],
    ids=str,
)
def test_the_parts_of_a_batch_are_together_the_batch(sizes, augment, policy):
    """With everything that draws numbers or mixes neighbors, over 3 micro-batches, in
    streams; the whole one has the same bits in a compiled function."""
    whole = train_batches(
        30, 39, augment, noise_shapes=NOISE, mix=create_mix(0.7, 1, 30), repeats=2
    )
    whole.source.sample_weights = np.linspace(0, 1, 30, dtype=np.float32)
    everything = extend(
        create_augment(augment, whole.source.image_shape, *MOMENTS, policy=policy),
        color_jitter=0.4,
        random_gray=0.2,
        random_erasing=0.5,
        cutout_size=3,
    )
    whole = dataclasses.replace(whole, augment=everything)
    expected = at(whole, 2)
    if sizes == [13]:
        compiled = tf.function(whole.__call__)(tf.constant(2, tf.int64))
        assert_same(arrays_of(compiled), expected)
    for part in Share.all_of(13).split(sizes):
        own = dataclasses.replace(whole, share=part)
        if part.first:
            [streamed] = own.stream(2).take(1).as_numpy_iterator()
        else:  # augmented outside of the stream, as resident images are
            [stored] = own.stored_stream(2).take(1)
            streamed = arrays_of(own.process(tf.constant(2, tf.int64), stored))
        wanted = {}
        for name, values in expected.items():
            micro = values.reshape(3, 13, *values.shape[1:])
            micro = micro[:, part.first : part.first + part.size]
            wanted[name] = np.concatenate(micro)
        assert_same(streamed, wanted)


@pytest.mark.parametrize(
    "num_towers,part",
    [
        (8, None),
        (3, Share(3, 4, 7)),
        *(slow(n, None) for n in (1, 2, 3)),
        *(slow(n, Share(3, 4, 7)) for n in (1, 2, 8)),
    ],
)
def test_the_towers_of_an_evaluation_have_together_the_batch(num_towers, part):
    """As streams, and as functions of a number; of a worker's part too."""
    found = source(10)
    augment = create_augment("pad_crop_flip", found.image_shape, *MOMENTS)
    batches = EvalBatches(found, augment, 7, part)
    split = batches.split(num_towers)
    assert len(split) == min(num_towers, part.size if part else 7)
    streamed = [list(own.stream(1).as_numpy_iterator()) for own in split]
    whole = EvalBatches(found, augment, 7).stream(1).as_numpy_iterator()
    wanted = slice(part.first, part.first + part.size) if part else slice(None)
    for number, expected in enumerate(whole, start=1):
        for of_towers in (
            [own[number - 1] for own in streamed],
            [at(own, number) for own in split],
        ):
            actual = {k: np.concatenate([x[k] for x in of_towers]) for k in expected}
            assert_same(actual, {k: v[wanted] for k, v in expected.items()})


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.99])
def test_of_each_class_a_fraction_is_held_out(fraction):
    labels = np.repeat(np.arange(4), [100, 40, 50, 10])
    images = np.arange(200, dtype=np.uint8).reshape(200, 1, 1, 1)
    rest, held_out = hold_out(ArraySource(images, labels), fraction)
    numbers = [
        x.read(tf.range(x.num_examples, dtype=tf.int64))[0].numpy().ravel()
        for x in (rest, held_out)
    ]
    np.testing.assert_array_equal(np.sort(np.concatenate(numbers)), np.arange(200))
    counts = np.bincount(labels[numbers[1]], minlength=4)
    np.testing.assert_allclose(counts, fraction * np.bincount(labels), atol=1)
    assert counts.sum() == round(200 * fraction)
    # From everywhere in a class: the mean of places with a std of 29.
    places = numbers[1][labels[numbers[1]] == 0]
    assert abs(places.mean() - 49.5) < 4 * 29 / len(places) ** 0.5


def test_what_is_held_out_goes_by_the_names_wherever_the_folder_is(tmp_path):
    """Also where other images are added, but for a few."""

    def held_out(folder, names):
        kinds = ["ant", "bee"]
        paths = [(f"{folder}/{x}/{n}", x) for x in kinds for n in names]
        files = index_of(*zip(*paths, strict=True))
        source = CachedSource(files, (8, 6, 3), ImageOptions())
        _, chosen = hold_out(source, 0.25)
        return {
            chosen.location(i)[len(str(folder)) :] for i in range(chosen.num_examples)
        }

    names = [f"{number:03}.png" for number in range(40)]
    first = held_out(tmp_path, names)
    assert len(first) == 20 and held_out(tmp_path / "else", names) == first
    assert len(first - held_out(tmp_path, ["0.png", *names])) <= 2
