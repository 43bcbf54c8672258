"""Checkpoints, compared with what was saved, `hashlib` and TensorFlow's own reader."""

import functools
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from engines.disk import write_tree
from engines.file_recorder import crash_states
from example_checkpoints import (
    DATA,
    FILES,
    INDEX,
    MANIFEST,
    STATE,
    assert_restores,
    assert_same,
    empty,
    example_tensors,
    flip_bit,
    folder_with,
    save,
    snapshot,
    truncate,
)
from marks import slow

from towers.errors import CheckpointError
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer
from towers.run.restore import validate_architecture

pytestmark = pytest.mark.usefixtures("no_pause")


def restore(folder, step="last"):
    """The checkpoint, where none is rejected."""
    return Checkpointer(folder, log=pytest.fail).read(step)


# What is written.


def test_what_was_saved_is_restored_bit_for_bit_and_in_order(tmp_path):
    path = save(tmp_path, 1200)
    assert path == tmp_path / "step-00001200"
    restored = restore(tmp_path)
    assert restored.path == path and restored.step == 1200
    assert_same(restored.tensors, example_tensors(1200))
    assert restored.run_state.pop("versions")["tensorflow"] == tf.__version__
    assert restored.run_state == {"images": 64 * 1200, "step": 1200}
    assert os.listdir(tmp_path) == ["step-00001200"]


def test_tensorflow_and_hashlib_read_the_same_files(tmp_path):
    path = save(tmp_path, 7)
    expected = example_tensors(7)
    listed = dict(tf.train.list_variables(str(path / "tensors")))
    assert listed == {name: list(tensor.shape) for name, tensor in expected.items()}
    for name, tensor in expected.items():
        stored = tf.train.load_variable(str(path / "tensors"), name)
        assert stored.tobytes() == tensor.tobytes(), name
    manifest = json.loads((path / MANIFEST).read_text())
    assert {entry["name"] for entry in manifest["files"]} == {DATA, INDEX, STATE}
    for entry in manifest["files"]:
        content = (path / entry["name"]).read_bytes()
        assert entry["size"] == len(content)
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
    state = json.loads((path / STATE).read_text())
    assert state["architecture"][0] == ["params/conv1/kernel", [3, 3, 2, 4], "float32"]
    assert [name for name, _, _ in state["architecture"]] == list(expected)


def refuse(found):
    raise CheckpointError(f"{found.path}: of another version")


@pytest.mark.parametrize("damage", [flip_bit, None])
def test_what_has_the_name_of_a_step_is_replaced(tmp_path, damage):
    """Also a whole checkpoint whose run state the run refuses."""
    folder_with(tmp_path, 2)
    path = save(tmp_path, 3)
    if damage:
        damage(path / DATA)
        refused = Checkpointer(tmp_path, log=list)
    else:
        refused = Checkpointer(tmp_path, list, lambda x: x.step == 2 or refuse(x))
    assert refused.read().step == 2
    tensors = example_tensors(4)
    refused.save(Snapshot(3, tensors, {}))
    assert_same(restore(tmp_path).tensors, tensors)
    assert os.listdir(tmp_path) == ["step-00000003"]  # it keeps one


def test_what_is_read_back_wrong_is_not_committed(tmp_path, monkeypatch):
    save(tmp_path, 1)
    save_v2 = tf.raw_ops.SaveV2

    def save_other(*, tensors, **kwargs):
        *others, step = tensors
        return save_v2(tensors=[*others, step + 1], **kwargs)

    monkeypatch.setattr(tf.raw_ops, "SaveV2", save_other)
    with pytest.raises(CheckpointError, match="tensor step read back differs"):
        save(tmp_path, 2, log=list)
    assert os.listdir(tmp_path) == ["step-00000001"]


# Damage.


@pytest.mark.parametrize("damage", [truncate, empty, flip_bit, Path.unlink])
@pytest.mark.row(6)
def test_a_damaged_checkpoint_is_rejected_and_the_one_before_used(tmp_path, damage):
    for name in FILES:
        folder = tmp_path / name
        folder_with(folder, 1, 2)
        damage(folder / "step-00000002" / name)
        before = snapshot(folder)
        lines = []
        restored = Checkpointer(folder, lines.append).read()
        assert_same(restored.tensors, example_tensors(1))
        [line] = lines
        assert line.startswith(f"rejected checkpoint {folder}/step-00000002: ")
        if name != MANIFEST or damage is not flip_bit:
            assert f"2: {name}" in line
        assert snapshot(folder) == before


# What is read.


