"""Parts of a run whose steps are compiled apart."""

import math

import keras
import networks
import numpy as np
import pytest
import tensorflow as tf
from recipes import Recipe, assert_equal_to_oracle, create_strategy

from towers.parallel.async_towers import AsyncTowers
from towers.parallel.model_parallel import ModelParallel
from towers.parallel.replicated import Replicated
from towers.parallel.stages import Stage, fitted, only_stage, shrunk, stage_at
from towers.parallel.towers import Towers

NUM_STEPS, SMALL_STEPS, FROZEN_FROM = 8, 3, 5
SMALL_SHAPE = (6, 6, 3)
FROZEN = "conv1/kernel"


@pytest.mark.parametrize("size", [(24, 24), (8, 31), (1, 1), (31, 33)])
def test_images_are_shrunk_as_by_tensorflow(size):
    images = np.random.default_rng(0).normal(size=(3, 32, 33, 2)).astype(np.float32)
    expected = tf.image.resize(images, size, "bilinear", antialias=True)
    np.testing.assert_allclose(shrunk(tf.constant(images), *size), expected, atol=1e-5)


def test_a_step_belongs_to_the_stage_that_has_not_ended():
    stages = [Stage(3, None), Stage(5, None), only_stage(None)]
    assert [stage_at(stages, step) for step in range(7)] == [0, 0, 0, 1, 1, 2, 2]


def small_and_large():
    small, large = map(
        lambda shape: networks.residual_network(image_shape=shape),
        (SMALL_SHAPE, networks.IMAGE_SHAPE),
    )
    stages = (
        Stage(SMALL_STEPS, small.model),
        Stage(FROZEN_FROM, large.model),
        Stage(math.inf, large.model, frozenset({FROZEN})),
    )
    return large, stages


def shrunk_batches(batches):
    """The batches with the first images shrunk by TensorFlow's own function."""
    return [
        batch | {"images": resized(batch["images"])} if step < SMALL_STEPS else batch
        for step, batch in enumerate(batches)
    ]


def resized(images):
    return tf.image.resize(images, SMALL_SHAPE[:2], antialias=True).numpy()


@pytest.mark.parametrize(
    "cls,num_devices,num_towers,options",
    [
        (Towers, 1, 1, {}),
        (Towers, 3, 3, {}),
        (Towers, 2, 2, {"compile_towers": True}),
        (Towers, 3, 1, {"sync_batch_norm": True}),
        (Replicated, 2, 2, {"accumulate_steps": 2}),
        (ModelParallel, 4, 2, {"group_size": 2}),
        (AsyncTowers, 1, 1, {}),
    ],
)
def test_every_strategy_computes_the_stages_as_the_oracle_does(
    cls, num_devices, num_towers, options
):
    """Calls that reach over a stage's end stop there."""
    (network, stages), recipe = small_and_large(), Recipe("nesterov")
    batches = networks.random_batches(NUM_STEPS, 12)
    strategy = create_strategy(
        cls, network, recipe, batches, num_devices, stages=stages, **options
    )
    taken = []
    while not taken or taken[-1] < NUM_STEPS:
        taken.append(strategy.train(NUM_STEPS - (taken or [0])[-1])["step"])
    assert taken == [SMALL_STEPS, FROZEN_FROM, NUM_STEPS]
    expected = recipe.oracle(
        network,
        shrunk_batches(batches),
        num_towers,
        options.get("accumulate_steps", 1),
        frozen={FROZEN: FROZEN_FROM},
    )
    assert_equal_to_oracle(strategy.state(), expected)


def test_a_run_continued_in_a_stage_is_the_same():
    (network, stages), recipe = small_and_large(), Recipe()
    batches = networks.random_batches(NUM_STEPS, 12)

    def strategy():
        return create_strategy(Towers, network, recipe, batches, 2, stages=stages)

    whole, first, second = strategy(), strategy(), strategy()
    for num_steps in (3, 2, 3):
        whole.train(num_steps)
    first.train(3)
    first.train(1)
    second.load(first.state())
    second.train(1)
    second.train(3)
    for name, value in whole.state().items():
        np.testing.assert_array_equal(value, second.state()[name], err_msg=name)


def test_what_a_frozen_parameter_would_need_is_not_computed():
    network, stages = small_and_large()
    batches = networks.random_batches(1, 12)
    strategy = create_strategy(Towers, network, Recipe(), batches, 1, stages=stages)
    counts = []
    for number in (1, 2):
        call = strategy._look_call.get_concrete_function(number, batches[0])
        wanted = [x.op.name for x in call.graph.outputs]
        graph = tf.compat.v1.graph_util.extract_sub_graph(
            call.graph.as_graph_def(), wanted
        )
        kinds = [node.op for node in graph.node]
        counts.append(kinds.count("Conv2DBackpropFilter"))
    assert counts == [2, 1]


def test_a_batch_keeps_all_but_its_images():
    network = networks.plain_network()
    [batch] = networks.random_batches(1, 4, image_shape=(16, 16, 3))
    found = fitted(batch, network.model)
    assert found["images"].shape == (4, 8, 8, 3)
    assert all(found[name] is batch[name] for name in ("labels", "dropout1_noise"))


def test_a_batch_that_fits_is_left_alone():
    """Whatever its images are."""
    inputs = keras.Input([2], name="images")
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    batch = {"images": tf.zeros([4, 2]), "labels": tf.zeros([4], tf.int32)}
    assert fitted(batch, model)["images"] is batch["images"]
