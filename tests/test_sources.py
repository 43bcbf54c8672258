"""Sources of labeled images: what they read, and what they refuse."""

import numpy as np
import pytest
import tensorflow as tf

from towers.data.sources import ArraySource, Subset, channel_moments

NUM_EXAMPLES = 11
INDICES = np.array([7, 0, 3, 3, 10])


@pytest.fixture
def examples():
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (NUM_EXAMPLES, 5, 4, 3), dtype=np.uint8)
    return images, rng.integers(0, 10, NUM_EXAMPLES)


def assert_examples(read, images, labels):
    assert read[0].dtype == tf.uint8
    assert read[1].dtype == tf.int32
    np.testing.assert_array_equal(read[0], images)
    np.testing.assert_array_equal(read[1], labels)


def test_read_takes_indices_in_any_order_and_repeated(examples):
    images, labels = examples
    source = ArraySource(images, labels)
    assert source.num_examples == NUM_EXAMPLES
    assert source.image_shape == (5, 4, 3)
    read = source.read(tf.constant(INDICES))
    assert_examples(read, images[INDICES], labels[INDICES])


def test_read_gives_the_same_in_a_compiled_function(examples):
    images, labels = examples
    source = ArraySource(images, labels)
    signature = [tf.TensorSpec([None], tf.int64)]
    read = tf.function(source.read, input_signature=signature)
    assert_examples(read(tf.constant(INDICES)), images[INDICES], labels[INDICES])


def test_read_gives_the_same_in_a_pipeline(examples):
    images, labels = examples
    source = ArraySource(images, labels)
    batches = tf.data.Dataset.from_tensors(INDICES).map(source.read)
    (read,) = list(batches)
    assert_examples(read, images[INDICES], labels[INDICES])


def test_the_arrays_may_change_after_the_source_is_made(examples):
    images, labels = examples
    source = ArraySource(images, labels)
    before = images.copy(), labels.copy()
    images[:] = 0
    labels[:] = 0
    assert_examples(source.read(tf.range(NUM_EXAMPLES, dtype=tf.int64)), *before)


def test_no_indices_read_no_examples(examples):
    images, labels = examples
    none = np.zeros(0, np.int64)
    read = ArraySource(images, labels).read(tf.constant(none))
    assert_examples(read, images[none], labels[none])


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int8])
def test_other_than_uint8_images_are_refused(examples, dtype):
    images, labels = examples
    with pytest.raises(ValueError, match=np.dtype(dtype).name):
        ArraySource(images.astype(dtype), labels)


def test_images_without_channels_are_refused(examples):
    images, labels = examples
    with pytest.raises(ValueError, match=r"uint8 \[11, 5, 4\]"):
        ArraySource(images[..., 0], labels)


def test_a_label_too_few_is_refused_with_both_numbers(examples):
    images, labels = examples
    with pytest.raises(ValueError, match="11 images but 10 labels"):
        ArraySource(images, labels[:-1])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_subset_reads_the_listed_examples(examples, compiled):
    images, labels = examples
    listed = np.array([9, 2, 4, 8])
    subset = Subset(ArraySource(images, labels), listed)
    assert subset.num_examples == 4
    assert subset.image_shape == (5, 4, 3)
    read = tf.function(subset.read) if compiled else subset.read
    places = np.array([3, 0, 0])
    expected = [8, 9, 9]
    assert_examples(read(tf.constant(places)), images[expected], labels[expected])


def test_a_subset_of_a_subset_reads_through_both(examples):
    images, labels = examples
    inner = Subset(ArraySource(images, labels), np.array([9, 2, 4, 8]))
    outer = Subset(inner, np.array([3, 1]))
    assert outer.num_examples == 2
    read = outer.read(tf.constant([0, 1], tf.int64))
    assert_examples(read, images[[8, 2]], labels[[8, 2]])


@pytest.mark.parametrize("channels", [1, 3])
def test_channel_moments_are_those_of_numpy(channels):
    rng = np.random.default_rng(2)
    images = rng.integers(0, 256, (131, 6, 5, channels), dtype=np.uint8)
    images[..., 0] //= 3
    mean, deviation = channel_moments(images)
    pixels = images.astype(np.float64)
    np.testing.assert_allclose(mean, pixels.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(deviation, pixels.std((0, 1, 2)), rtol=1e-12)
