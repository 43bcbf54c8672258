"""The synthetic data set: constant random images."""

import time

import numpy as np
import tensorflow as tf

from towers.data import synthetic


def read_all(source):
    images, labels = source.read(tf.range(source.num_examples, dtype=tf.int64))
    return images.numpy(), labels.numpy()


def test_default_images_are_shaped_like_cifar10():
    data = synthetic.load()
    assert data.train.num_examples == 10_000
    assert data.test.num_examples == 2_000
    assert data.train.image_shape == data.test.image_shape == (32, 32, 3)
    assert len(data.class_names) == 10
    images, labels = read_all(data.test)
    assert images.shape == (2_000, 32, 32, 3) and images.dtype == np.uint8
    assert labels.shape == (2_000,) and labels.dtype == np.int32


def test_shape_classes_and_number_are_as_asked():
    data = synthetic.load(image_shape=(9, 8, 1), num_classes=3, num_examples=(700, 5))
    images, labels = read_all(data.train)
    assert images.shape == (700, 9, 8, 1)
    assert data.train.image_shape == (9, 8, 1)
    assert set(labels) == {0, 1, 2}
    assert len(set(data.class_names)) == 3
    assert len(data.mean) == len(data.deviation) == 1
    assert read_all(data.test)[0].shape == (5, 9, 8, 1)


def test_two_loads_give_the_same_examples():
    first, second = synthetic.load(), synthetic.load()
    for name in ("train", "test"):
        for a, b in zip(
            read_all(getattr(first, name)), read_all(getattr(second, name)), strict=True
        ):
            np.testing.assert_array_equal(a, b)
    assert first.mean == second.mean


def test_an_example_is_the_same_alone_and_in_a_compiled_function():
    source = synthetic.load().train
    images, labels = read_all(source)
    indices = np.array([9_999, 0, 4_321])
    image, label = tf.function(source.read)(tf.constant(indices))
    np.testing.assert_array_equal(image, images[indices])
    np.testing.assert_array_equal(label, labels[indices])


def test_training_and_test_images_are_different_noise():
    data = synthetic.load()
    train, test = read_all(data.train)[0], read_all(data.test)[0]
    assert not {image.tobytes() for image in train} & {i.tobytes() for i in test}


def test_moments_are_those_of_the_training_images():
    data = synthetic.load(num_examples=(1_024, 10))
    pixels = read_all(data.train)[0].astype(np.float64)
    np.testing.assert_allclose(data.mean, pixels.mean((0, 1, 2)), rtol=1e-9)
    np.testing.assert_allclose(data.deviation, pixels.std((0, 1, 2)), rtol=1e-9)


def test_many_large_images_are_there_at_once():
    start = time.process_time()
    data = synthetic.load(image_shape=(224, 224, 3), num_examples=(1_281_167, 50_000))
    assert time.process_time() - start < 5.0
    image, _ = data.train.read(tf.constant([1_281_166], tf.int64))
    assert image.shape == (1, 224, 224, 3)
