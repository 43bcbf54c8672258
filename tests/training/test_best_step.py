"""The best step on held-out images: kept, named and used; the early end of a run."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from marks import slow
from sklearn import metrics
from small_runs import (
    HELD_OUT,
    assert_equal_states,
    every_strategy,
    records,
    saved,
    saved_steps,
    small_config,
    uninterrupted,
)

from towers import callbacks, dry_run
from towers.build.restored import load_run
from towers.config import changed_mathematics
from towers.errors import ConfigError
from towers.evaluation.evaluate import evaluate
from towers.evaluation.split_predictions import predict_split
from towers.run.progress import Progress
from towers.training.train import train

EVALUATED = [3, 6, 9, 12, 15, 18]  # steps
# The loss falls while the accuracy is the same, then grows while the accuracy does.
PATIENT = small_config(
    **HELD_OUT | {"decay_factor": 3.0, "num_epochs": 6.0},
    patience=2,
    learning_rate=0.03,
)
BY_LOSS = dataclasses.replace(PATIENT, best_by="loss")


# No evaluation is better than the first.
PLATEAU = small_config(
    **HELD_OUT | {"decay_factor": 0.1},
    schedule="plateau",
    plateau_patience=1,
    learning_rate=0.3,
    seed=1,
)


def without_patience(config):
    return uninterrupted(dataclasses.replace(config, patience=0, best_by="auto"))


def figures_of(config):
    """Accuracy and loss of each evaluation of a run that patience does not end."""
    lines = without_patience(config).records
    names = "validation_accuracy_ema", "validation_loss_ema"
    return [tuple(x[k] for k in names) for x in lines if names[0] in x]


def best_and_end(config):
    """The best step, and that after which two evaluations were no better."""
    order = [(accuracy, -loss) for accuracy, loss in figures_of(config)]
    if config.best_by == "loss":
        order = [-figures[1] for figures in figures_of(config)]
    assert len(order) == len(EVALUATED)
    for place in range(2, len(order)):
        best = max(range(place + 1), key=order.__getitem__)
        if place - best == 2:
            return EVALUATED[best], EVALUATED[place]
    raise AssertionError(order)


@every_strategy
@pytest.mark.parametrize("config", [PATIENT, BY_LOSS], ids=["accuracy", "loss"])
def test_a_run_ends_after_evaluations_that_are_not_better(strategy, config):
    config = dataclasses.replace(config, **strategy)
    best, end = best_and_end(config)
    assert end < 18, "the run is not shorter: the test says nothing"
    run = uninterrupted(config)
    assert saved_steps(run.path) == [best, end]
    # Until there it is the run that goes on.
    whole = without_patience(config).records
    assert run.records == [line for line in whole if line["step"] <= end]


def test_a_function_of_the_user_decides(small, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def distance(labels, probabilities):\n"
        "    assert abs(probabilities.sum(1) - 1).max() < 1e-6\n"
        "    return -abs(probabilities.argmax(1) - labels).mean()\n"
    )
    config = dataclasses.replace(
        PATIENT, max_steps=9, best_by=f"{tmp_path / 'mine.py'}:distance"
    )
    train(tmp_path / "run", config)
    lines = [x for x in records(tmp_path / "run") if "validation_distance" in x]
    keys = [(x["validation_distance_ema"], -x["validation_loss_ema"]) for x in lines]
    best = lines[keys.index(max(keys))]
    stored = saved(tmp_path / "run").run_state["best"]
    assert stored["step"] == best["step"]
    assert stored["score"] == best["validation_distance_ema"] < 0
    f1 = dataclasses.replace(config, best_by="macro_f1", max_steps=3)
    result = train(tmp_path / "f1", f1)
    split = predict_split(tmp_path / "f1", "validation")
    expected = metrics.f1_score(split.labels, split.logits.argmax(1), average="macro")
    recorded = result.history["validation_macro_f1_ema"].values[-1]
    assert recorded == pytest.approx(expected)
    (tmp_path / "mine.py").write_text("def loss(labels, probabilities): return 1\n")
    other = dataclasses.replace(f1, best_by=f"{tmp_path / 'mine.py'}:loss")
    with pytest.raises(ConfigError, match="loss is another figure"):
        train(tmp_path / "other", other)


def test_small_improvements_do_not_count_for_the_patience():
    progress = Progress()
    scores = [0.5, 0.52, 0.54, 0.61, 0.60, 0.65, 0.80]
    counts = []
    for score in scores:
        is_best = progress.add_evaluation(score, 1.0, score, min_delta=0.1)
        assert is_best == (score == max(scores[: len(counts) + 1]))
        counts.append(progress.num_worse)
    assert counts == [0, 1, 2, 0, 1, 2, 0]


def test_a_loss_that_is_not_finite_is_the_worst():
    progress = Progress(step=3)
    assert progress.add_evaluation(0.5, np.nan, 0.5)
    assert progress.best["loss"] is None
    progress = Progress.from_json(json.loads(json.dumps(progress.to_json())))
    progress.step = 6
    assert progress.add_evaluation(0.5, 9.0, 0.5) and progress.best["step"] == 6
    assert not progress.add_evaluation(0.5, 9.5, 0.5)
    assert progress.add_evaluation(0.6, np.inf, 0.6)
    by_loss = Progress()
    assert by_loss.add_evaluation(0.5, np.nan, np.nan, "loss")
    assert by_loss.add_evaluation(0.4, 9.0, -9.0, "loss")


def test_what_makes_a_step_the_best_may_change_unless_the_rate_depends_on_it():
    progress, losses = Progress(), [0.9, 0.4, 0.6, 0.3, 0.5]
    for step, loss in enumerate(losses):  # the first is the best, then by the loss
        progress.step = step
        best_by = "accuracy" if step < 2 else "loss"
        score = 1 - 0.1 * step if step < 2 else -loss
        progress.add_evaluation(1 - 0.1 * step, loss, score, best_by)
    assert progress.best["step"] == 3 and progress.best["best_by"] == "loss"
    for config, changes in ((PATIENT, {}), (PLATEAU, {"best_by": ("auto", "loss")})):
        by_loss = dataclasses.replace(config, best_by="loss")
        assert changed_mathematics(config, by_loss) == changes


@pytest.mark.parametrize(
    "config,stops",
    [pytest.param(BY_LOSS, [8], id="loss"), slow(PATIENT, [3, 4, 8], id="twice")],
)
def test_a_run_that_is_stopped_ends_at_the_same_step(
    small, tmp_path, capfd, stops, config
):
    expected = uninterrupted(config)
    for stop in stops:
        train(tmp_path, dataclasses.replace(config, max_steps=stop))
    assert_equal_states(train(tmp_path, config).state, expected.state)
    assert records(tmp_path) == expected.records
    best, end = best_and_end(config)
    out = capfd.readouterr().out
    name = config.best_by.replace("auto", "accuracy")
    words = f"after 2 evaluations without a better {name},"
    assert f"step {end} of 18, {words}" in out
    assert f"best: step {best}, validation accuracy" in out
    # It is finished, and goes on with more patience.
    assert train(tmp_path, config).step == end
    assert "is finished" in capfd.readouterr().out
    patient = dataclasses.replace(config, patience=9)
    whole = without_patience(config)
    assert_equal_states(train(tmp_path, patient).state, whole.state)


def factors_of_plateaus(config):
    """Epochs, and the factor on the rate from there on, by the run's evaluations."""
    best, num_worse, factors = (0.0, 0.0), 0, {}
    if config.best_by == "loss":
        best = (-np.inf,)
    for line in uninterrupted(config).records:
        if "validation_accuracy_ema" not in line or line["step"] == 15:
            continue
        figures = line["validation_accuracy_ema"], -line["validation_loss_ema"]
        if config.best_by == "loss":
            figures = figures[1:]
        num_worse = 0 if figures > best else num_worse + 1
        best = max(best, figures)
        if num_worse and num_worse % config.plateau_patience == 0:
            epoch = line["step"] // 3
            factors[epoch] = config.decay_factor ** (len(factors) + 1)
    assert len(factors) >= 2, "the rate is hardly ever lowered: the test says nothing"
    return ",".join(f"{epoch}:{factor}" for epoch, factor in factors.items())


