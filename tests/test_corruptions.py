"""Rows 6, 7, 34, 37 and 38: whatever happens to the files of a run's folder, the newest
checkpoint that is intact is used, or one line refuses the folder."""

import contextlib
import dataclasses
import json
import math
import os
import random
import shutil

import pytest
import small_runs
from corruptions import (
    WRONG_TEXTS,
    damages,
    folder_damages,
    make_outside,
    resign,
    state_of,
    time_limit,
    wrong_states,
)
from example_checkpoints import FILES, MANIFEST, STATE
from marks import slow

from towers import evaluation, training
from towers.config import changed_mathematics
from towers.errors import (
    MOST_CHARACTERS,
    ConfigError,
    RunFolderError,
    TowersError,
    one_line,
)
from towers.run import checkpoints, files, restore
from towers.run.folder import RunFolder
from towers.run.metrics import MetricsFile, last_accuracy, read_metrics
from towers.run.restore import check_changes, newest_checkpoint

STEPS = (2, 4, 6)
NEWEST = "checkpoints/step-00000006"
MORE_STEPS = 8
CONFIG = small_runs.small_config(
    max_steps=STEPS[-1],
    checkpoint_every_steps=2,
    log_every_steps=1,
    eval_every_epochs=0.4,
    validation_fraction=0.2,
)


@pytest.fixture(scope="module")
def run():
    """The folder of a run with three checkpoints, not to be changed."""
    return small_runs.uninterrupted(CONFIG).path


@pytest.fixture(scope="module")
def expected():
    """Step -> the tensors of the intact checkpoint."""
    folder = small_runs.uninterrupted(CONFIG).path / "checkpoints"
    assert tuple(checkpoints.list_steps(folder)) == STEPS
    return {step: checkpoints.restore_step(folder, step).tensors for step in STEPS}


