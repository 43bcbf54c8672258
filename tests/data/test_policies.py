"""Operations against Pillow, policies against loops over single operations."""

import itertools
import zlib

import numpy as np
import pytest
import tensorflow as tf
from marks import slow
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from test_augment import DEVIATION, MEAN, SHAPE, Drawn, augment, random_images

from towers.config.choices import POLICIES, target_of
from towers.data.augment import operations, policies
from towers.data.augment.crops import crop_resize_flip
from towers.data.augment.operations import OPERATIONS

AFFINE, NEAREST = Image.Transform.AFFINE, Image.Resampling.NEAREST
BILINEAR = Image.Resampling.BILINEAR
FOURTEEN = OPERATIONS[:14]
SIGNED = FOURTEEN[1:10]
TURNS = "shear_x", "shear_y", "rotate"
ENHANCEMENTS = "brightness", "color", "contrast", "sharpness"


def some_images(shape):
    """Noise, narrow noise, smooth, of one value, and of two."""
    height, width, channels = shape
    images = random_images(5, shape)
    rows, columns = np.mgrid[:height, :width]
    images[1] = 90 + images[1] // 4
    images[2] = (3 * rows + 2 * columns)[..., None] + 9 * np.arange(channels)
    images[3] = 77
    images[4] = np.where(images[4] < 200, 10, 250)
    return images


def by_pillow(image, name, value, filter=NEAREST):
    """torchvision's `_apply_op` on uint8 [height, width, channels]."""
    shape, value = image.shape, float(value)
    image = Image.fromarray(image.squeeze())

    def moved(*matrix):
        return image.transform(image.size, AFFINE, matrix, filter)

    operations = {
        "identity": lambda: image,
        "shear_x": lambda: moved(1, value, 0, 0, 1, 0),
        "shear_y": lambda: moved(1, 0, 0, value, 1, 0),
        "translate_x": lambda: moved(1, 0, -int(value), 0, 1, 0),
        "translate_y": lambda: moved(1, 0, 0, 0, 1, -int(value)),
        "rotate": lambda: image.rotate(value, filter),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(1 + value),
        "color": lambda: ImageEnhance.Color(image).enhance(1 + value),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(1 + value),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(1 + value),
        "posterize": lambda: ImageOps.posterize(image, int(value)),
        "solarize": lambda: ImageOps.solarize(image, value),
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "equalize": lambda: ImageOps.equalize(image),
        "invert": lambda: ImageOps.invert(image),
        "gray": lambda: image.convert("L").convert(image.mode),
        "blur": lambda: image.filter(ImageFilter.GaussianBlur(value)),
    }
    return np.asarray(operations[name]()).reshape(shape)


def space(bins, side, shear=0.3, pixels=None, degrees=30, strength=0.9, bits=4):
    """torchvision's `_augmentation_space` for square images: name -> its magnitudes."""
    pixels = 150 / 331 * side if pixels is None else pixels
    most = {"shear_x": shear, "shear_y": shear, "rotate": degrees}
    most |= {"translate_x": pixels, "translate_y": pixels}
    most |= dict.fromkeys(ENHANCEMENTS, strength)
    found = {name: np.linspace(0, value, bins) for name, value in most.items()}
    found["posterize"] = 8 - np.round(np.arange(bins) / ((bins - 1) / bits))
    found["solarize"] = np.linspace(255, 0, bins)
    return found


RAND, AUTO = space(31, 32), space(10, 32)
TRIVIAL = space(31, 32, shear=0.99, pixels=32, degrees=135, strength=0.99, bits=6)


def apply(images, names, values, bilinear=False):
    """Single operations, with the values that `by_pillow` takes."""
    ours = []
    for name, value in zip(names, values, strict=True):
        converted = {"posterize": 8 - value, **dict.fromkeys(ENHANCEMENTS, 1 + value)}
        whole = int(value) if name.startswith("translate") else value
        ours.append(converted.get(name, whole))
    return operations.apply(
        tf.constant(images, tf.float32),
        tf.constant([OPERATIONS.index(name) for name in names], tf.int64),
        tf.constant(ours, tf.float64),
        bilinear=bilinear,
    ).numpy()


def value_of(name, magnitudes, number, sign):
    """At one of its magnitudes, negated where the sign is above a half."""
    value = magnitudes[name][number] if name in magnitudes else 0.0
    return -value if name in SIGNED and sign >= 0.5 else value


def operate(name, numbers, images=None, **options):
    """A policy on 32x32 images; its results are whole values except augmix's."""
    images = some_images(SHAPE) if images is None else images
    policy, drawn = getattr(policies, name), Drawn(n=len(images), **numbers)
    found = policy(tf.constant(images, tf.float32), drawn, **options).numpy()
    return images, found, drawn.numbers


