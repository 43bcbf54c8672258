"""Saves that are killed or have no room."""

import contextlib
import os
import shutil

import pytest
from engines.disk import write_tree
from engines.file_recorder import crash_states
from example_checkpoints import (
    DATA,
    assert_restores,
    assert_same,
    empty,
    example_tensors,
    folder_with,
    save,
)
from marks import slow

from towers.errors import CheckpointError
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer

pytestmark = pytest.mark.usefixtures("no_fsync", "no_pause")


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


def assert_survives_any_cut(folder, act, most, check):
    """Each state that a kill or a power cut during `act` may leave passes a check, and
    from what a kill leaves the act succeeds."""
    known = set()
    for trees in crash_states(folder, lambda: act(folder), most):
        for tree in trees:
            if (key := frozenset(tree.items())) in known:
                continue
            known.add(key)
            copy = folder.with_name(str(len(known)))
            write_tree(copy, tree)
            check(copy)
            if tree is trees[0]:
                act(copy)
                check(copy)
                assert os.listdir(copy) == ["step-00000003"]
            shutil.rmtree(copy)
    assert len(known) > 30


few_and_many = pytest.mark.parametrize("most", [1, slow(100)])


@few_and_many
@pytest.mark.row(2)
def test_at_any_moment_of_a_save_a_good_checkpoint_is_there(
    tmp_path, busy_folder, most
):
    def check(folder):
        checkpointer = Checkpointer(folder, log=list)
        checkpointer.recover()
        assert_restores(folder, 2, 3)
        for step in checkpointer.steps():  # nothing half done looks done
            with contextlib.suppress(CheckpointError):
                assert_same(checkpointer.restore(step).tensors, example_tensors(step))

    folder = shutil.copytree(busy_folder, tmp_path / "busy")
    assert_survives_any_cut(folder, start_save_and_keep, most, check)


@few_and_many
@pytest.mark.row(2)
def test_where_a_whole_checkpoint_is_replaced_one_of_both_is_there(tmp_path, most):
    """As after an evaluation that was made up for; there is no other one."""
    changed = Snapshot(3, example_tensors(4), {})

    def check(folder):
        checkpointer = Checkpointer(folder, log=list)
        checkpointer.recover()
        tensors = checkpointer.restore().tensors
        assert_same(tensors, example_tensors(4 if tensors["step"] == 4 else 3))

    def act(folder):
        checkpointer = Checkpointer(folder, log=list)
        checkpointer.recover()
        checkpointer.remove_leftovers()
        checkpointer.save(changed)

    folder = folder_with(tmp_path / "whole", 3)
    assert_survives_any_cut(folder, act, most, check)


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
