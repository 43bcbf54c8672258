"""float16: the loss is scaled; all towers skip a step that overflows."""

import networks
import numpy as np
import pytest
import small_runs
import tensorflow as tf
from marks import slow
from recipes import Recipe, create_trainer, parted

from towers.parallel import finite
from towers.parallel.strategies.model_parallel import model_parallel
from towers.parallel.strategies.replicated import replicated
from towers.parallel.strategies.towers import towers

KINDS = [
    (towers, 2, {}),
    slow(towers, 4, {"sync_batch_norm": True, "accumulate_steps": 2}),
    slow(replicated, 4, {}),
    slow(model_parallel, 4, {"group_size": 2}),
]


def create(cls, network, batches, num_devices, **options):
    options = {"scale_loss": True} | options
    return create_trainer(cls, network, Recipe(), batches, num_devices, **options)


def of_scale(state):
    return parted(state, "loss_scale/")[0]


@pytest.fixture
def no_rewriting():
    """Keep TensorFlow from ordering the sums of two graphs differently."""
    name = "arithmetic_optimization"
    tf.config.optimizer.set_experimental_options({name: False})
    yield
    tf.config.optimizer.set_experimental_options({name: True})


@pytest.mark.parametrize("cls,num_devices,options", KINDS)
def test_a_power_of_two_changes_no_bit_in_float32(
    cls, num_devices, options, no_rewriting
):
    network = networks.residual_network()
    batches = networks.random_batches(2, 16)
    states = []
    for scale_loss in (True, False):
        strategy = create(
            cls, network, batches, num_devices, scale_loss=scale_loss, **options
        )
        strategy.train(2)
        states.append(strategy.state())
    assert of_scale(states[0]) == {
        "loss_scale/scale": finite.INITIAL_SCALE,
        "loss_scale/good_steps": 2,
    }
    assert not of_scale(states[1])
    small_runs.assert_equal_states(parted(states[0], "loss_scale/")[1], states[1])


@pytest.mark.parametrize("cls,num_devices,options", KINDS)
def test_all_towers_skip_a_step_with_an_infinity_in_one(cls, num_devices, options):
    network = networks.residual_network("mixed_float16")
    batches = networks.random_batches(4, 16)
    batches[2]["images"][15, 1, 1, 0] = np.inf
    strategy = create(cls, network, batches, num_devices, **options)
    assert strategy.train(2)["loss_scale"] == finite.INITIAL_SCALE
    before = strategy.state()
    metrics = strategy.train(1)
    after = strategy.state()
    assert (metrics["step"], after["step"]) == (3, 3)
    assert of_scale(after) == {
        "loss_scale/scale": finite.INITIAL_SCALE / 2,
        "loss_scale/good_steps": 0,
    }
    kept = [parted(x | {"step": 0}, "loss_scale/")[1] for x in (before, after)]
    small_runs.assert_equal_states(*kept)
    assert strategy.train(1)["loss_scale"] == finite.INITIAL_SCALE / 2
    moved = strategy.state()
    strategy.load(after)
    strategy.train(1)
    small_runs.assert_equal_states(strategy.state(), moved)
    assert np.any(moved["params/logits/kernel"] != before["params/logits/kernel"])


def test_the_scale_grows_after_many_good_steps(monkeypatch):
    monkeypatch.setattr(finite, "GROWTH_STEPS", 2)
    monkeypatch.setattr(finite, "LARGEST_SCALE", 2 * finite.INITIAL_SCALE)
    network = networks.plain_network()
    batches = networks.random_batches(6, 8)
    trainer = create(towers, network, batches, 2)
    scales = [trainer.train(1)["loss_scale"] / finite.INITIAL_SCALE for _ in range(6)]
    assert scales == [1, 1, 2, 2, 2, 2]