@pytest.mark.parametrize(
    "shape,filter",
    [((32, 32, 3), NEAREST), ((21, 40, 3), BILINEAR), ((28, 28, 1), NEAREST)],
)
def test_every_operation_is_that_of_pillow_but_for_its_rounding(shape, filter):
    """At every magnitude of the two tables, all of them in one batch."""
    cases, (height, width, channels) = [], shape
    for magnitudes, ours in ((RAND, policies.RAND), (TRIVIAL, policies.TRIVIAL)):
        for name, k in itertools.product(FOURTEEN, range(31)):
            for sign in (1, -1) if name in SIGNED else (1,):
                value = magnitudes[name][k] * sign if name in magnitudes else 0.0
                if ours is policies.RAND and name.startswith("translate"):
                    side = width if name == "translate_x" else height
                    value *= side / 32
                cases.append((name, value, ours.value(name, k, sign, height, width)))
    cases += [("blur", x, x) for x in np.linspace(0.1, 2, 40)]
    names, values, ours = zip(*cases, strict=True)
    some = some_images(shape)
    images = some[np.arange(len(cases)) % len(some)]
    changed = set()
    for _ in range(2):
        found = operations.apply(
            tf.constant(images, tf.float32),
            tf.constant([OPERATIONS.index(name) for name in names], tf.int64),
            tf.constant(ours, tf.float64),
            bilinear=filter is BILINEAR,
        ).numpy()
        np.testing.assert_array_equal(found, np.round(found))
        for i, (name, value) in enumerate(zip(names, values, strict=True)):
            # Between two pixels either is the nearest.
            near = (0, -1e-3, 1e-3) if name in TURNS else (0,)
            expected = [by_pillow(images[i], name, value + x, filter) for x in near]
            errors = np.min(np.abs(found[i] - np.float64(expected)), 0)
            most = 0.002 if name in TURNS else 0
            assert np.mean(errors > 1) <= most, f"{name} {value}"
            if (expected[0] != images[i]).any():
                changed.add(name)
        images = np.roll(images, 2, axis=0)
    without_color = {"color"} if channels == 1 else set()
    assert changed == set(OPERATIONS) - {"identity"} - without_color


@pytest.mark.parametrize("count,magnitude", [(2, 9), (3, 17)])
def test_operations_of_rand_augment_follow_each_other(count, magnitude):
    images, found, numbers = operate(
        "rand_augment", {}, rand_augment=(count, magnitude)
    )
    drawn, seen = numbers["rand_augment"], set()
    assert drawn.shape == (5, count, 2)
    for place in range(count):
        names = [FOURTEEN[int(x * 14)] for x in drawn[:, place, 0]]
        rows = zip(names, drawn[:, place, 1], strict=True)
        values = [value_of(name, RAND, magnitude, sign) for name, sign in rows]
        images = apply(images, names, values)
        seen |= set(names)
    np.testing.assert_array_equal(found, images)
    assert len(seen) > 4


def test_trivial_augment_draws_a_magnitude():
    images = np.concatenate([some_images(SHAPE)] * 60)
    images, found, numbers = operate("trivial_augment", {}, images)
    drawn = numbers["trivial_augment"]
    names = [FOURTEEN[int(x * 14)] for x in drawn[:, 0]]
    assert set(names) == set(FOURTEEN)
    values = [
        value_of(name, TRIVIAL, int(k * 31), sign)
        for name, (_, k, sign) in zip(names, drawn, strict=True)
    ]
    np.testing.assert_array_equal(found, apply(images, names, values))


# CRC-32 of the tables of torchvision and of the paper's appendix, as `repr` shows them.
SUMS = {"cifar10": 3535410203, "imagenet": 2544550396}


@pytest.mark.parametrize("learned_on", SUMS)
def test_auto_augment_has_the_published_pairs(learned_on):
    """Each pair on ten images, with both operations, one, the other and none."""
    pairs = policies.SUB_POLICIES[learned_on]
    assert zlib.crc32(repr(pairs).encode()) == SUMS[learned_on]
    images = np.repeat(some_images(SHAPE)[[0, 2]], 5 * 25, axis=0)
    numbers = np.random.default_rng(0).random((250, 5), np.float32)
    numbers[:, 0] = (np.arange(250) % 25 + 0.5) / 25
    images, found, _ = operate(
        "auto_augment", {"auto_augment": numbers}, images, learned_on=learned_on
    )
    applied = 0
    for place, (chance, sign) in enumerate(((1, 2), (3, 4))):
        names, values = [], []
        for i, drawn in enumerate(numbers):
            name, probability, k = pairs[i % 25][place]
            is_applied = drawn[chance] < np.float32(probability)
            applied += is_applied
            value = value_of(name, AUTO, k, drawn[sign])
            name = "solarize" if name == "invert" else name
            names.append(name if is_applied else "identity")
            values.append(value)
        images = apply(images, names, values)
    np.testing.assert_array_equal(found, images)
    assert 0.4 < applied / 500 < 0.7


