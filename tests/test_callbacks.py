"""Callbacks and the trackers, which are read back by their own libraries."""

import csv
import dataclasses
import json
import struct

import pytest
from processes import ROOT
from small_runs import (
    HELD_OUT,
    assert_equal_states,
    saved_steps,
    small_config,
    uninterrupted,
)

from towers import callbacks
from towers.errors import ConfigError
from towers.training import train

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
    assert [(line["step"], line) for line in lines] == told
    evaluated = first.of("evaluation") + second.of("evaluation")[::2]
    assert [step for step, _ in evaluated] == [3, 6, 9, 12, 15]
    for step, metrics in evaluated:
        [line] = [line for line in lines if line["step"] == step]
        assert metrics.items() <= line.items() and "validation_accuracy" in metrics
    assert first.of("checkpoint") == [(i, f"step-{i:08d}") for i in range(1, 8)]


class Pruned(Exception):
    pass


@pytest.mark.parametrize("method", ["on_log", "on_evaluation", "on_checkpoint"])
def test_what_a_callback_raises_ends_the_run_saved(small, tmp_path, method):
    def prune(self, step, _):
        if step >= 6:
            raise Pruned(step)

    callback = type("Pruner", (callbacks.Callback,), {method: prune})()
    with pytest.raises(Pruned):
        train(tmp_path, CONFIG, callbacks=[callback])
    assert 6 <= saved_steps(tmp_path)[-1] <= 8
    expected = uninterrupted(CONFIG)
    assert_equal_states(train(tmp_path, CONFIG).state, expected.state)


def test_a_csv_file_has_every_number_once(small, tmp_path):
    run, path = tmp_path / "run", tmp_path / "a.csv"
    path.write_text("old")
    for stop in (4, 7, 0):
        config = dataclasses.replace(CONFIG, max_steps=stop)
        train(run, config, callbacks=[callbacks.CSV(path)])
    with open(path, newline="") as file:
        assert next(file) == "step,name,value\n"
        found = {(int(s), name): float(x) for s, name, x in csv.reader(file)}
    expected = {}
    for line in lines_of(run):
        losses = line.pop("tower_losses", [])
        line |= {f"tower_losses_{i}": x for i, x in enumerate(losses)}
        expected |= {(line["step"], name): x for name, x in line.items()}
    assert found == expected


def curve_of(workdir, name):
    return [(x["step"], x[name]) for x in lines_of(workdir) if name in x]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_reads_the_run_that_was_continued(small, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    run = tmp_path / "run"
    for stop in (7, 0):
        config = dataclasses.replace(CONFIG, max_steps=stop)
        train(run, config, callbacks=[callbacks.tracker(f"mlflow:{tmp_path}/a")])
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/a/mlflow.db")
    experiment = client.get_experiment_by_name("towers")
    [tracked] = client.search_runs([experiment.experiment_id])
    assert tracked.data.params["num_towers"] == "2"
    assert tracked.info.status == "FINISHED"
    for name in ("loss", "validation_accuracy"):
        history = client.get_metric_history(tracked.info.run_id, name)
        assert [(x.step, x.value) for x in history] == curve_of(run, name)


def wandb_records(path):
    """The records of a file in LevelDB's log format, in blocks of 32 KB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := -place % 32768) and left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(record)
            record = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_writes_the_run_offline(small, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(tmp_path, CONFIG, callbacks=[callbacks.tracker("wandb:towers")])
    [path] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found = []
    for record in wandb_records(path):
        keys = [x.key or "/".join(x.nested_key) for x in record.history.item]
        values = [json.loads(x.value_json) for x in record.history.item]
        items = dict(zip(keys, values, strict=True))
        if "loss" in items:
            found.append((items["_step"], items["loss"]))
    assert found == curve_of(tmp_path, "loss")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
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


@pytest.mark.parametrize("text", ["mlflow", "neptune:x", "csv:"])
def test_a_wrong_tracker_is_refused(text):
    with pytest.raises(ConfigError, match=f"track={text}: give csv:FILE"):
        callbacks.tracker(text)
