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
