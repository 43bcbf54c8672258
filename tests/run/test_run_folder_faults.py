"""A run's folder that changes, fills up or is not a run's."""

import contextlib
import dataclasses
import errno
import json
import os
import shutil

import pytest
import small_runs
from marks import slow
from small_runs import (
    assert_equal_states,
    every_strategy,
    records,
    saved_steps,
    small_config,
)

from towers import callbacks, store
from towers.config import to_json
from towers.errors import CheckpointError, ConfigError, RunFolderError
from towers.run.records import Reports
from towers.run.stored_config import config_to_continue
from towers.training import banner
from towers.training.train import train

pytestmark = pytest.mark.usefixtures("small", "no_pause")


# Row 34: config.json is missing, or not what the checkpoint says.


@pytest.mark.row(34)
def test_row_34_the_checkpoint_decides_what_run_it_is(half_way):
    other = small_config(learning_rate=0.5, seed=77)
    (half_way / "config.json").write_text(json.dumps(dataclasses.asdict(other)))
    message = "learning_rate was 0.1 and is 0.5, |seed was 0 and is 77"
    with pytest.raises(ConfigError, match=message):
        train(half_way, other)
    assert saved_steps(half_way) == [5]
    state = train(half_way, small_config()).state
    assert_equal_states(state, small_runs.uninterrupted(small_config()).state)


@pytest.mark.row(34)
def test_row_34_a_command_without_a_recipe_stands_on_the_config_of_the_checkpoint(
    half_way, tmp_path
):
    config = small_config(max_steps=5)
    assert config_to_continue(half_way) == config
    changed = dataclasses.replace(config, learning_rate=0.5, log_every_steps=7)
    (half_way / "config.json").write_text(to_json(changed))
    assert config_to_continue(half_way) == dataclasses.replace(
        config, log_every_steps=7
    )
    (half_way / "config.json").unlink()
    assert config_to_continue(half_way) == config
    assert config_to_continue(tmp_path / "nothing") is None
    shutil.rmtree(half_way / "checkpoints")
    assert config_to_continue(half_way) is None
    (half_way / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: not a config.json"):
        config_to_continue(half_way)
    assert config_to_continue(half_way, overwrite=True) is None


# Row 35: no room for what only reports.


@contextlib.contextmanager
def full_disk(name, fails=lambda *args: True):
    """A function of the store raises the error of a full disk."""
    original = getattr(store, name)

    def full(*args):
        if fails(*args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, name, full)
        yield


REPORTING = small_config(log_every_steps=1, eval_every_epochs=1.0)


@pytest.mark.row(35)
def test_row_35_a_training_on_a_disk_that_fills_up_and_empties_again(
    small_disk, capsys
):
    """The disk is full from step 4 to step 7."""
    expected = small_runs.uninterrupted(REPORTING)

    class Fill(callbacks.Callback):
        def on_log(self, step, metrics):
            if step == 4:
                free = shutil.disk_usage(small_disk).free
                (small_disk / "fill").write_bytes(bytes(free))
            if step == 7:
                (small_disk / "fill").unlink()

    config = dataclasses.replace(REPORTING, summary_every_steps=3)
    result = train(small_disk / "run", config, callbacks=[Fill()])
    assert_equal_states(result.state, expected.state)
    assert records(small_disk / "run") == expected.records
    assert "can be written again" in capsys.readouterr().out


@pytest.mark.parametrize("num_failures", [1, 2])
@pytest.mark.row(4, 46)
def test_rows_4_46_a_checkpoint_is_tried_once_more(tmp_path, capsys, num_failures):
    failures = iter(range(num_failures))

    def fails(path, target):
        return target.name.startswith("step-") and next(failures, None) is not None

    is_saved = contextlib.nullcontext()
    if num_failures == 2:
        words = "bytes are free .* same command continues"
        is_saved = pytest.raises(CheckpointError, match=words)
    with full_disk("replace", fails), is_saved:
        train(tmp_path, small_config(max_steps=4))
    assert saved_steps(tmp_path) == ([4] if num_failures == 1 else [])
    assert "Trying once more" in capsys.readouterr().out


# Row 36: the folder is removed, moved or replaced.


def move(folder):
    folder.rename(folder.with_name("moved"))


def remove(folder):
    shutil.rmtree(folder.rename(folder.with_name("removed")))


def replace(folder):
    """As `rm -r` and another run there would."""
    other = small_runs.half_way(folder.with_name("other"))
    (other / ".lock").write_text("{}")
    newest = other / "checkpoints" / "step-00000005"
    shutil.copytree(newest, newest.with_name("step-00000001"))
    remove(folder)
    other.rename(folder)


@pytest.mark.parametrize(
    "when,change",
    [
        ("between steps", replace),
        ("in a save", move),
        slow("between steps", remove),
        slow("in a save", replace),
    ],
)
@pytest.mark.row(36)
def test_row_36_a_folder_that_is_gone_ends_the_run(tmp_path, when, change):
    """Another run in its place is not touched: nothing is written there or removed."""
    config = small_config(log_every_steps=1, keep_checkpoints=1, eval_every_epochs=1.0)
    workdir, calls, before = tmp_path / "run", [], {}

    def change_once(*_):
        calls.append(None)
        if len(calls) == 4:
            change(workdir)
            before.update(small_runs.snapshot(workdir))

    with pytest.MonkeyPatch.context() as patch:
        callback = callbacks.Callback()
        if when == "in a save":
            config = dataclasses.replace(config, checkpoint_every_steps=1)
            small_runs.halt_at(patch, "saving", change_once)
        else:
            callback.on_log = change_once
        message = "run is not the folder .* put it back"
        with pytest.raises(RunFolderError, match=message):
            train(workdir, config, callbacks=[callback])
    assert small_runs.snapshot(workdir) == before, "the other folder was touched"
    if change is move:
        (tmp_path / "moved").rename(workdir)
        state = train(workdir, config).state
        assert_equal_states(state, small_runs.uninterrupted(small_config()).state)


@pytest.mark.row(36)
def test_row_36_nothing_of_another_run_is_removed_by_overwrite(tmp_path, monkeypatch):
    workdir, before = tmp_path / "run", {}
    target, print_banner = "towers.training.train.print_banner", banner.print_banner

    def replace_first(*args, **kwargs):
        monkeypatch.setattr(target, print_banner)  # for the other run
        replace(workdir)
        before.update(small_runs.snapshot(workdir))
        return print_banner(*args, **kwargs)

    monkeypatch.setattr(target, replace_first)
    with pytest.raises(RunFolderError, match="is not the folder"):
        train(workdir, small_config(), overwrite=True)
    assert before and small_runs.snapshot(workdir) == before


# Row 41.


@every_strategy
@pytest.mark.row(41)
def test_row_41_a_whole_step_is_saved_before_an_unforeseen_error(tmp_path, strategy):
    config = small_config(**strategy)

    def fail(self, record):
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reports, "record", fail)
        with pytest.raises(ZeroDivisionError):
            train(tmp_path, config)
    assert saved_steps(tmp_path)
    state = train(tmp_path, config).state
    assert_equal_states(state, small_runs.uninterrupted(config).state)
