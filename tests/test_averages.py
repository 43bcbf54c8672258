"""Runs of older versions, whose checkpoints have no averages of moments."""

import numpy as np
import small_runs
from small_runs import NUM_TEST, arrays, saved, small_config

from towers import load_run
from towers.evaluation import evaluate
from towers.parallel.evaluator import AVERAGES
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer
from towers.training import train


def older_run(tmp_path):
    """Makes a run half way whose checkpoint has no averages of the moments."""
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


def test_without_averages_of_the_moments_they_begin_with_the_state(
    tmp_path, monkeypatch
):
    small_runs.use(monkeypatch, small_runs.full_network)
    older_run(tmp_path)
    tensors, run = saved(tmp_path).tensors, load_run(tmp_path)
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
    assert evaluate(tmp_path)["test_correct_ema"] == correct

    after = train(tmp_path, small_config(max_steps=6)).state
    decay = min(small_config().ema_decay, (1 + 5) / (10 + 5))
    moments = [k for k in tensors if k.startswith("state/norm1/moving")]
    assert len(moments) == 2
    for name in moments:
        expected = decay * tensors[name].astype(np.float64) + (1 - decay) * after[name]
        found = after[f"averages/{name[6:]}"]
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
        assert (tensors[name] != after[name]).any()
    assert set(after) == {*tensors, *(f"averages/{k[6:]}" for k in moments)}
