"""Random crops of whole photos, against Pillow and a loop in NumPy float64."""

import dataclasses
import io

import numpy as np
import pytest
import tensorflow as tf
from marks import slow
from pictures import random_pixels
from PIL import Image, ImageOps
from test_augment import DEVIATION, MEAN, Drawn, augment, random_images
from test_cached import Files
from test_crops import box
from test_image import photo

from towers.data import crops, randomness
from towers.data.augment import create_augment
from towers.data.batches import TrainBatches, hold_out
from towers.data.cached import CachedSource
from towers.data.image_files import ImageOptions
from towers.data.part import Part
from towers.data.rand_augment import transform_randomly

SIDE = 16
NUM_PHOTOS, NUM_IMAGES = 9, 6
SEED = 3


def cut_out(image, top, left, height, width, side=SIDE):
    """By Pillow: a part of an upright image, resized."""
    part = image.crop((left, top, left + width, top + height))
    return np.asarray(part.resize((side, side), Image.Resampling.BILINEAR)).astype(int)


@pytest.fixture
def photos():
    """Files of different sizes; every third is turned."""
    rng = np.random.default_rng(0)
    return [
        photo(
            Image.fromarray(random_pixels(i, *rng.integers(20, 90, 2))),
            "PNG",
            6 if i % 3 else 1,
        )
        for i in range(NUM_PHOTOS)
    ]


def batches_of(files, name="random_resized_crop", image_size=SIDE, **options):
    shape = (SIDE, SIDE, 3)
    source = CachedSource(Files(files), shape, ImageOptions(image_size=image_size))
    augmentation = create_augment(name, shape, MEAN, DEVIATION, **options)
    return TrainBatches(source, augmentation, SEED, NUM_IMAGES)


@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.6, 0.7)])
def test_a_batch_is_made_of_crops_of_the_photos(photos, scale):
    batches = batches_of(photos, crop_scale=scale)
    step = tf.constant(4, tf.int64)  # an epoch ends in it
    draw = randomness.Draw(SEED, step, None, None)
    numbers = crops.draw_numbers(draw, NUM_IMAGES, scale).numpy()
    is_flipped = draw("flip", [NUM_IMAGES, 1]).numpy()[:, 0] >= 0.5
    batch, areas = batches(step), []
    for i, index in enumerate(batches.indices(step).numpy().tolist()):
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(photos[index])))
        # These are shares of the area already.
        size = upright.size[::-1]
        place = box(numbers[i, :-1], numbers[i, -1], *size, low=0.0)
        areas.append(place[2] * place[3] / np.prod(upright.size))
        expected = cut_out(upright, *place)
        expected = expected[:, ::-1] if is_flipped[i] else expected
        found = batch["images"][i].numpy() * DEVIATION + MEAN
        np.testing.assert_allclose(found, expected, atol=1.01)
        assert batch["labels"][i] == index % 4
    assert len(set(is_flipped)) == 2
    if scale == (0.6, 0.7):
        assert 0.5 < min(areas) <= max(areas) < 0.8
    else:
        assert min(areas) < 0.5 < max(areas)


@pytest.mark.parametrize("name", ["random_resized_crop", slow("rand_augment")])
def test_streams_parts_and_subsets_have_the_same_crops(photos, name):
    batches = batches_of(photos, name)
    expected = [batches(tf.constant(step, tf.int64)) for step in (2, 3)]
    streams = [batches.stream(2)]
    streams += [
        dataclasses.replace(batches, part=Part(first, size, NUM_IMAGES)).stream(2)
        for first, size in ((0, 2), (2, 4))
    ]
    for batch, whole, *parts in zip(expected, *streams, strict=False):
        for key, values in batch.items():
            np.testing.assert_array_equal(whole[key], values)
            np.testing.assert_array_equal(
                np.concatenate([x[key] for x in parts]), values
            )
    rest, _ = hold_out(batches.source, 0.3)
    subset = dataclasses.replace(batches, source=rest)
    assert rest.reads_crops
    (batch,) = subset.stream(0).take(1)
    again = subset(tf.constant(0, tf.int64))
    np.testing.assert_array_equal(batch["images"], again["images"])


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(
    "size,share,resized", [((40, 60), 0.8, (20, 30)), ((96, 64), 0.5, (48, 32))]
)
def test_a_center_crop_is_a_resize_and_a_crop_by_pillow(
    size, share, resized, orientation
):
    content = photo(Image.fromarray(random_pixels(0, *size)), "PNG", orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    height, width = resized if orientation == 1 else resized[::-1]
    middle = upright.resize((width, height), Image.Resampling.BILINEAR)
    top, left = (height - SIDE) // 2, (width - SIDE) // 2
    middle = middle.crop((left, top, left + SIDE, top + SIDE))
    options = ImageOptions(image_size=SIDE, center_crop=share)
    source = CachedSource(Files([content]), (SIDE, SIDE, 3), options)
    image = source.read(tf.constant([0], tf.int64))[0][0].numpy().astype(int)
    # A turned photo is resized before it is turned; its rows are rounded first.
    assert np.abs(image - middle).max() <= (orientation != 1)


def test_photos_that_are_not_resized_are_cropped_as_they_are_stored():
    files = [
        photo(Image.fromarray(x), "PNG", 1)
        for x in random_images(NUM_PHOTOS, (SIDE, SIDE, 3))
    ]
    batches = batches_of(files, image_size=0)
    step = tf.constant(1, tf.int64)
    stored, _ = batches.source.read(batches.indices(step))
    draw = randomness.Draw(SEED, step, None, None)
    expected = batches.augment.train(stored, draw)
    np.testing.assert_array_equal(batches(step)["images"], expected)


def test_the_operations_follow_crops_that_were_read():
    images, drawn = tf.constant(random_images()), Drawn()
    actual = augment("rand_augment").train_on_crops(images, drawn)
    assert set(drawn.numbers) == {"flip", "rand_augment"}
    is_flipped = drawn.numbers["flip"][:, 0, None, None, None] >= 0.5
    flipped = np.where(is_flipped, images[:, :, ::-1], images).astype(np.float32)
    expected = transform_randomly(tf.constant(flipped), drawn)
    np.testing.assert_allclose(actual, (expected - MEAN) / DEVIATION, atol=1e-5)