@pytest.fixture
def read_names(monkeypatch):
    """Names of the files whose bytes are compared with the manifest."""
    names, digest = [], hashlib.file_digest
    monkeypatch.setattr(
        hashlib,
        "file_digest",
        lambda file, kind: names.append(Path(file.name).name) or digest(file, kind),
    )
    return names


def test_what_is_known_is_not_read_again_until_it_changes(tmp_path, read_names):
    folder_with(tmp_path, 1, 2)
    whole = (tmp_path / "step-00000002" / DATA).read_bytes()
    truncate(tmp_path / "step-00000002" / DATA)
    lines = []
    following = Checkpointer(tmp_path, functools.cache(lines.append))

    def assert_nothing_new():
        read_names.clear()
        assert following.read_new() is None and not read_names

    assert following.read_new().step == 1
    assert_nothing_new()
    assert len(lines) == 1  # about the one that is damaged
    (tmp_path / "step-00000002" / DATA).write_bytes(whole)
    assert following.read_new().step == 2
    assert_nothing_new()
    save(tmp_path, 3)
    assert following.read_new().step == 3
    shutil.rmtree(tmp_path / "step-00000002")
    assert_nothing_new()


# Other models.


def kernels(**sizes):
    return {f"params/{k}": np.zeros(n, np.float32) for k, n in sizes.items()}


@pytest.mark.parametrize(
    "saved,reason",
    [
        (kernels(a=3, c=8), "params/b is in the model but not"),
        (kernels(a=3, b=8, x=2, c=8), "params/x is in the checkpoint but not"),
        (kernels(a=3, b=16, c=8), r"params/b is float32 \[8\] here, float32 \[16\] in"),
        (kernels(a=3, c=8, b=8), "params/b of the model is at the place of params/c"),
    ],
    ids=["added", "removed", "widened", "swapped"],
)
@pytest.mark.row(8)
def test_a_changed_model_is_refused_by_its_first_difference(saved, reason):
    model = kernels(a=3, b=8, c=8)
    with pytest.raises(CheckpointError, match=reason):
        validate_architecture(model, saved)
    validate_architecture(model, model)


# Keeping.


def test_the_newest_and_the_best_are_kept(tmp_path, read_names):
    folder_with(tmp_path, 1, 2, 3, 4)
    read_names.clear()
    tensors = example_tensors(5)
    best = {"best": {"step": 2}}
    Checkpointer(tmp_path, pytest.fail, keep=2).save(Snapshot(5, tensors, best))
    assert Checkpointer(tmp_path).steps() == [2, 4, 5]
    assert read_names.count(DATA) == 1  # of the one that is saved


# Saves that are cut off, or have no room.


@pytest.mark.parametrize("most", [1, slow(100)])
@pytest.mark.row(2)
def test_where_a_whole_checkpoint_is_replaced_one_of_both_is_there(tmp_path, most):
    """After each kill and power cut; after a kill the save succeeds when repeated."""

    def act(folder):
        checkpointer = Checkpointer(folder, log=list)
        checkpointer.recover()
        checkpointer.remove_leftovers()
        checkpointer.save(Snapshot(3, example_tensors(4), {}))

    def check(folder):
        checkpointer = Checkpointer(folder, log=list)
        checkpointer.recover()
        tensors = checkpointer.read().tensors
        assert_same(tensors, example_tensors(4 if tensors["step"] == 4 else 3))

    folder, known = folder_with(tmp_path / "whole", 3), set()
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


@pytest.mark.row(4)
def test_full_disk_is_refused_and_the_previous_checkpoint_intact(small_disk):
    """A real small disk, full at another place each time."""
    folder = folder_with(small_disk / "checkpoints", 1)
    num_refused = num_saved = 0
    for num_free in range(0, 64 * 1024, 4096):
        num_fill = shutil.disk_usage(small_disk).free - num_free
        (small_disk / "fill").write_bytes(bytes(num_fill))
        refused = None
        try:
            save(folder, 2, log=list)
        except CheckpointError as error:
            refused = error
        if refused is None:
            shutil.rmtree(folder / "step-00000002")
            num_saved += 1
        else:
            num_refused += 1
            needed = sum(tensor.nbytes for tensor in example_tensors(2).values())
            assert refused.exit_code == 4
            words = f"cannot save step 2 in {folder}", "No space left on device"
            words += f"{needed:,} bytes", f"{num_free:,} bytes are free there"
            assert all(x in str(refused) for x in words)
            assert "\n" not in str(refused) and "{{" not in str(refused)
            assert os.listdir(folder) == ["step-00000001"]
        assert_restores(folder, 1)
        (small_disk / "fill").unlink()
    assert num_refused >= 4 and num_saved >= 4
    save(folder, 2)
    assert_restores(folder, 2)
