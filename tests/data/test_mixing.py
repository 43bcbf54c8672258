"""Mixed images and labels against loops in NumPy; shares against the distribution."""

import math

import numpy as np
import pytest
import tensorflow as tf
from test_augment import Drawn

from towers.data.augment.mixing import at_quantiles, beta_quantiles, create_mix

N, HEIGHT, WIDTH, CHANNELS, NUM_CLASSES = 40, 12, 10, 3, 5


def example():
    rng = np.random.default_rng(0)
    images = rng.normal(size=(N, HEIGHT, WIDTH, CHANNELS)).astype(np.float32)
    return images, rng.integers(0, NUM_CLASSES, N, dtype=np.int32)


def mixed_up(share):
    """What the loops expect of an image: its own pixels, its label's share."""
    return np.full((HEIGHT, WIDTH), 1 - share), 1 - share


def pasted(share, row, column):
    own = np.ones((HEIGHT, WIDTH))
    tall, wide = int(HEIGHT * math.sqrt(share)), int(WIDTH * math.sqrt(share))
    top, left = int(row * HEIGHT) - tall // 2, int(column * WIDTH) - wide // 2
    for y in range(top, top + tall):
        for x in range(left, left + wide):
            if 0 <= y < HEIGHT and 0 <= x < WIDTH:
                own[y, x] = 0
    return own, own.mean()


def test_a_label_has_the_weight_of_its_image():
    """Cross-entropy of mixed images with weights, some 0, in float64."""
    images, labels = example()
    weights = np.random.default_rng(1).uniform(0, 2, N).astype(np.float32)
    weights[3:7] = 0
    batch = {"images": images, "labels": labels, "sample_weights": weights}
    batch = {name: tf.constant(x) for name, x in batch.items()}
    found = create_mix(1.0, 0.0, NUM_CLASSES)(batch, Drawn())
    np.testing.assert_allclose(tf.reduce_sum(found["labels"], 1), 1, rtol=1e-6)
    logs = np.log(np.random.default_rng(2).dirichlet(np.ones(NUM_CLASSES), N))
    losses = -np.sum(found["labels"] * logs, 1) * found["sample_weights"]
    share = Drawn()("mixup", [N]).numpy().astype(np.float64)
    own = -weights * logs[np.arange(N), labels]
    other = -np.roll(weights, 1) * logs[np.arange(N), np.roll(labels, 1)]
    expected = (1 - share) * own + share * other
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("mixup,cutmix", [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
def test_mixup_and_cutmix_equal_loops(mixup, cutmix):
    """Labels are classes or sets of them."""
    images, labels = example()
    one_hot = np.eye(NUM_CLASSES, dtype=np.float32)[labels]
    sets = one_hot + np.roll(one_hot, 1, axis=1)
    drawn, mix = Drawn(), create_mix(mixup, cutmix, NUM_CLASSES)
    found = mix({"images": tf.constant(images), "labels": tf.constant(labels)}, drawn)
    of_sets = mix({"images": tf.constant(images), "labels": tf.constant(sets)}, drawn)
    is_mixed_up = np.full(N, mixup > 0)
    if mixup and cutmix:  # one of the two
        is_mixed_up = drawn.numbers["mixing"] < 0.5
        assert 0.25 < np.mean(is_mixed_up) < 0.75
    assert create_mix(0.0, 0.0, NUM_CLASSES) is None
    for i in range(N):
        if is_mixed_up[i]:
            own, share = mixed_up(float(drawn.numbers["mixup"][i]))
        else:
            own, share = pasted(*drawn.numbers["cutmix"][i].astype(np.float64))
        own = own[..., None]
        for name, mixed, before, values in [
            ("image", found["images"], own, images),
            ("label", found["labels"], share, one_hot),
            ("labels", of_sets["labels"], share, sets),
        ]:
            expected = before * values[i] + (1 - before) * values[i - 1]
            np.testing.assert_allclose(
                mixed[i], expected, 0, 1e-5, err_msg=f"{name} {i}"
            )


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.4, 1.0, 8.0, 1000.0])
def test_shares_are_distributed_as_those_of_numpy(alpha):
    n = 20_000
    rng = np.random.default_rng(1)
    numbers = tf.constant(rng.random(n, np.float32))
    found = at_quantiles(beta_quantiles(alpha), numbers).numpy()
    assert found.min() >= 0 and found.max() <= 1
    assert np.var(found) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)
    # The largest distance between the two samples' distribution functions; 1.95 is the
    # Kolmogorov-Smirnov bound at one in a thousand. Beyond seven digits float32 does
    # not tell shares from 0 and 1.
    samples = [np.sort(np.round(x, 7)) for x in (found, rng.beta(alpha, alpha, n))]
    points = np.concatenate(samples)
    ours, theirs = (np.searchsorted(x, points, "right") / n for x in samples)
    assert np.abs(ours - theirs).max() < 1.95 * math.sqrt(2 / n)
