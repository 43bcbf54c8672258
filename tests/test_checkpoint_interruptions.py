"""Saves that are killed or have no room: rows 2 and 4 of the table of faults."""

import builtins
import errno
import io
import itertools
import os
import resource
import shutil

import pytest
import tensorflow as tf
from example_checkpoints import (
    DATA,
    assert_restores,
    empty,
    example_tensors,
    folder_with,
    save,
)

from towers.errors import CheckpointError
from towers.run import checkpoints


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """It takes most of the time on a busy disk, and matters only in a power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# Killed, or no room, at every operation.

OPERATIONS = [(os, name) for name in ("mkdir", "rename", "fsync", "open", "unlink")]
OPERATIONS += [(os, "rmdir"), (os, "listdir"), (io, "open"), (builtins, "open")]
OPERATIONS += [(tf.train.Checkpoint, "write")]


class Killed(BaseException):
    """Like a kill, it passes every `except Exception`."""


def failing_at(monkeypatch, place, error):
    """Raises `error` before the place-th file operation, once."""
    count = itertools.count(1)

    def wrap(operation):
        def wrapped(*args, **kwargs):
            if next(count) == place:
                raise error
            return operation(*args, **kwargs)

        return wrapped

    for owner, name in OPERATIONS:
        monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))


def start_save_and_keep(folder):
    """What a trainer does: start, save step 3, delete the old ones."""
    checkpoints.remove_leftovers(folder, log=lambda line: None)
    save(folder, 3)
    checkpoints.keep(folder, 1, log=lambda line: None)


@pytest.fixture(scope="module")
def busy_folder(tmp_path_factory):
    """Steps 1 and 2, a damaged step 3 that is to be replaced, and a left-over."""
    folder = folder_with(tmp_path_factory.mktemp("busy"), 1, 2, 3)
    empty(folder / "step-00000003" / DATA)
    shutil.copytree(folder / "step-00000002", folder / ".tmp-step-00000002-1")
    return folder


@pytest.mark.row(2)
def test_killed_at_each_file_operation(tmp_path, busy_folder):  # row 2
    for place in itertools.count(1):
        folder = shutil.copytree(busy_folder, tmp_path / str(place))
        with pytest.MonkeyPatch.context() as patch:
            failing_at(patch, place, Killed())
            try:
                start_save_and_keep(folder)
                break
            except Killed:
                pass
        assert_restores(folder, 2, 3)
        for step in checkpoints.list_steps(folder):  # nothing half done looks done
            try:
                assert checkpoints.restore_step(folder, step)
            except CheckpointError as error:
                assert step == 3 and f"{DATA}: size is 0" in str(error)
        start_save_and_keep(folder)
        assert_restores(folder, 3)
        assert os.listdir(folder) == ["step-00000003"]
    assert place > 30  # so many operations there are, or the patches do not reach them


@pytest.mark.row(4)
def test_no_room_at_each_file_operation(tmp_path, busy_folder):  # row 4
    num_refused = 0
    for place in itertools.count(1):
        folder = shutil.copytree(busy_folder, tmp_path / str(place))
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with pytest.MonkeyPatch.context() as patch:
            failing_at(patch, place, error)
            try:
                save(folder, 3)
                reached = error.__traceback__ is not None
            except CheckpointError as refused:
                reached = True
                num_refused += 1
                assert "No space left" in str(refused) and str(folder) in str(refused)
        assert_restores(folder, 2, 3)
        left = [n for n in os.listdir(folder) if n.startswith(".tmp-step-00000003")]
        assert not left
        if not reached:
            break
    assert num_refused > 15


# Disk full.


def check_refusal(refused, folder, step):
    """Row 4: the folder, the bytes needed and free, in one line."""
    needed = sum(tensor.nbytes for tensor in example_tensors(step).values())
    assert refused.exit_code == 4
    assert f"cannot save step {step} in {folder}" in str(refused)
    assert f"{needed:,} bytes" in str(refused) and "are free there" in str(refused)
    assert "\n" not in str(refused) and "{{" not in str(refused)


@pytest.mark.row(4)
def test_full_disk_is_refused_and_the_previous_checkpoint_intact(small_disk):  # row 4
    """A real small disk, full at another place each time."""
    folder = folder_with(small_disk / "checkpoints", 1)
    num_refused = num_saved = 0
    for num_free in range(0, 64 * 1024, 4096):
        num_fill = shutil.disk_usage(small_disk).free - num_free
        (small_disk / "fill").write_bytes(bytes(num_fill))
        try:
            save(folder, 2)
            shutil.rmtree(folder / "step-00000002")
            num_saved += 1
        except CheckpointError as refused:
            num_refused += 1
            check_refusal(refused, folder, 2)
            assert "No space left on device" in str(refused)
            assert f"{num_free:,} are free there" in str(refused)
            assert os.listdir(folder) == ["step-00000001"]
        assert_restores(folder, 1)
        (small_disk / "fill").unlink()
    assert num_refused >= 4 and num_saved >= 4
    save(folder, 2)
    assert_restores(folder, 2)


@pytest.mark.parametrize("max_bytes", [100, 900, 1500])
@pytest.mark.row(4)
def test_a_file_that_grows_too_large_is_refused(tmp_path, max_bytes):  # row 4
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        with pytest.raises(CheckpointError) as refused:
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check_refusal(refused.value, tmp_path, 2)
    assert "File too large" in str(refused.value)
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert_restores(tmp_path, 1)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="file"):
        save(tmp_path / "file" / "checkpoints", 2)