@pytest.fixture(autouse=True)
def no_fsync_and_few_words(monkeypatch):
    """It takes most of the time on a busy disk, and matters only in a power cut; and
    thousands of lines about rejected checkpoints help nobody."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(restore, "say", lambda line: None)


def all_files(run):
    """The files of the run by name; of the checkpoints only those of the newest."""
    names = sorted(str(p.relative_to(run)) for p in run.rglob("*") if p.is_file())
    return [n for n in names if not n.startswith("checkpoints") or n.startswith(NEWEST)]


@contextlib.contextmanager
def copied(run, tmp_path):
    """A copy of the run, and a folder outside of it, both removed at the end."""
    workdir, outside = tmp_path / "run", make_outside(tmp_path / "outside")
    shutil.copytree(run, workdir)
    try:
        yield workdir, outside
    finally:
        files.remove(workdir)
        files.remove(outside)


def read_all(workdir):
    """Reads all that a training and an evaluation read of a folder, and continues its
    metrics; returns the checkpoint."""
    folder = RunFolder(workdir)
    folder.create()
    with folder.lock():
        checkpoint = newest_checkpoint(folder)
        check_changes(CONFIG, folder, checkpoint, ())
        checkpoints.remove_leftovers(folder.checkpoints, lambda line: None)
        unwritten = checkpoint.trainer_state.get("unwritten", ())
        metrics = MetricsFile(folder.metrics, checkpoint.step, unwritten)
        metrics.flush()
        metrics.append({"step": MORE_STEPS})
        metrics.flush()
        metrics.close()
        last_accuracy(folder.metrics, checkpoint.step)
    folder.check()
    assert folder.holder() is None
    assert changed_mathematics(folder.stored_config(), CONFIG) == {}
    assert len(folder.stored_dataset_info().class_names) == 5
    return checkpoint


def outcome(workdir, outside, act=read_all):
    """The result of `act`, or its TowersError; nothing outside has changed."""
    before = state_of(outside)
    try:
        with time_limit(60):
            result = act(workdir)
    except TowersError as error:
        result = error
        assert error.exit_code in (2, 4)
        assert 1 <= len(one_line(error)) <= MOST_CHARACTERS
        assert one_line(error).isprintable()
    assert state_of(outside) == before
    return result


def assert_restored(checkpoint, expected, *steps):
    assert not isinstance(checkpoint, TowersError), checkpoint
    assert checkpoint.step in steps
    small_runs.assert_equal_states(checkpoint.tensors, expected[checkpoint.step])


@contextlib.contextmanager
def each_case(count):
    """A context manager for each of many cases: all run, and those that fail are
    listed at the end."""
    failures = []

    @contextlib.contextmanager
    def case(words):
        try:
            yield
        except Exception as error:
            failures.append(f"{words}: {error!r}"[:500])
        count("corruptions tried")

    yield case
    assert not failures, f"{len(failures)} cases failed:\n" + "\n".join(failures[:40])


def check_damage(run, expected, tmp_path, name, damage):
    """Damages one file of a copy of the run and reads the copy."""
    with copied(run, tmp_path) as (workdir, outside):
        path = workdir / name
        damage(path, outside)
        found = files.kind(path)
        is_shared = found == "a file" and path.lstat().st_nlink > 1
        is_same = found == "a file" and path.read_bytes() == (run / name).read_bytes()
        result = outcome(workdir, outside)
        if name.startswith("checkpoints"):
            # A line break at the end of a manifest, say, changes nothing.
            steps = (6,) if is_same else (4, 6) if name.endswith(MANIFEST) else (4,)
            assert_restored(result, expected, *steps)
        elif name == ".lock" and (is_shared or found not in (None, "a file")):
            assert isinstance(result, ConfigError), result
        elif found not in (None, "a file") and not name.startswith("tensorboard"):
            assert isinstance(result, RunFolderError), result
        else:
            assert_restored(result, expected, 6)
            records, is_damaged = read_metrics(workdir / "metrics.jsonl")
            assert not is_damaged and records[-1]["step"] == MORE_STEPS


@pytest.mark.parametrize(
    "num_places, seed", [(2, 0), *(slow(60, seed) for seed in range(1, 4))]
)
@pytest.mark.row(6)
def test_a_damaged_file_costs_at_most_its_checkpoint(
    run, expected, tmp_path, num_places, seed, count
):
    with each_case(count) as case:
        for name in all_files(run):
            for words, damage in damages(num_places, seed):
                with case(f"{name}: {words}"):
                    check_damage(run, expected, tmp_path, name, damage)


@pytest.mark.parametrize("name", [NEWEST, "checkpoints", "tensorboard/train", ""])
@pytest.mark.row(38)
def test_a_folder_that_is_replaced_is_never_followed(
    run, expected, tmp_path, name, count
):
    with each_case(count) as case:
        for words, damage in folder_damages():
            with case(words), copied(run, tmp_path) as (workdir, outside):
                damage(workdir / name, outside)
                found = files.kind(workdir / name)
                is_new = found in (None, "a folder") and name in ("checkpoints", "")
                is_elsewhere = name == "" and workdir.is_dir()
                if is_new or is_elsewhere:
                    continue  # there is no run, or another one
                result = outcome(workdir, outside)
                if name == NEWEST:
                    assert_restored(result, expected, 4)
                elif found in (None, "a folder"):
                    assert_restored(result, expected, 6)
                else:
                    assert isinstance(result, RunFolderError | ConfigError), result


@pytest.mark.row(38)
def test_the_run_folder_itself_may_be_a_link(run, expected, tmp_path):
    shutil.copytree(run, tmp_path / "large_disk")
    link = tmp_path / "run"
    link.symlink_to("large_disk")
    shutil.rmtree(link / NEWEST)
    assert_restored(read_all(link), expected, 4)
    checkpoints.save(link / "more", 6, expected[6], {})  # makes and syncs a folder


@pytest.mark.parametrize("name", [".tmp-x", "step-00000007", "step-000000006", "x"])
@pytest.mark.row(38)
def test_what_stands_next_to_the_checkpoints_is_neither_followed_nor_taken(
    run, expected, tmp_path, name, count
):
    with each_case(count) as case:
        for words, damage in folder_damages():
            with case(words), copied(run, tmp_path) as (workdir, outside):
                path = workdir / "checkpoints" / name
                shutil.copytree(run / NEWEST, path)
                damage(path, outside)
                assert_restored(outcome(workdir, outside), expected, 6)
                assert (files.kind(path) is None) == (
                    name == ".tmp-x" or words == "missing"
                )
                checkpoints.keep(workdir / "checkpoints", 3, log=lambda line: None)
                assert set(STEPS) <= set(small_runs.saved_steps(workdir))


@pytest.mark.row(34)
def test_files_of_another_run_are_noticed(run, expected, tmp_path, count):
    """One by one: a checkpoint that lacks none of its files is that run's."""
    other = small_runs.uninterrupted(dataclasses.replace(CONFIG, seed=1)).path
    with each_case(count) as case:
        for name in FILES:
            with case(name), copied(run, tmp_path) as (workdir, outside):
                shutil.copy(other / NEWEST / name, workdir / NEWEST / name)
                assert_restored(outcome(workdir, outside), expected, 4)
        with case("a checkpoint"), copied(run, tmp_path) as (workdir, outside):
            shutil.rmtree(workdir / NEWEST)
            shutil.copytree(other / NEWEST, workdir / NEWEST)
            refused = outcome(workdir, outside)
            assert isinstance(refused, ConfigError) and "seed was 1" in str(refused)


# Files that agree with their manifest and are wrong all the same.


