"""Saves that are killed or have no room."""

import builtins
import errno
import io
import itertools
import os
import shutil

import pytest
import tensorflow as tf
from example_checkpoints import (
    DATA,
    assert_restores,
    assert_same,
    empty,
    example_tensors,
    folder_with,
    save,
)

from towers.errors import CheckpointError
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer

pytestmark = pytest.mark.usefixtures("no_fsync", "no_pause")


# Killed, or no room, at every operation.

WRITES = [(os, name) for name in ("mkdir", "rename", "fsync")]
WRITES += [(tf.raw_ops, "SaveV2"), (io, "open")]
OTHERS = [(os, name) for name in ("open", "unlink", "rmdir", "listdir")]
OTHERS += [(builtins, "open")]


class Killed(BaseException):
    """Like a kill, it passes every `except Exception`."""


def failing(monkeypatch, operations, error, is_time):
    """Raises an error before the n-th file operation where `is_time(n)`."""
    count = itertools.count(1)

    def wrap(operation):
        def wrapped(*args, **kwargs):
            is_read = operation is real_open and "w" not in (*args, "r")[1]
            if not is_read and is_time(next(count)):
                raise error
            return operation(*args, **kwargs)

        return wrapped

    real_open = io.open
    for owner, name in operations:
        monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))


def start_save_and_keep(folder):
    """What a trainer does: start, save step 3, delete the old ones."""
    checkpointer = Checkpointer(folder, log=list)
    checkpointer.recover()
    checkpointer.remove_leftovers()
    save(folder, 3, keep=1, log=list)


@pytest.fixture(scope="module")
def busy_folder(tmp_path_factory):
    """Steps 1 and 2, a damaged step 3 that is to be replaced, and a left-over."""
    folder = folder_with(tmp_path_factory.mktemp("busy"), 1, 2, 3)
    empty(folder / "step-00000003" / DATA)
    shutil.copytree(folder / "step-00000002", folder / ".tmp-1-step-00000002")
    return folder


@pytest.mark.row(2)
def test_killed_at_each_file_operation(tmp_path, busy_folder):
    for place in itertools.count(1):
        folder = shutil.copytree(busy_folder, tmp_path / str(place))
        with pytest.MonkeyPatch.context() as patch:
            is_place = place.__eq__
            failing(patch, WRITES + OTHERS, Killed(), is_place)
            try:
                start_save_and_keep(folder)
                break
            except Killed:
                pass
        assert_restores(folder, 2, 3)
        for step in Checkpointer(folder).steps():  # nothing half done looks done
            try:
                assert Checkpointer(folder).restore(step)
            except CheckpointError as error:
                assert step == 3 and f"{DATA}: size is 0" in str(error)
        start_save_and_keep(folder)
        assert_restores(folder, 3)
        assert os.listdir(folder) == ["step-00000003"]
    assert place > 30  # so many operations there are, or the patches do not reach them


@pytest.mark.row(2)
def test_killed_where_a_whole_checkpoint_is_replaced(tmp_path):
    """As after an evaluation that was made up for; there is no other one."""
    new = Snapshot(3, example_tensors(4), {})
    for place in itertools.count(1):
        folder = folder_with(tmp_path / str(place), 3)
        with pytest.MonkeyPatch.context() as patch:
            failing(patch, WRITES + OTHERS, Killed(), place.__eq__)
            try:
                Checkpointer(folder).save(new)
                break
            except Killed:
                pass
        checkpointer = Checkpointer(folder, log=list)
        checkpointer.recover()
        tensors = checkpointer.restore().tensors
        is_new = tensors["step"] == 4
        assert_same(tensors, example_tensors(4 if is_new else 3))
    assert place > 20


@pytest.mark.row(4)
def test_no_room_from_any_file_operation_on(tmp_path, busy_folder):
    num_refused = 0
    for place in itertools.count(1):
        folder = shutil.copytree(busy_folder, tmp_path / str(place))
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with pytest.MonkeyPatch.context() as patch:
            failing(patch, WRITES, error, place.__le__)
            try:
                save(folder, 3, log=list)
                assert_restores(folder, 3)
                break
            except CheckpointError as refused:
                num_refused += 1
                assert "No space left" in str(refused) and str(folder) in str(refused)
        assert_restores(folder, 2, 3)
        assert not [
            n for n in os.listdir(folder) if n.startswith(f".tmp-{os.getpid()}")
        ]
    assert num_refused > 10


# Disk full.


@pytest.mark.row(4)
def test_full_disk_is_refused_and_the_previous_checkpoint_intact(small_disk):
    """A real small disk, full at another place each time."""
    folder = folder_with(small_disk / "checkpoints", 1)
    num_refused = num_saved = 0
    for num_free in range(0, 64 * 1024, 4096):
        num_fill = shutil.disk_usage(small_disk).free - num_free
        (small_disk / "fill").write_bytes(bytes(num_fill))
        try:
            save(folder, 2, log=list)
            shutil.rmtree(folder / "step-00000002")
            num_saved += 1
        except CheckpointError as refused:
            num_refused += 1
            needed = sum(tensor.nbytes for tensor in example_tensors(2).values())
            assert refused.exit_code == 4
            for words in (
                f"cannot save step 2 in {folder}",
                "No space left on device",
                f"{needed:,} bytes",
                f"{num_free:,} bytes are free there",
            ):
                assert words in str(refused)
            assert "\n" not in str(refused) and "{{" not in str(refused)
            assert os.listdir(folder) == ["step-00000001"]
        assert_restores(folder, 1)
        (small_disk / "fill").unlink()
    assert num_refused >= 4 and num_saved >= 4
    save(folder, 2)
    assert_restores(folder, 2)
