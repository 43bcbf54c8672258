"""Callbacks and the trackers, which are read back by their own libraries."""

import dataclasses
import json
import os
import signal
import sys
import types

import pytest
from marks import slow
from processes import ROOT
from small_runs import (
    HELD_OUT,
    assert_equal_states,
    saved_steps,
    small_config,
    uninterrupted,
)

from towers import callbacks
from towers.errors import CheckpointError, ConfigError, Preempted
from towers.training.train import train

CONFIG = small_config(**HELD_OUT, num_towers=2)


class Recorder(callbacks.Callback):
    def __init__(self):
        self.calls = []

    def on_start(self, workdir, options, step):
        self.calls.append(("start", workdir, options["num_towers"], step))

    def on_log(self, step, metrics):
        self.calls.append(("log", step, metrics))

    def on_evaluation(self, step, metrics):
        self.calls.append(("evaluation", step, metrics))

    def on_checkpoint(self, step, path):
        self.calls.append(("checkpoint", step, path.name))

    def on_end(self, step):
        self.calls.append(("end", step))

    def of(self, kind):
        return [call[1:] for call in self.calls if call[0] == kind]


def lines_of(workdir):
    return [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_callbacks_get_what_the_run_writes_also_when_it_is_continued(small, tmp_path):
    first, second = Recorder(), Recorder()
    train(tmp_path, dataclasses.replace(CONFIG, max_steps=7), callbacks=[first])
    state = train(tmp_path, CONFIG, callbacks=[second, second]).state
    assert_equal_states(state, uninterrupted(CONFIG).state)
    assert first.of("start") == [(tmp_path, 2, 0)] and first.of("end") == [(7,)]
    assert second.of("start") == [(tmp_path, 2, 7)] * 2
    assert second.calls[-1] == ("end", 15)
    lines = lines_of(tmp_path)
    told = first.of("log") + second.of("log")[::2]
    assert [(line["step"], line) for line in lines] == [
        (step, {"step": step} | metrics) for step, metrics in told
    ]
    assert not any("step" in metrics for _, metrics in told)
    evaluated = first.of("evaluation") + second.of("evaluation")[::2]
    assert [step for step, _ in evaluated] == [3, 6, 9, 12, 15]
    for step, metrics in evaluated:
        [line] = [line for line in lines if line["step"] == step]
        assert metrics.items() <= line.items() and "validation_accuracy" in metrics
    assert first.of("checkpoint") == [(i, f"step-{i:08d}") for i in range(1, 8)]


class Pruned(Exception):
    pass


@pytest.mark.parametrize(
    "method", ["on_evaluation", *map(slow, ["on_log", "on_checkpoint"])]
)
def test_what_a_callback_raises_ends_the_run_saved(small, tmp_path, method):
    def prune(self, step, _):
        if step >= 6:
            raise Pruned(step)

    ends = []

    def on_exception(self, step, error):
        ends.append((step, error, saved_steps(tmp_path)[-1]))
        raise Pruned("again")

    methods = {method: prune, "on_exception": on_exception}
    callback = type("Pruner", (callbacks.Callback,), methods)()
    with pytest.raises(Pruned, match=r"[678]") as raised:
        train(tmp_path, CONFIG, callbacks=[callback, callback])
    step = saved_steps(tmp_path)[-1]
    assert 6 <= step <= 8 and ends == [(step, raised.value, step)] * 2
    expected = uninterrupted(CONFIG)
    assert_equal_states(train(tmp_path, CONFIG).state, expected.state)


@pytest.mark.parametrize(
    "error",
    [
        *(SystemExit(3), slow(KeyboardInterrupt()), slow(StopIteration())),
        slow(Preempted("stopped")),
        # The callback reads another run.
        *(CheckpointError("damaged"), slow(RuntimeError("DataError: of other data"))),
    ],
)
@pytest.mark.row(55)
def test_the_error_of_a_callback_is_none_of_the_run(small, tmp_path, error):
    told = []

    class Raises(callbacks.Callback):
        def on_log(self, step, metrics):
            if step == 8:
                raise error

        def on_exception(self, step, error):
            told.append(error)
            sys.exit(4)

    with pytest.raises(type(error)) as raised:
        train(tmp_path, small_config(), callbacks=[Raises()])
    assert told == [raised.value] == [error] and saved_steps(tmp_path) == [8]
    expected = uninterrupted(small_config()).state
    assert_equal_states(train(tmp_path, small_config()).state, expected)


@pytest.mark.row(35, 55)
def test_a_tracker_that_cannot_write_is_a_warning(small, tmp_path, capsys):
    class Tracks(callbacks.Tracker):
        def on_log(self, step, metrics):
            with open("/dev/full" if step < 6 else os.devnull, "w") as file:
                file.write(f"{step}")

        def on_end(self, step):
            raise ValueError("no server")

    state = train(tmp_path, small_config(), callbacks=[Tracks()]).state
    assert_equal_states(state, uninterrupted(small_config()).state)
    said = [x for x in "".join(capsys.readouterr()).splitlines() if "Tracks" in x]
    assert len(said) == 4 and "No space left on device" in said[0]
    assert "3 report(s) are lost" in said[1] and "no server" in said[2]
    assert "1 report(s)" in said[3]


class Stop(callbacks.Callback):
    """Stops a run after its eighth step."""

    def on_log(self, step, metrics):
        if step == 8:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_folder_of_mlflow_may_be_in_the_home(monkeypatch, tmp_path):
    uris = []
    mlflow = types.SimpleNamespace(MlflowClient=uris.append, entities=None)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="MLflow cannot begin"):  # without a client
        callbacks.tracker("mlflow:~/a").on_start(tmp_path, {}, 0)
    assert uris == [f"sqlite:///{tmp_path}/a/mlflow.db"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_reads_the_run_that_was_continued(small, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    run, tracker = tmp_path / "run", callbacks.tracker(f"mlflow:{tmp_path}/a")
    with pytest.raises(Preempted):
        train(run, CONFIG, callbacks=[tracker, Stop()])
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/a/mlflow.db")
    experiment = client.get_experiment_by_name("towers")
    [tracked] = client.search_runs([experiment.experiment_id])
    assert tracked.info.status == "KILLED"
    train(run, CONFIG, callbacks=[tracker])
    [tracked] = client.search_runs([experiment.experiment_id])
    assert tracked.data.params["num_towers"] == "2"
    assert tracked.info.status == "FINISHED"
    for name in ("loss", "validation_accuracy"):
        history = client.get_metric_history(tracked.info.run_id, name)
        expected = [(x["step"], x[name]) for x in lines_of(run) if name in x]
        assert [(x.step, x.value) for x in history] == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*experimental")
def test_the_search_of_the_page_prunes_and_finds_a_rate(tmp_path, monkeypatch):
    optuna = pytest.importorskip("optuna")
    page = (ROOT / "docs" / "python.md").read_text().partition("\nWith Optuna ")[2]
    page = page.partition("\nWith Ray ")[0]
    code = "\n".join(x[4:] for x in page.splitlines() if x[:4] == "    " or not x)
    monkeypatch.chdir(tmp_path)
    values = {}
    exec(code.replace("n_trials=10", "n_trials=6"), values)
    trials = values["study"].trials
    states = {trial.state for trial in trials}
    assert len(trials) == 6 and optuna.trial.TrialState.COMPLETE in states
    best = max(trial.value for trial in trials if trial.value is not None)
    assert values["study"].best_value == best
    for trial in trials:  # the pruned ones, too
        assert saved_steps(tmp_path / "runs" / "search" / str(trial.number))