def continued(workdir):
    """Trains the run to its end and evaluates it."""
    config = dataclasses.replace(CONFIG, max_steps=MORE_STEPS)
    with pytest.MonkeyPatch.context() as patch:
        small_runs.use(patch)
        state = training.train(workdir, config).state
        return state, evaluation.evaluate(workdir)


def evaluated(workdir):
    with pytest.MonkeyPatch.context() as patch:
        small_runs.use(patch)
        return evaluation.evaluate(workdir)


@pytest.fixture(scope="module")
def uninterrupted():
    """The parameters and accuracy of the run without a pause."""
    config = dataclasses.replace(CONFIG, max_steps=MORE_STEPS)
    finished = small_runs.uninterrupted(config)
    return finished.state, evaluated(finished.path)


def assert_continued(result, uninterrupted):
    """The bits of the uninterrupted run (row 10), whichever checkpoint was used."""
    assert not isinstance(result, TowersError), result
    small_runs.assert_equal_states(result[0], uninterrupted[0])
    for name in ("step", "test_accuracy_ema", "test_loss_ema", "images"):
        assert result[1][name] == uninterrupted[1][name], name


def assert_usable(trainer_state):
    """All with which a run calculates are finite numbers."""
    times = ("train_secs", "timed_steps", "timed_secs", "start_secs")
    numbers = [trainer_state.get(name, 0) for name in times]
    numbers.append(trainer_state["images_seen"])
    if trainer_state["best"] is not None:
        numbers += [trainer_state["best"][name] for name in ("step", "accuracy")]
    assert all(math.isfinite(number) for number in numbers), numbers
    json.dumps(trainer_state, indent=1)  # as the next save does


@pytest.mark.slow
@pytest.mark.parametrize(
    "inside", [("best",), slow(("config", "versions", "dataset_info"))]
)
@pytest.mark.row(6)
def test_a_wrong_trainer_state_costs_at_most_its_checkpoint(
    run, expected, tmp_path, inside, count
):
    with each_case(count) as case, copied(run, tmp_path) as (workdir, outside):
        text = (workdir / NEWEST / STATE).read_text()
        for words, changed in wrong_states(text, inside):
            with case(words):
                resign(workdir / NEWEST, changed)
                checkpoint = outcome(workdir, outside)
                if words.startswith("config") and isinstance(checkpoint, ConfigError):
                    assert "holds another run" in str(checkpoint)
                elif words.startswith("architecture:"):  # of another model, at most
                    assert checkpoint.step in (4, 6)
                else:
                    assert_restored(checkpoint, expected, 4, 6)
                if words in WRONG_TEXTS:
                    assert checkpoint.step == 4
                elif not isinstance(checkpoint, TowersError):
                    assert_usable(checkpoint.trainer_state)


@pytest.mark.slow
def test_a_wrong_trainer_state_that_is_taken_can_be_continued(
    run, tmp_path, uninterrupted, count
):
    text = (run / NEWEST / STATE).read_text()
    with each_case(count) as case:
        for words, changed in wrong_states(text, ("best",)):
            with case(words), copied(run, tmp_path) as (workdir, outside):
                resign(workdir / NEWEST, changed)
                if checkpoints_step(workdir) == 4 or words == "config: {}":
                    continue  # refused, as the test above has it
                result = outcome(workdir, outside, continued)
                if not words.startswith("architecture:"):
                    assert_continued(result, uninterrupted)


def checkpoints_step(workdir):
    return newest_checkpoint(RunFolder(workdir)).step


# Whole trainings and evaluations.


def sampled(num_cases, seed):
    """(name of a file, words, damage): all of a few places, or some of them."""
    names = [f"{NEWEST}/{name}" for name in FILES]
    names += ["config.json", "metrics.jsonl", ".lock"]
    cases = [(name, *case) for name in names for case in damages(2, seed)]
    return random.Random(seed).sample(cases, min(num_cases, len(cases)))


@pytest.mark.parametrize("num_cases", [2, slow(30)])
@pytest.mark.row(6)
def test_a_damaged_run_continues_as_if_nothing_had_happened(
    run, tmp_path, uninterrupted, num_cases, count
):
    with each_case(count) as case:
        for name, words, damage in sampled(num_cases, seed=0):
            with case(f"{name}: {words}"), copied(run, tmp_path) as (workdir, outside):
                damage(workdir / name, outside)
                is_refused = isinstance(outcome(workdir, outside), TowersError)
            with case(f"{name}: {words}"), copied(run, tmp_path) as (workdir, outside):
                damage(workdir / name, outside)
                result = outcome(workdir, outside, continued)
                if not is_refused:
                    assert_continued(result, uninterrupted)
                assert isinstance(result, TowersError) == is_refused
