"""Every image counts once; one pass serves parameters and moving averages."""

import keras
import networks
import numpy as np
import pytest
import small_runs
from marks import slow
from recipes import Recipe, create_trainer

from towers.build import assembly
from towers.data.augment.augmentation import create_augment
from towers.data.batches import EvalBatches
from towers.data.resident import Resident
from towers.parallel.copies import Weights
from towers.parallel.strategies.model_parallel import model_parallel
from towers.parallel.strategies.replicated import replicated
from towers.parallel.strategies.towers import towers

WEIGHTS = (Weights.RAW, Weights.EMA)
TEST = small_runs.small_data().test
AUGMENT = create_augment("none", TEST.image_shape, (120.0,) * 3, (60.0,) * 3)


def of_numpy(trainer, recipe):
    """Yield weights and (correct, loss), by Keras' own call of the network."""
    images, labels = small_runs.arrays(TEST.num_examples, 1)
    images = AUGMENT.evaluate(images)
    model, state = keras.models.clone_model(trainer.model), trainer.state()
    for kind, of_params, of_state in (
        (Weights.RAW, "params", "state"),
        (Weights.EMA, "averages", "averages"),
    ):
        for variable in model.trainable_variables:
            variable.assign(state[f"{of_params}/{variable.path}"])
        for variable in model.non_trainable_variables:
            variable.assign(state[f"{of_state}/{variable.path}"])
        logits = model(images, training=False).numpy().astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        smooth = recipe.label_smoothing
        losses = -(1 - smooth) * logs[np.arange(len(labels)), labels]
        losses -= smooth * logs.mean(1)
        yield kind, (np.sum(logits.argmax(1) == labels), losses.sum())


SIZES = [1, 7, 23, 40]


@pytest.mark.parametrize(
    "create,num_devices,options,sizes",
    [
        (towers, 3, {}, [7]),
        slow(towers, 3, {}, SIZES),
        slow(towers, 1, {}, SIZES),
        slow(replicated, 2, {}, SIZES),
        slow(model_parallel, 4, {"group_size": 2}, SIZES),
    ],
)
def test_every_image_counts_once_for_both_kinds(create, num_devices, options, sizes):
    network, recipe = networks.residual_network(), Recipe(learning_rate=0.5)
    batches = networks.random_batches(3, 8, noise_shapes={})
    trainer = create_trainer(create, network, recipe, batches, num_devices, **options)
    trainer.train(3)
    expected = dict(of_numpy(trainer, recipe))
    assert expected[Weights.RAW] != expected[Weights.EMA]
    lead_devices = trainer.devices[:: trainer.strategy.num_shards]
    for size in sizes:
        eval_batches = EvalBatches(TEST, AUGMENT, size)
        of_towers = eval_batches.split(len(lead_devices))
        for feed in (
            assembly.create_eval_feed(eval_batches, trainer),
            Resident(of_towers, lead_devices[: len(of_towers)]),
        ):
            for _ in range(2):  # the second time without tracing
                found = trainer.evaluate(feed, len(eval_batches), WEIGHTS)
                found = found.by_weights
                assert list(found) == list(WEIGHTS)
                for kind, (correct, loss) in expected.items():
                    assert found[kind]["images"] == 23
                    assert found[kind]["correct"] == correct
                    assert found[kind]["loss"] == pytest.approx(loss, rel=1e-4)
        outputs = list(
            trainer.evaluator.predictions(
                eval_batches.stream().as_numpy_iterator(), WEIGHTS
            )
        )
        for kind, (correct, loss) in expected.items():
            logits, labels, losses = (
                np.concatenate([x[kind][name] for x in outputs])
                for name in ("logits", "labels", "loss")
            )
            np.testing.assert_array_equal(labels, small_runs.arrays(23, 1)[1])
            assert np.sum(logits.argmax(1) == labels) == correct
            assert losses.sum() == pytest.approx(loss, rel=1e-4)
