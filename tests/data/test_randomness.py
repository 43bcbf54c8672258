"""Random numbers that depend on (seed, purpose, counter), and on each of them."""

import itertools
import zlib

import numpy as np
import pytest
import tensorflow as tf

from towers.data.randomness import Draw, hashed, key, permutation, uniform, uniform_rows

LENGTH = 10_000

# Neighbors in every direction, and large values.
KEYS = [
    (0, "order", 0),
    (1, "order", 0),
    (2, "order", 0),
    (0, "order", 1),
    (0, "order", 2),
    (1, "order", 1),
    (0, "hold_out", 0),
    (0, "crop", 0),
    (2**31, "order", 0),
    (2**31 - 1, "order", 0),
    (2**63 - 1, "order", 2**40),
]


def numbers(seed, purpose, counter):
    return uniform(seed, purpose, tf.constant(counter, tf.int64), [LENGTH]).numpy()


def views(seed, purpose, counter):
    """Of neighboring examples in one epoch."""
    epochs = tf.fill([LENGTH], tf.constant(counter, tf.int64))
    examples = tf.range(LENGTH, dtype=tf.int64)
    return hashed(seed, purpose, [examples, epochs], 1).numpy()[:, 0]


def order(seed, purpose, counter, length=LENGTH):
    return permutation(seed, purpose, tf.constant(counter, tf.int64), length).numpy()


@pytest.mark.parametrize("draw", [numbers, order, views])
def test_other_seeds_purposes_and_counters_are_uncorrelated(draw):
    """`index_shuffle` gave 0.75 between neighboring seeds."""
    drawn = [draw(*key) for key in KEYS]
    for (a, first), (b, second) in itertools.combinations(enumerate(drawn), 2):
        correlation = np.corrcoef(first, second)[0, 1]
        # Four standard errors; with 55 pairs one in 300 draws would exceed it.
        assert abs(correlation) < 0.04, (KEYS[a], KEYS[b])


def test_hashed_numbers_are_uniform_and_independent_in_every_direction():
    count = 3
    epochs = [
        hashed(5, "flip", [tf.range(LENGTH, dtype=tf.int64), epoch], count).numpy()
        for epoch in tf.repeat(tf.range(4, dtype=tf.int64)[:, None], LENGTH, 1)
    ]
    actual = np.stack(epochs)  # [epoch, example, number]
    assert actual.dtype == np.float32 and actual.shape == (4, LENGTH, count)
    assert actual.min() >= 0 and actual.max() < 1
    counts, _ = np.histogram(actual, 20, (0, 1))
    np.testing.assert_allclose(counts, 6000, atol=5 * np.sqrt(6000))
    rows = actual.transpose(0, 2, 1).reshape(-1, LENGTH)
    correlations = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlations).max() < 0.045
    for row in rows:
        assert abs(np.corrcoef(row[1:], row[:-1])[0, 1]) < 0.045
        pairs, _, _ = np.histogram2d(row[0::2], row[1::2], 4, [(0, 1), (0, 1)])
        expected = LENGTH / 2 / 16
        np.testing.assert_allclose(pairs, expected, atol=5 * np.sqrt(expected))


def test_hashed_numbers_equal_murmurhash_in_plain_integers():
    def mixed(bits):
        bits = (bits + 0x9E3779B9) % 2**32
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            bits = (bits ^ bits >> shift) * factor % 2**32
        return bits

    examples, epochs = [0, 7, 49_999], [3, 0, 2**20]
    actual = hashed(2**40 + 5, "flip", [tf.constant(examples), tf.constant(epochs)], 2)
    for place, counters in enumerate(zip(examples, epochs, strict=True)):
        for number in range(2):
            bits = mixed(number ^ zlib.crc32(b"flip"))
            for part in (5, 2**8, *counters):
                bits = mixed(bits ^ part)
            assert actual[place, number] == bits % 2**23 / 2**23


@pytest.mark.parametrize("length", [1, 2, 7, 10_000])
def test_a_permutation_holds_every_number_once(length):
    actual = permutation(0, "order", tf.constant(0), length)
    assert actual.dtype == tf.int64
    np.testing.assert_array_equal(np.sort(actual), np.arange(length))


def test_numbers_are_those_of_tensorflow():
    for each in KEYS:
        seed, purpose, counter = each
        expected = tf.random.stateless_uniform(
            [LENGTH], key(seed, purpose, tf.constant(counter)), alg="philox"
        )
        np.testing.assert_array_equal(numbers(*each), expected)


@pytest.mark.parametrize("ranges", [[(0, 40)], [(3, 9)], [(39, 40), (0, 4), (7, 7)]])
def test_some_rows_of_a_draw_are_those_of_all(ranges):
    rows = [range(*x) for x in ranges]
    draw = tf.function(lambda step: uniform_rows(7, "noise", step, (5, 3), rows))
    drawn = draw(tf.constant(3, tf.int64))
    every = uniform(7, "noise", tf.constant(3, tf.int64), (40, 5, 3))
    wanted = np.concatenate([every[first:end] for first, end in ranges])
    np.testing.assert_array_equal(drawn, wanted)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_compiled_function_draws_the_same_numbers(jit_compile):
    """Under XLA TensorFlow itself makes other floats of the same random bits."""
    try:
        tf.function(lambda x: x + 1, jit_compile=jit_compile)(1)
    except tf.errors.OpError as error:
        pytest.skip(f"XLA does not compile here: {error.message[:80]}")

    def drawn(counter):
        return uniform(2**63 - 1, "crop", counter, [100])

    compiled = tf.function(drawn, jit_compile=jit_compile)
    # An argument, since what depends on constants alone is computed before.
    for counter in (tf.constant(5, tf.int64), tf.constant(2**40, tf.int64)):
        np.testing.assert_array_equal(compiled(counter), drawn(counter))


def test_a_view_is_drawn_anew_in_each_epoch_and_an_example_once():
    examples, step = tf.range(5, dtype=tf.int64), tf.constant(0, tf.int64)
    draws = [
        Draw(3, step, examples, tf.fill([5], tf.constant(e, tf.int64))) for e in (0, 1)
    ]
    views = [draw.per_view("flip", 2).numpy() for draw in draws]
    assert (views[0] != views[1]).all()
    once = [draw.per_example("flip", 2).numpy() for draw in draws]
    np.testing.assert_array_equal(*once)
