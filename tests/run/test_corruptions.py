"""Rows 6, 7, 34, 37 and 38: whatever happens to the files of a run's folder, the newest
checkpoint that is intact is used, or one line refuses the folder."""

import contextlib
import dataclasses
import itertools
import os
import random
import shutil

import pytest
import small_runs
from engines.corruptions import damage, damages, time_limit
from example_checkpoints import FILES, MANIFEST
from marks import slow

from towers.config import changed_mathematics
from towers.errors import ConfigError, TowersError
from towers.messages import MAX_CHARACTERS, one_line
from towers.run.checkpointer import Checkpointer
from towers.run.folder import RunFolder
from towers.run.records import MetricsFile, read_metrics
from towers.run.restore import checkpointer_of
from towers.run.stored_config import stored_config, stored_dataset_info
from towers.training.restore import validate_changes
from towers.training.train import train

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
def expected(run):
    """Step -> the tensors of the intact checkpoint."""
    assert tuple(small_runs.saved_steps(run)) == STEPS
    checkpointer = Checkpointer(run / "checkpoints")
    return {step: checkpointer.read(step).tensors for step in STEPS}


@contextlib.contextmanager
def copied(run, tmp_path):
    """A copy of the run, removed at the end."""
    workdir = shutil.copytree(run, tmp_path / "run")
    try:
        yield workdir
    finally:
        shutil.rmtree(workdir)


def read_all(workdir):
    """Read a folder as a training and an evaluation; continue its metrics."""
    folder = RunFolder(workdir)
    folder.create()
    with folder.lock():
        checkpointer = checkpointer_of(folder, log=list)
        checkpoint = checkpointer.read()
        validate_changes(CONFIG, folder, checkpoint, ())
        checkpointer.remove_leftovers()
        metrics = MetricsFile(folder.metrics, checkpoint.step)
        metrics.flush()
        metrics.append({"step": MORE_STEPS})
        metrics.flush()
    assert folder.holder() is None
    assert changed_mathematics(stored_config(folder), CONFIG) == {}
    assert len(stored_dataset_info(folder).class_names) == 5
    return checkpoint


def outcome(workdir, act=read_all):
    """The result of `act`, or its TowersError."""
    try:
        with time_limit(60):
            return act(workdir)
    except TowersError as error:
        refused = error
    assert refused.exit_code in (2, 4)
    assert 1 <= len(one_line(refused)) <= MAX_CHARACTERS
    assert one_line(refused).isprintable()
    return refused


def assert_restored(checkpoint, expected, *steps):
    assert not isinstance(checkpoint, TowersError), checkpoint
    assert checkpoint.step in steps
    small_runs.assert_equal_states(checkpoint.tensors, expected[checkpoint.step])


def check_damage(run, expected, workdir, name, kind):
    """Damages one file of a copy of the run and reads the copy."""
    path = workdir / name
    damage(path, kind)
    is_file = path.is_file() or not os.path.lexists(path)
    is_same = path.is_file() and path.read_bytes() == (run / name).read_bytes()
    result = outcome(workdir)
    if name.startswith("checkpoints"):
        # A line break at the end of a manifest, say, changes nothing.
        steps = (6,) if is_same else (4, 6) if name.endswith(MANIFEST) else (4,)
        assert_restored(result, expected, *steps)
    elif is_file or name.startswith("tensorboard"):
        assert_restored(result, expected, 6)
        records, is_damaged = read_metrics(workdir / "metrics.jsonl")
        assert not is_damaged and records[-1]["step"] == MORE_STEPS


@pytest.mark.parametrize("num_places", [2, slow(60)])
@pytest.mark.row(6, 37)
def test_a_damaged_file_costs_at_most_its_checkpoint(
    run, expected, tmp_path, num_places
):
    """Of few places a sample of the damages."""
    paths = (path.relative_to(run) for path in run.rglob("*") if path.is_file())
    names = [str(x) for x in paths if x.parts[0] != "checkpoints"]
    names += [f"{NEWEST}/{name}" for name in FILES]
    cases = [*itertools.product(names, damages(num_places))]
    if num_places == 2:
        cases = random.Random(0).sample(cases, 20)
    for name, kind in cases:
        with copied(run, tmp_path) as workdir:
            check_damage(run, expected, workdir, name, kind)


@pytest.mark.row(38)
def test_row_38_links_work_as_everywhere_and_nothing_is_written_through_them(
    run, tmp_path
):
    """The folder of the run, that of its checkpoints, and its small files are links;
    a backup has hard links to all."""
    large = shutil.copytree(run, tmp_path / "large_disk")
    backup = shutil.copytree(large, tmp_path / "backup", copy_function=os.link)
    link = tmp_path / "run"
    link.symlink_to("large_disk")
    (large / "checkpoints").rename(tmp_path / "elsewhere")
    (large / "checkpoints").symlink_to(tmp_path / "elsewhere")
    for name in ("config.json", "dataset_info.json"):
        (large / name).rename(tmp_path / name)
        (large / name).symlink_to(tmp_path / name)
    files = [*tmp_path.glob("*.json"), *(p for p in backup.rglob("*") if p.is_file())]
    before = {path: path.read_bytes() for path in files if path.name != ".lock"}
    with pytest.MonkeyPatch.context() as patch:
        small_runs.use(patch)
        train(link, dataclasses.replace(CONFIG, max_steps=MORE_STEPS))
    assert small_runs.saved_steps(large)[-1] == MORE_STEPS
    assert (tmp_path / "elsewhere" / f"step-{MORE_STEPS:08d}").is_dir()
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.row(34)
def test_files_of_another_run_are_noticed(run, expected, tmp_path):
    """One by one: a checkpoint that lacks none of its files is that run's."""
    other = small_runs.uninterrupted(dataclasses.replace(CONFIG, seed=1)).path
    for name in FILES:
        with copied(run, tmp_path) as workdir:
            shutil.copy(other / NEWEST / name, workdir / NEWEST / name)
            assert_restored(outcome(workdir), expected, 4)
    with copied(run, tmp_path) as workdir:
        shutil.rmtree(workdir / NEWEST)
        shutil.copytree(other / NEWEST, workdir / NEWEST)
        refused = outcome(workdir)
        assert isinstance(refused, ConfigError) and "seed was 1" in str(refused)
