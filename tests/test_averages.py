"""Moving averages of the parameters and of the moments of batch normalization."""

import networks
import numpy as np
import pytest
import small_runs
from marks import slow
from recipes import Recipe, create_trainer
from small_runs import NUM_TEST, arrays, saved, small_config

from towers import load_run
from towers.evaluation import evaluate
from towers.parallel import strategies
from towers.parallel.evaluator import AVERAGES
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer
from towers.training import train

pytestmark = pytest.mark.usefixtures("several_vectors")


def decay_of(step, ema_decay):
    """Of the update after so many steps."""
    return min(ema_decay, (1 + step) / (10 + step))


@pytest.mark.parametrize(
    "create,num_devices,options",
    [
        (strategies.towers, 2, {}),
        slow(strategies.replicated, 2, {"accumulate_steps": 2}),
        slow(strategies.model_parallel, 2, {"group_size": 2}),
    ],
)
def test_averages_follow_parameters_and_moments(create, num_devices, options):
    network = networks.residual_network("float64")
    batches = networks.random_batches(4, 8, noise_shapes={})
    recipe = Recipe(ema_decay=0.2)  # above the first decays and below the later ones
    trainer = create_trainer(create, network, recipe, batches, num_devices, **options)
    averages = network.params | network.state
    for step in range(4):
        trainer.train(1)
        state, decay = trainer.state(), decay_of(step, 0.2)
        values = {
            name.partition("/")[2]: value
            for name, value in state.items()
            if name.startswith(("params/", "state/"))
        }
        assert "norm1/moving_variance" in values
        averages = {k: decay * averages[k] + (1 - decay) * v for k, v in values.items()}
        found = {k[9:]: v for k, v in state.items() if k.startswith("averages/")}
        assert set(found) == set(averages)
        for name, value in averages.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)


@pytest.fixture
def older_run(tmp_path, monkeypatch):
    """A run half way whose checkpoint has no averages of the moments."""
    small_runs.use(monkeypatch, small_runs.full_network)
    train(tmp_path, small_config(max_steps=5))
    newest = saved(tmp_path)
    moments = [k[6:] for k in newest.tensors if k.startswith("state/")]
    tensors = {
        name: value
        for name, value in newest.tensors.items()
        if name not in {f"averages/{k}" for k in moments}
    }
    assert moments and len(tensors) == len(newest.tensors) - len(moments)
    newest.path.rename(tmp_path / "newer")
    folder = tmp_path / "checkpoints"
    Checkpointer(folder).save(Snapshot(newest.step, tensors, newest.trainer_state))
    return tmp_path


def test_without_averages_of_the_moments_the_state_is_taken(older_run):
    tensors, run = saved(older_run).tensors, load_run(older_run)
    model = run.network(AVERAGES)
    for variables, kind in (
        (model.trainable_variables, "averages"),
        (model.non_trainable_variables, "state"),
    ):
        for variable in variables:
            np.testing.assert_array_equal(variable, tensors[f"{kind}/{variable.path}"])
    images, labels = arrays(NUM_TEST, 1)
    logits = run.model_ema(run.preprocess(images), training=False)
    correct = np.sum(np.argmax(logits, 1) == labels)
    assert evaluate(older_run)["test_correct_ema"] == correct


def test_without_averages_of_the_moments_they_begin_with_the_state(older_run):
    before = saved(older_run).tensors
    after = train(older_run, small_config(max_steps=6)).state
    decay = decay_of(5, small_config().ema_decay)
    moments = [k for k in before if k.startswith("state/norm1/moving")]
    assert len(moments) == 2
    for name in moments:
        expected = decay * before[name].astype(np.float64) + (1 - decay) * after[name]
        found = after[f"averages/{name[6:]}"]
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
        assert (before[name] != after[name]).any()
    assert set(after) == {*before, *(f"averages/{k[6:]}" for k in moments)}