def test_augmix_is_that_of_its_authors():
    """Their `augment_and_mix` and `augmentations`, in float64."""
    images = np.concatenate([some_images(SHAPE)] * 6)
    images, found, numbers = operate("augmix", {}, images)
    names = "autocontrast equalize posterize rotate solarize".split()
    names += "shear_x shear_y translate_x translate_y".split()
    depths = 1 + np.floor(3 * numbers["augmix_depth"]).astype(int)
    cuts = np.sort(numbers["augmix_weights"][:, :2].astype(np.float64), 1)
    weights = np.diff(cuts, axis=1, prepend=0, append=1)
    mixed = np.zeros(images.shape)
    for chain in range(3):
        changed = images
        for place in range(3):
            rows = []
            for drawn in numbers["augmix"][:, chain, place].astype(np.float64):
                name, level = names[int(drawn[0] * 9)], 0.1 + 2.9 * drawn[1]
                sign = 1 if drawn[2] < 0.5 else -1
                value = {
                    "posterize": 4 - int(level * 4 / 10),
                    "rotate": sign * int(level * 30 / 10),
                    "solarize": 256 - int(level * 256 / 10),
                    "shear": sign * level * 0.3 / 10,
                    "translate": sign * int(level * (32 / 3) / 10),
                }.get(name.removesuffix("_x").removesuffix("_y"), 0)
                rows.append((name, value))
            is_applied = (place < depths[:, chain])[:, None, None, None]
            changed = np.where(
                is_applied, apply(changed, *zip(*rows, strict=True), True), changed
            )
        mixed += weights[:, chain, None, None, None] * changed
    share = numbers["augmix_weights"][:, 2, None, None, None]
    expected = (1 - share) * images + share * mixed
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize(
    "name,policy",
    [
        slow("pad_crop_flip", "trivial_augment"),
        ("random_resized_crop", "trivial_augment"),
        ("none", "none"),
        ("none", "auto_augment_cifar10"),
        *(
            slow("none", x)
            for x in POLICIES
            if x not in ("none", "auto_augment_cifar10")
        ),
    ],
)
def test_a_policy_gets_the_pixels_of_any_augmentation(name, policy):
    images, drawn = tf.constant(random_images()), Drawn()
    plain = augment(name)
    whole = plain.train(images, drawn) * DEVIATION + MEAN
    if name == "random_resized_crop":  # has pixels in the middle of two values
        whole = crop_resize_flip(images, drawn)
    row = POLICIES[policy]
    function = getattr(policies, target_of("policy", policy).partition(":")[2])
    expected = whole
    if policy != "none":
        expected = function(tf.round(whole), drawn, **row.options)
    found = augment(name, policy=policy)
    augmented = found.train(images, drawn)
    np.testing.assert_allclose(augmented * DEVIATION + MEAN, expected, atol=1e-3)
    compiled = tf.function(lambda images: found.train(images, drawn), autograph=False)
    np.testing.assert_array_equal(compiled(images), augmented)
    # Images keep to themselves, so that a batch may be cut in any way.
    some = Drawn(n=4, **{key: numbers[5:9] for key, numbers in drawn.numbers.items()})
    np.testing.assert_array_equal(found.train(images[5:9], some), augmented[5:9])
    np.testing.assert_array_equal(found.evaluate(images), plain.evaluate(images))
    if plain.train_on_crops and policy != "none":
        crops = tf.round(plain.train_on_crops(images, drawn) * DEVIATION + MEAN)
        actual = found.train_on_crops(images, drawn) * DEVIATION + MEAN
        expected = function(crops, drawn, **row.options)
        np.testing.assert_allclose(actual, expected, atol=1e-3)


SLOW = "augmix", "rand_augment", "auto_augment_imagenet"


@pytest.mark.parametrize(
    "name", [slow(name) if name in SLOW else name for name in POLICIES]
)
def test_on_gpus_no_shape_depends_on_values_and_the_bits_are_the_same(name):
    images, options = some_images(SHAPE), {"policy": name}
    here = augment("pad_crop_flip", **options).train(images, Drawn(n=len(images)))
    drawn = Drawn(n=len(images))
    there = augment("pad_crop_flip", on_gpu=True, **options)
    there.train(images, drawn)  # draws the numbers

    @tf.function(autograph=False)
    def call(images):
        return there.train(images, drawn)

    graph = call.get_concrete_function(tf.TensorSpec(images.shape, tf.uint8)).graph
    assert not [op.name for op in graph.get_operations() if op.type == "Where"]
    np.testing.assert_array_equal(call(tf.constant(images)), here)
