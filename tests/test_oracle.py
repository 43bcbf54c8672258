"""The oracle against literals.

Its layers and their gradients are those of TensorFlow by way of the networks, in
test_models.py; its optimizers those of Keras by way of the trainer's, in
test_optimizers.py.
"""

import math

import numpy as np
import pytest
from engines import oracle
from engines.oracle import layer


def test_micro_batches_of_towers_chain_the_states_of_batch_norm_in_literals():
    network = [
        layer("batch_norm", "norm", momentum=0.5),
        layer("flatten", "flat"),
        layer("dense", "logits"),
    ]
    params = {
        "norm/gamma": np.ones(1),
        "norm/beta": np.zeros(1),
        "logits/kernel": np.array([[1.0, -1.0]]),
    }
    state = {"norm/moving_mean": np.zeros(1), "norm/moving_variance": np.ones(1)}
    # Two micro-batches of five images on two towers: (1, 2, 3), (4, 5); (3, 5, 7),
    # (8, 10).
    images = np.array([1.0, 2, 3, 4, 5, 3, 5, 7, 8, 10]).reshape(10, 1, 1, 1)
    labels = np.array([0, 1, 0, 1, 0, 0, 0, 1, 1, 0])
    options = {"learning_rate": 0.0, "num_towers": 2, "accumulate_steps": 2}
    result = oracle.train(network, params, state, [(images, labels)], **options)
    # Tower 1 has means 2 and 5 and variances 2/3 and 8/3, tower 2 means 4.5 and 9 and
    # variances 1/4 and 1.
    means = (0.25 * 2 + 0.5 * 5, 0.25 * 4.5 + 0.5 * 9)
    variances = (0.25 + 0.25 * 2 / 3 + 0.5 * 8 / 3, 0.25 + 0.25 / 4 + 0.5)
    for name, (one, two) in (("mean", means), ("variance", variances)):
        found = result.state[f"norm/moving_{name}"]
        assert found == pytest.approx((3 * one + 2 * two) / 5)
    # Tower 2 sees 4 and 5 at -+ 0.5 / sqrt(0.251), then 8 and 10 at -+ 1 / sqrt(1.001).
    [report] = result.reports
    assert report.tower_images == [6, 4]
    margins = (2 * 0.5 / math.sqrt(0.25 + 1e-3), 2 * 1 / math.sqrt(1 + 1e-3))
    expected = np.mean([math.log1p(math.exp(-margin)) for margin in margins])
    assert report.tower_losses[1] == pytest.approx(expected)
    assert report.loss == pytest.approx(
        (3 * report.tower_losses[0] + 2 * report.tower_losses[1]) / 5
    )


# The update, in literal numbers.


def test_two_steps_in_literals():
    """With images of zeros the cross-entropy has no gradient by the kernel, so with
    weight decay 1 the gradient is the kernel itself."""
    network = [layer("flatten", "flat"), layer("dense", "logits")]
    given = {"logits/kernel": np.array([[1.0, -1.0]])}
    batch = (np.zeros((2, 1, 1, 1)), np.array([0, 1]))
    result = oracle.train(
        network,
        given,
        {},
        2 * [batch],
        optimizer="momentum",
        momentum=0.5,
        learning_rate=oracle.staircase(0.1, 0.1, num_examples=2, epochs_per_decay=1),
        weight_decay={"logits/kernel": 1.0},
        clip_norm=math.sqrt(2) / 2,
        ema_decay=0.15,
    )
    # The joint norm of the decay is sqrt(2), so it is halved: v = 0.5, 1 - 0.1 * 0.5;
    # then 0.95 is clipped to 0.5, v = 0.25 + 0.5, 0.95 - 0.01 * 0.75.
    kernel = result.params["logits/kernel"]
    np.testing.assert_allclose(kernel, [[0.9425, -0.9425]], rtol=1e-14)
    velocity = result.slots["velocity"]["logits/kernel"]
    np.testing.assert_allclose(velocity, [[0.75, -0.75]], rtol=1e-14)
    # Decays 1/10, then the bound.
    average = 0.15 * (0.1 * 1 + 0.9 * 0.95) + 0.85 * 0.9425
    found = result.averages["logits/kernel"][0, 0]
    assert found == pytest.approx(average, rel=1e-14)
    steps = zip(result.reports, [0.1, 0.01], [1, 0.95], strict=True)
    for report, rate, before in steps:
        assert report.learning_rate == pytest.approx(rate)
        assert report.loss == pytest.approx(math.log(2))
        assert report.total_loss == pytest.approx(math.log(2) + before**2)
        assert report.gradient_norm == pytest.approx(math.sqrt(2) * before)
        assert report.accuracy == 0.5
    assert given["logits/kernel"].tolist() == [[1, -1]]


def test_a_step_of_lars_in_literals():
    # |w| = 5 and |g| = 10; with decay 1 the local rate is 0.3 * 5 / (10 + 5) = 0.1.
    params = {"k": np.array([[3.0, 4.0]]), "b": np.array([3.0]), "z": np.zeros((1, 1))}
    gradients = {
        "k": np.array([[6.0, 8.0]]),
        "b": np.array([8.0]),
        "z": np.ones((1, 1)),
    }
    slots = {"velocity": {name: np.zeros_like(p) for name, p in params.items()}}
    found, slots = oracle.lars(
        params, gradients, slots, 0.5, decay={"k": 1.0}, trust_coefficient=0.3
    )
    np.testing.assert_allclose(slots["velocity"]["k"], [[0.9, 1.2]], rtol=1e-14)
    np.testing.assert_allclose(found["k"], [[2.55, 3.4]], rtol=1e-14)
    assert (found["b"], found["z"]) == (-1.0, -0.5)
