"""Random crops of arrays and of photos, against Pillow and NumPy in float64."""

import io
import math

import numpy as np
import pytest
import tensorflow as tf
from pictures import random_pixels
from PIL import Image, ImageOps
from test_augment import DEVIATION, MEAN, Drawn, random_images
from test_cached import Files
from test_image import photo

from towers.data import randomness
from towers.data.augment import crops
from towers.data.augment.augmentation import create_augment
from towers.data.batches import TrainBatches
from towers.data.files.cached import CachedSource
from towers.data.files.image_files import ImageOptions

N = 60


def box(sizes, place, height, width, low=0.08, high=1.0):
    """top, left, height, width, as torchvision's `RandomResizedCrop.get_params`."""
    for area_share, aspect in sizes.astype(np.float64):
        area = height * width * (low + (high - low) * area_share)
        ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * aspect)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = math.floor(place[0] * (height - h + 1))
            return top, math.floor(place[1] * (width - w + 1)), h, w
    w, h = width, height
    if width / height < 3 / 4:
        h = round(w / (3 / 4))
    elif width / height > 4 / 3:
        w = round(h * (4 / 3))
    return (height - h) // 2, (width - w) // 2, h, w


def interpolation(length, size):
    """float64 [size, length]: the shares of the pixels of a part in those of the
    result."""
    shares = np.zeros((size, length))
    for place in range(size):
        center = min(max((place + 0.5) * length / size - 0.5, 0), length - 1)
        first = math.floor(center)
        shares[place, first] += 1 - (center - first)
        shares[place, min(first + 1, length - 1)] += center - first
    return shares


def boxes_of(drawn, n, height, width, *scale):
    """[n, 4]: top, left, height, width."""
    numbers = crops.draw_numbers(drawn, n, *scale)
    boxes = np.stack(crops.random_boxes(numbers, height, width), 1)
    one_by_one = [crops.random_box(x, height, width) for x in numbers.numpy()]
    np.testing.assert_array_equal(boxes, one_by_one)
    return boxes


@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.35, 0.9)])
@pytest.mark.parametrize("height,width", [(32, 32), (28, 40), (6, 60), (60, 6)])
def test_boxes_are_those_of_torchvision(height, width, scale):
    drawn = Drawn(n=N)
    boxes = boxes_of(drawn, N, height, width, scale)
    sizes, places = drawn.numbers["crop_size"], drawn.numbers["crop_place"]
    pairs = zip(sizes, places, strict=True)
    expected = [box(*pair, height, width, *scale) for pair in pairs]
    np.testing.assert_array_equal(boxes, expected)
    areas = boxes[:, 2] * boxes[:, 3] / (height * width)
    if height == width:
        low, high = scale
        assert low - 0.02 < areas.min() < low + 0.1
        assert high - 0.1 < areas.max() < high + 0.02 and np.ptp(boxes[:, 0]) > 12
    elif height != 28:  # some fit only after several attempts, or never
        middle = box(np.full((1, 2), 0.999), [0, 0], height, width)
        assert (boxes == middle).all(1).any()


@pytest.mark.parametrize("shape", [(32, 32, 3), (28, 40, 1)])
def test_crops_equal_numpy_image_by_image(shape):
    height, width, _ = shape
    images, drawn = random_images(N, shape), Drawn(n=N)
    actual = crops.crop_resize_flip(tf.constant(images), drawn).numpy()
    boxes = boxes_of(drawn, N, height, width).astype(int)
    for i, (top, left, h, w) in enumerate(boxes):
        part = images[i, top : top + h, left : left + w]
        expected = np.einsum(
            "yh,hwc,xw->yxc", interpolation(h, height), part, interpolation(w, width)
        )
        if drawn.numbers["flip"][i, 0] >= 0.5:
            expected = expected[:, ::-1]
        np.testing.assert_allclose(actual[i], expected, atol=1e-3)


# Crops of photos.

SIDE = 16
NUM_PHOTOS, NUM_IMAGES = 9, 6
SEED = 3


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
        top, left, height, width = place
        part = upright.crop((left, top, left + width, top + height))
        expected = np.array(part.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        expected = expected[:, ::-1] if is_flipped[i] else expected
        found = batch["images"][i].numpy() * DEVIATION + MEAN
        np.testing.assert_allclose(found, expected, atol=1.01)
        assert batch["labels"][i] == index % 4
    assert len(set(is_flipped)) == 2
    if scale == (0.6, 0.7):
        assert 0.5 < min(areas) <= max(areas) < 0.8
    else:
        assert min(areas) < 0.5 < max(areas)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize(
    "size,share,resized",
    [((40, 60), 0.8, (20, 30)), ((96, 64), 0.5, (48, 32)), ((10, 20), 1, (16, 32))],
)
def test_a_center_crop_is_a_resize_and_a_crop_by_pillow(
    size, share, resized, orientation, interpolation
):
    # Less contrast, so that nothing is clipped between the rows and the columns.
    pixels = random_pixels(0, *size) // 2 + 64
    content = photo(Image.fromarray(pixels), "PNG", orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    height, width = resized if orientation == 1 else resized[::-1]
    resampling = Image.Resampling[interpolation.upper()]
    middle = upright.resize((width, height), resampling)
    top, left = (height - SIDE) // 2, (width - SIDE) // 2
    middle = middle.crop((left, top, left + SIDE, top + SIDE))
    options = ImageOptions(
        image_size=SIDE, center_crop=share, interpolation=interpolation
    )
    source = CachedSource(Files([content]), (SIDE, SIDE, 3), options)
    image = source.read(tf.constant([0], tf.int64))[0][0].numpy().astype(int)
    # A turned photo is resized before it is turned; its rows are rounded first.
    assert np.abs(image - middle).max() <= 2 * (orientation != 1)
