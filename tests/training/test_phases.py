"""Phases of a run: progressive resizing, layer freezing."""

import functools
import math

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from marks import slow
from recipes import (
    Recipe,
    assert_equal_to_oracle,
    assert_some_are_clipped,
    clip_norm_for,
    create_trainer,
)

from towers.optim.phases import Phase, downscale, phase_at, phases_of
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.strategies.model_parallel import model_parallel
from towers.parallel.strategies.replicated import replicated
from towers.parallel.strategies.towers import towers

NUM_STEPS, SMALL_STEPS, FROZEN_FROM = 6, 2, 4
SMALL_SHAPE = (6, 6, 3)
FROZEN, DECAY = "conv1/kernel", 0.1


@pytest.mark.parametrize("size", [(24, 24), (8, 31), (1, 1), (31, 33)])
def test_images_are_downscaled_as_by_tensorflow(size):
    images = np.random.default_rng(0).normal(size=(3, 32, 33, 2)).astype(np.float32)
    expected = tf.image.resize(images, size, "bilinear", antialias=True)
    np.testing.assert_allclose(
        downscale(tf.constant(images), *size), expected, atol=1e-5
    )


def test_a_step_belongs_to_the_phase_that_has_not_ended():
    phases = [Phase(3, None), Phase(5, None), *phases_of((), None)]
    assert [phase_at(phases, step) for step in range(7)] == [0, 0, 0, 1, 1, 2, 2]


def small_and_large():
    small = networks.residual_network(image_shape=SMALL_SHAPE)
    large = networks.residual_network(image_shape=networks.IMAGE_SHAPE)
    # What is frozen decays before.
    large.decay.update({FROZEN: DECAY, "logits/kernel": DECAY})
    for variable in large.model.trainable_variables:
        if variable.path in large.decay:
            variable.regularizer = keras.regularizers.L2(DECAY / 2)
    phases = (
        Phase(SMALL_STEPS, small.model),
        Phase(FROZEN_FROM, large.model),
        Phase(math.inf, large.model, frozenset({FROZEN})),
    )
    return large, phases


def downscaled_batches(batches):
    """The batches with the first images downscaled by TensorFlow's own function."""
    resize = functools.partial(tf.image.resize, size=SMALL_SHAPE[:2], antialias=True)
    small = [x | {"images": resize(x["images"]).numpy()} for x in batches[:SMALL_STEPS]]
    return small + batches[SMALL_STEPS:]


@pytest.mark.parametrize(
    "cls,num_devices,num_towers,options",
    [
        (towers, 1, 1, {}),
        slow(towers, 2, 2, {}),
        slow(towers, 2, 2, {"compile_towers": True}),
        slow(towers, 3, 1, {"sync_batch_norm": True}),
        slow(replicated, 2, 2, {"accumulate_steps": 2}),
        slow(model_parallel, 4, 2, {"group_size": 2}),
        slow(AsynchronousTrainer, 1, 1, {}),
    ],
)
def test_every_strategy_computes_the_phases_as_the_oracle_does(
    cls, num_devices, num_towers, options
):
    """Calls that reach over a phase's end stop there; a phase is traced once, when its
    first step is taken."""
    network, phases = small_and_large()
    batches = networks.random_batches(NUM_STEPS, 12)
    recipe = Recipe("nesterov", clip_norm_for(network, batches))
    strategy = create_trainer(
        cls, network, recipe, batches, num_devices, phases=phases, **options
    )
    taken = []
    while not taken or taken[-1] < NUM_STEPS:
        taken.append(strategy.train(NUM_STEPS - (taken or [0])[-1])["step"])
        if cls is not AsynchronousTrainer:
            compiled = strategy.loop.compiled
            assert compiled.experimental_get_tracing_count() == len(taken)
    assert taken == [SMALL_STEPS, FROZEN_FROM, NUM_STEPS]
    expected = recipe.oracle(
        network,
        downscaled_batches(batches),
        num_towers,
        options.get("accumulate_steps", 1),
        frozen={FROZEN: FROZEN_FROM},
    )
    assert_equal_to_oracle(strategy.state(), expected)
    assert_some_are_clipped(expected.reports, recipe)
