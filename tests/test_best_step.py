"""The best step on held-out images: kept, named and used; the early end of a run."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from small_runs import (
    HELD_OUT,
    assert_equal_states,
    every_strategy,
    records,
    saved_steps,
    small_config,
    uninterrupted,
)

from towers.errors import ConfigError
from towers.evaluation import evaluate, load_run
from towers.training import train

EVALUATED = [3, 6, 9, 12, 15]  # steps
PATIENT = small_config(**HELD_OUT, patience=2)


def best_and_end(config):
    """The best step, and that after which two evaluations were no better."""
    lines = uninterrupted(dataclasses.replace(config, patience=0)).records
    accuracies = [
        x["validation_accuracy_ema"] for x in lines if "validation_accuracy_ema" in x
    ]
    assert len(accuracies) == len(EVALUATED)
    for place in range(2, len(accuracies)):
        best = int(np.argmax(accuracies[: place + 1]))  # the first of equals
        if place - best == 2:
            assert place < 4, "the run is not shorter: the test says nothing"
            return EVALUATED[best], EVALUATED[place]
    raise AssertionError(accuracies)


@every_strategy
def test_a_run_ends_after_evaluations_without_a_better_accuracy(strategy):
    config = dataclasses.replace(PATIENT, **strategy)
    best, end = best_and_end(config)
    run = uninterrupted(config)
    assert saved_steps(run.path) == [best, end]
    # Until there it is the run that goes on.
    whole = uninterrupted(dataclasses.replace(config, patience=0)).records
    assert run.records == [line for line in whole if line["step"] <= end]


@pytest.mark.parametrize("stops", [(4, 8), (3, 6, 9)], ids=str)
def test_a_run_that_is_stopped_ends_at_the_same_step(small, tmp_path, capfd, stops):
    expected = uninterrupted(PATIENT)
    for stop in stops:
        train(tmp_path, dataclasses.replace(PATIENT, max_steps=stop))
    assert_equal_states(train(tmp_path, PATIENT).state, expected.state)
    assert records(tmp_path) == expected.records
    best, end = best_and_end(PATIENT)
    out = capfd.readouterr().out
    assert f"step {end} of 15, after 2 evaluations without a better accuracy," in out
    assert f"best: step {best}, validation accuracy" in out
    # It is finished, and goes on with more patience.
    assert train(tmp_path, PATIENT).step == end
    assert "is finished" in capfd.readouterr().out
    patient = dataclasses.replace(PATIENT, patience=9)
    whole = uninterrupted(dataclasses.replace(PATIENT, patience=0))
    assert_equal_states(train(tmp_path, patient).state, whole.state)


def test_the_best_checkpoint_is_used_and_named(small, tmp_path, capfd):
    best, end = best_and_end(PATIENT)
    run = shutil.copytree(uninterrupted(PATIENT).path, tmp_path / "run")
    assert (run / "best").read_text() == f"step-{best:08d}\n"
    assert load_run(run).step == best
    assert load_run(run, step="last").step == load_run(run, step=end).step == end
    result = evaluate(run)
    assert (result["step"], result["best_step"]) == (best, best)
    assert f"step {best}, the best: " in capfd.readouterr().out
    assert json.loads((run / "result.json").read_text()) == result
    assert evaluate(run, step="last")["step"] == end
    # A damaged one is not used.
    (run / f"checkpoints/step-{best:08d}/MANIFEST.json").write_text("{")
    assert load_run(run).step == end
    assert "rejected the best checkpoint" in capfd.readouterr().out


def test_without_held_out_images_the_last_step_is_used_and_none_ends_a_run(
    small, tmp_path
):
    run = uninterrupted(small_config()).path
    assert not (run / "best").exists()
    assert load_run(run).step == 10
    config = small_config(eval_every_epochs=1.0, patience=2)
    with pytest.raises(ConfigError, match="patience=2: .*--validation_fraction"):
        train(tmp_path, config)
    with pytest.raises(ConfigError, match="patience=2 with eval_every_epochs=0"):
        small_config(patience=2)