@every_strategy
@pytest.mark.parametrize("best_by", ["accuracy", slow("loss")])
def test_plateau_trains_as_pieces_that_begin_where_none_was_better(strategy, best_by):
    config = dataclasses.replace(PLATEAU, **strategy, best_by=best_by)
    pieces = dataclasses.replace(
        config, schedule="piecewise", epoch_factors=factors_of_plateaus(config)
    )
    run, expected = uninterrupted(config), uninterrupted(pieces)
    assert run.records == expected.records
    assert_equal_states(run.state, expected.state)


class Cut(callbacks.Callback):
    """Cuts an evaluation off, in the middle."""

    def __init__(self, step):
        self.step = step

    def on_evaluation(self, step, metrics):
        if step == self.step:
            raise InterruptedError


@pytest.mark.parametrize("config", [PATIENT, slow(PLATEAU)])
def test_evaluations_that_were_cut_off_are_made_up_for_once(
    small, tmp_path, capfd, config
):
    expected = uninterrupted(config)
    for step in EVALUATED[1:5:3]:  # the last one, too
        with pytest.raises(InterruptedError):
            train(tmp_path, config, callbacks=[Cut(step)])
    assert_equal_states(train(tmp_path, config).state, expected.state)
    assert records(tmp_path) == expected.records
    states = [saved(path).run_state for path in (tmp_path, expected.path)]
    for key in "best", "num_worse", "num_plateaus", "open_record", "accuracy":
        assert states[0][key] == states[1][key]
    best = (tmp_path / "best").read_text(), (expected.path / "best").read_text()
    assert best[0] == best[1]
    capfd.readouterr()
    train(tmp_path, config)
    assert "is finished" in capfd.readouterr().out


def test_a_run_that_patience_ends_is_no_longer_followed(small, tmp_path, capfd):
    run = shutil.copytree(uninterrupted(PATIENT).path, tmp_path / "run")
    result = evaluate(run, eval_interval_secs=1.0, sleep=pytest.fail)
    assert result["step"] == best_and_end(PATIENT)[1]
    dry_run(run, PATIENT)
    assert "takes no step. To continue raise --patience" in capfd.readouterr().out


@pytest.mark.row(6)
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
    shutil.rmtree(run / f"checkpoints/step-{best:08d}")
    assert load_run(run).step == end
    assert f"missing: {run}/checkpoints/step-{best:08d}" in capfd.readouterr().out
