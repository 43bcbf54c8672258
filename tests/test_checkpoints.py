"""Checkpoints: rows 3 and 6 to 8 of the table of faults, and their content.

Restored tensors are compared with the arrays that were saved, byte by byte, and the
files with the results of `hashlib` and of TensorFlow's own reader.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
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
    rewrite_manifest,
    save,
    snapshot,
    truncate,
)

from towers.errors import CheckpointError, RunFolderError
from towers.run import checkpoint_files, checkpoints

real_fsync = os.fsync


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """It takes most of the time on a busy disk, and matters only in a power cut."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# What is written.


def test_what_was_saved_is_restored_bit_for_bit_and_in_order(tmp_path):
    path = save(tmp_path, 1200)
    assert path == tmp_path / "step-00001200"
    checkpoint = checkpoints.restore_latest(tmp_path, log=pytest.fail)
    assert checkpoint.path == path and checkpoint.step == 1200
    assert_same(checkpoint.tensors, example_tensors(1200))
    assert checkpoint.trainer_state.pop("versions")["tensorflow"] == tf.__version__
    assert checkpoint.trainer_state == {"images": 64 * 1200, "step": 1200}
    assert os.listdir(tmp_path) == ["step-00001200"]


@pytest.mark.parametrize(
    "dtype",
    [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64, np.bool_]
    + [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32],
)
def test_every_dtype_survives(tmp_path, dtype):
    tensors = {"scalar": np.ones((), dtype), "vector": np.arange(2).astype(dtype)}
    checkpoints.save(tmp_path, 0, tensors, {})
    assert_same(checkpoints.restore_step(tmp_path, 0).tensors, tensors)


def test_tensorflow_and_hashlib_read_the_same_files(tmp_path):
    path = save(tmp_path, 7)
    expected = example_tensors(7)
    listed = dict(tf.train.list_variables(str(path / "tensors")))
    assert listed["params/conv1/kernel/.ATTRIBUTES/VARIABLE_VALUE"] == [3, 3, 2, 4]
    assert len(listed) == len(expected) + 1  # and TensorFlow's graph of the objects
    key = "params/conv1/kernel/.ATTRIBUTES/VARIABLE_VALUE"
    kernel = tf.train.load_variable(str(path / "tensors"), key)
    assert kernel.tobytes() == expected["params/conv1/kernel"].tobytes()
    manifest = json.loads((path / MANIFEST).read_text())
    assert {entry["name"] for entry in manifest["files"]} == {DATA, INDEX, STATE}
    for entry in manifest["files"]:
        content = (path / entry["name"]).read_bytes()
        assert entry["size"] == len(content)
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
    state = json.loads((path / STATE).read_text())
    assert state["architecture"][0] == ["params/conv1/kernel", [3, 3, 2, 4], "float32"]
    assert [name for name, _, _ in state["architecture"]] == list(expected)


@pytest.mark.parametrize("name", ["lr[0.1]", "a\\b", "[", "*?"])
def test_a_folder_may_have_the_name_of_a_pattern(tmp_path, name, monkeypatch):
    folder_with(tmp_path / name, 1)
    checkpoint = checkpoints.restore_latest(tmp_path / name, log=pytest.fail)
    assert_same(checkpoint.tensors, example_tensors(1))
    monkeypatch.chdir(tmp_path / name)
    assert checkpoints.restore_latest(".", log=pytest.fail).step == 1


def test_the_same_step_is_not_written_twice(tmp_path):
    path = save(tmp_path, 3)
    before = path.stat().st_ino, snapshot(tmp_path)
    assert save(tmp_path, 3) == path
    assert (path.stat().st_ino, snapshot(tmp_path)) == before


def test_other_values_of_a_saved_step_are_refused(tmp_path):
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="another tensor params/conv1/kernel"):
        checkpoints.save(tmp_path, 3, example_tensors(4) | {"step": np.int64(3)}, {})
    assert_restores(tmp_path, 3)


def test_an_invalid_checkpoint_of_the_same_step_is_replaced(tmp_path):
    folder_with(tmp_path, 2, 3)
    flip_bit(tmp_path / "step-00000003" / DATA)
    save(tmp_path, 3)
    assert_restores(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]


def test_everything_is_fsynced_before_the_rename_and_the_parent_after(
    tmp_path, monkeypatch
):
    real_rename = os.rename
    synced, synced_before_rename = [], []

    def fsync(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        real_fsync(descriptor)

    def rename(source, target):
        synced_before_rename.extend(synced)
        synced.clear()
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    path = save(tmp_path / "checkpoints", 1)
    written = [path, *path.iterdir()]
    assert len(written) == 5
    assert {p.stat().st_ino for p in written} <= set(synced_before_rename)
    assert tmp_path.stat().st_ino in synced_before_rename  # the folder is new
    assert path.parent.stat().st_ino in synced


def test_what_is_read_back_wrong_is_not_committed(tmp_path, monkeypatch):
    save(tmp_path, 1)
    real_write = tf.train.Checkpoint.write

    def write(self, prefix, options=None):
        self.params["conv1"]["bias"].assign_add([0, 0, 0, 1])
        return real_write(self, prefix, options)

    monkeypatch.setattr(tf.train.Checkpoint, "write", write)
    with pytest.raises(CheckpointError, match="params/conv1/bias read back differs"):
        save(tmp_path, 2)
    assert os.listdir(tmp_path) == ["step-00000001"]


# Left-overs.


@pytest.mark.row(3)
def test_leftovers_are_removed_and_their_size_logged(tmp_path):  # row 3
    folder_with(tmp_path, 1)
    leftover = tmp_path / ".tmp-step-00000002-4711"
    (leftover / "tensors_temp").mkdir(parents=True)
    (leftover / "tensors_temp" / "part").write_bytes(bytes(1000))
    (leftover / "trainer_state.json").write_bytes(bytes(234))
    (tmp_path / ".tmp-file").write_bytes(b"")
    lines = []
    checkpoints.remove_leftovers(tmp_path, log=lines.append)
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert len(lines) == 2
    assert str(leftover) in lines[1] and "1,234 bytes" in lines[1]
    checkpoints.remove_leftovers(tmp_path / "absent", log=pytest.fail)


@pytest.mark.row(3)
def test_a_leftover_of_too_many_levels_is_no_hindrance(tmp_path):
    leftover = tmp_path / ".tmp-x"
    nested_folders(leftover, 1100)
    lines = []
    try:
        checkpoints.remove_leftovers(tmp_path, log=lines.append)
        if leftover.exists():  # some versions of Python can remove it
            assert len(lines) == 1 and lines[0].startswith(f"cannot remove {leftover}")
    finally:
        subprocess.run(["rm", "-rf", leftover], check=True)


def nested_folders(path, levels):
    """Makes folders in each other; no path may be as long as that of the last one."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    for name in (path.name, *["x"] * levels):
        os.mkdir(name, dir_fd=descriptor)
        inner = os.open(name, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)


def test_a_leftover_of_the_same_process_id_is_no_hindrance(tmp_path):
    leftover = tmp_path / f".tmp-step-00000002-{os.getpid()}"
    leftover.mkdir()
    (leftover / "stray").write_text("from a container in which every process is 1")
    path = save(tmp_path, 2)
    assert sorted(os.listdir(path)) == sorted(FILES)


# Damage.


@pytest.mark.row(38)
def test_row_38_a_planted_folder_leads_to_no_other_checkpoint(tmp_path):
    folder_with(tmp_path / "own", 1)
    folder_with(tmp_path / "other", 2)
    planted = tmp_path / "own" / "step-00000001" / "tensors"
    planted.mkdir()
    other = tmp_path / "other" / "step-00000002" / "tensors"
    (planted / "checkpoint").write_text(f'model_checkpoint_path: "{other}"\n')
    checkpoint = checkpoints.restore_step(tmp_path / "own", 1)
    assert_same(checkpoint.tensors, example_tensors(1))
    (planted / "checkpoint").unlink()
    os.mkfifo(planted / "checkpoint")
    assert checkpoints.restore_step(tmp_path / "own", 1).step == 1


def damage_cases():
    sizes = r"{}: size is \d+, should be \d+"
    for name in FILES:
        is_manifest = name == MANIFEST
        changed = sizes.format(name) if not is_manifest else f"{name} is not JSON"
        yield pytest.param(name, truncate, changed, id=f"{name} truncated")
        yield pytest.param(name, empty, changed, id=f"{name} of zero bytes")
        missing = f"{name}: No such file or directory"
        yield pytest.param(name, Path.unlink, missing, id=f"{name} missing")
        flipped = f"{name}: sha256 is" if not is_manifest else "step-00000002: "
        yield pytest.param(name, flip_bit, flipped, id=f"{name}, one bit flipped")


@pytest.mark.parametrize("name, damage, reason", list(damage_cases()))
@pytest.mark.row(6)
def test_a_damaged_checkpoint_is_rejected_and_the_one_before_used(
    tmp_path, name, damage, reason
):  # row 6
    folder_with(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002" / name)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=reason):
        checkpoint_files.read(tmp_path / "step-00000002")
    lines = []
    checkpoint = checkpoints.restore_latest(tmp_path, log=lines.append)
    assert checkpoint.step == 1
    assert_same(checkpoint.tensors, example_tensors(1))
    assert len(lines) == 1 and "rejected" in lines[0] and "step-00000002" in lines[0]
    assert snapshot(tmp_path) == before


@pytest.mark.row(6)
def test_any_flipped_bit_of_the_manifest_is_noticed(tmp_path):  # row 6
    path = save(tmp_path, 1)
    original = (path / MANIFEST).read_bytes()
    for place in range(0, len(original), 7):
        content = bytearray(original)
        content[place] ^= 1 << place % 8
        (path / MANIFEST).write_bytes(content)
        with pytest.raises(CheckpointError):
            checkpoint_files.read(path)
    (path / MANIFEST).write_bytes(original)
    checkpoint_files.read(path)


@pytest.mark.parametrize(
    "name, damage",
    [(DATA, truncate), (DATA, empty), (DATA, flip_bit), (INDEX, truncate)]
    + [(INDEX, empty), (INDEX, flip_bit), (STATE, truncate)],
)
def test_what_the_manifest_cannot_tell_the_reader_does(tmp_path, name, damage):
    folder_with(tmp_path, 1, 2)
    damage(tmp_path / "step-00000002" / name)
    rewrite_manifest(tmp_path / "step-00000002")
    lines = []
    assert checkpoints.restore_latest(tmp_path, log=lines.append).step == 1
    assert len(lines) == 1 and "\n" not in lines[0]


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: m["files"][0].update(name="../x"), "are not listed"),
        (
            lambda m: m["files"].append(dict(m["files"][0], name=f"../other/{DATA}")),
            "outside of the folder",
        ),
        (
            lambda m: m["files"].append(dict(m["files"][0], name="/etc/passwd")),
            "outside of the folder",
        ),
        (lambda m: m["files"].pop(), "not listed"),
        (lambda m: m["files"].clear(), "not listed"),
        (lambda m: m.pop("files"), "KeyError"),
        (lambda m: m.update(files=None), "TypeError"),
        (lambda m: m.update(files=[["name"]]), "TypeError"),
        (lambda m: m["files"][0].pop("sha256"), "sha256"),
        (lambda m: m.update(format=2), "another format"),
    ],
)
def test_a_manifest_that_says_something_else_is_rejected(tmp_path, change, reason):
    path = save(tmp_path / "checkpoints", 2)
    shutil.copytree(path, path.parent / "other")
    manifest = json.loads((path / MANIFEST).read_text())
    change(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=reason):
        checkpoint_files.read(path)


def test_a_copy_under_the_name_of_another_step_is_rejected(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000005")
    lines = []
    assert checkpoints.restore_latest(tmp_path, log=lines.append).step == 1
    assert "it holds step 1" in lines[0]


@pytest.mark.parametrize("name", ["step-00000009", "step-9", "step-00000002-copy"])
def test_empty_folders_files_and_other_names_are_rejected_not_skipped(tmp_path, name):
    (tmp_path / "folder" / name).mkdir(parents=True)
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / name).write_text("")
    for folder in (tmp_path / "folder", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=name):
            checkpoints.restore_latest(folder, log=lambda line: None)
        save(folder, 1)
        assert_restores(folder, 1)


def test_all_bad_is_an_error_with_every_reason_and_nothing_is_deleted(tmp_path):
    """Row 7."""
    folder_with(tmp_path, 1, 2, 3)
    empty(tmp_path / "step-00000001" / DATA)
    truncate(tmp_path / "step-00000002" / MANIFEST)
    (tmp_path / "step-00000003" / INDEX).unlink()
    before = snapshot(tmp_path)
    lines = []
    with pytest.raises(CheckpointError) as refused:
        checkpoints.restore_latest(tmp_path, log=lines.append)
    assert refused.value.exit_code == 4 and "\n" not in str(refused.value)
    for reason in (
        f"{DATA}: size is 0",
        f"{MANIFEST} is not JSON",
        f"{INDEX}: No such",
    ):
        assert reason in str(refused.value)
    assert len(lines) == 3
    assert snapshot(tmp_path) == before


def test_none_only_where_there_is_no_checkpoint(tmp_path):
    assert checkpoints.restore_latest(tmp_path / "absent") is None
    (tmp_path / ".tmp-step-00000001-1").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert checkpoints.restore_latest(tmp_path) is None
    assert checkpoints.list_steps(tmp_path / "absent") == []


def test_one_committed_while_another_is_rejected_is_restored(tmp_path):
    """So it is for an evaluation next to a run that keeps one checkpoint."""
    save(tmp_path, 1)
    empty(tmp_path / "step-00000001" / DATA)
    actual = checkpoints.restore_latest(tmp_path, log=lambda line: save(tmp_path, 2))
    assert actual.step == 2


@pytest.fixture
def opened(monkeypatch):
    """Names of the files that are opened from here on."""
    names, real_open = [], os.open

    def recording_open(path, *args, **kwargs):
        names.append(os.path.basename(path))
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", recording_open)
    return names


def test_what_is_known_is_not_read_again_until_it_changes(tmp_path, opened):
    folder_with(tmp_path, 1, 2)
    whole = (tmp_path / "step-00000002" / DATA).read_bytes()
    truncate(tmp_path / "step-00000002" / DATA)
    lines, known = [], {}

    def restore():
        opened.clear()
        return checkpoints.restore_latest(tmp_path, lines.append, known=known)

    assert restore().step == 1
    assert restore() is None and opened == []
    assert len(lines) == 1  # about the one that is damaged
    (tmp_path / "step-00000002" / DATA).write_bytes(whole)
    assert restore().step == 2
    assert restore() is None and opened == []
    save(tmp_path, 3)
    assert restore().step == 3
    shutil.rmtree(tmp_path / "step-00000002")
    assert restore() is None and opened == []


def test_what_could_not_be_read_is_tried_again(tmp_path, monkeypatch):
    folder_with(tmp_path, 1, 2)
    known = {}
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing_below(tmp_path / "step-00000002"))
        assert checkpoints.restore_latest(tmp_path, log=list, known=known).step == 1
    assert checkpoints.restore_latest(tmp_path, log=list, known=known).step == 2


def failing_below(folder):
    """`os.open` where a network file system has lost a folder."""
    real_open = os.open

    def fail_or_open(path, *args, **kwargs):
        if Path(path).is_relative_to(folder):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real_open(path, *args, **kwargs)

    return fail_or_open


@pytest.mark.parametrize("name", ["x" * 300, "loop"])
def test_a_step_in_a_folder_that_cannot_be_looked_into_is_refused(tmp_path, name):
    if name == "loop":
        (tmp_path / name).symlink_to(name)
    with pytest.raises(CheckpointError, match=f"{name}/step-00000003: "):
        checkpoints.restore_step(tmp_path / name, 3)


def test_one_step_can_be_asked_for(tmp_path):
    folder_with(tmp_path, 1, 2, 123456789)
    assert checkpoints.list_steps(tmp_path) == [1, 2, 123456789]
    assert_same(checkpoints.restore_step(tmp_path, 2).tensors, example_tensors(2))
    assert_restores(tmp_path, 123456789)
    with pytest.raises(CheckpointError, match="of step 3 .* has: 1, 2, 1234"):
        checkpoints.restore_step(tmp_path, 3)


# Other models.

MODEL = [
    ("params/conv1/kernel", (5, 5, 3, 8), "float32"),
    ("params/conv2/kernel", (5, 5, 8, 8), "float32"),
    ("params/conv3/kernel", (5, 5, 8, 8), "float32"),
    ("params/dense/kernel", (8, 10), "float32"),
    ("step", (), "int64"),
]


def changed(place, *entries, drop=1):
    return MODEL[:place] + list(entries) + MODEL[place + drop :]


@pytest.mark.parametrize(
    "actual, reason",
    [
        (changed(2), "params/conv3/kernel is in the model but not"),
        (changed(4), "step is in the model but not"),
        (
            changed(2, ("params/extra/kernel", (2,), "float32"), drop=0),
            "params/extra/kernel is in the checkpoint but not",
        ),
        (
            changed(5, ("params/extra/kernel", (2,), "float32")),
            "params/extra/kernel is in the checkpoint but not",
        ),
        (
            changed(1, ("params/renamed/kernel", (5, 5, 8, 8), "float32")),
            "params/conv2/kernel is in the model but not",
        ),
        (
            changed(1, ("params/conv2/kernel", (5, 5, 8, 16), "float32")),
            r"params/conv2/kernel is float32 \[5, 5, 8, 8\] here, "
            r"float32 \[5, 5, 8, 16\] in the checkpoint",
        ),
        (
            changed(3, ("params/dense/kernel", (8, 10), "bfloat16")),
            r"params/dense/kernel is float32 \[8, 10\] here, bfloat16 \[8, 10\]",
        ),
        (
            changed(1, MODEL[2], MODEL[1], drop=2),
            "params/conv2/kernel of the model stands where .* has params/conv3/kernel",
        ),
        ([], "params/conv1/kernel is in the model but not"),
    ],
    ids=["added", "added last", "removed", "removed last", "renamed", "widened"]
    + ["dtype", "swapped", "empty"],
)
@pytest.mark.row(8)
def test_a_changed_model_is_refused_by_its_first_difference(actual, reason):  # row 8
    with pytest.raises(CheckpointError, match=reason) as refused:
        checkpoint_files.check_architecture(MODEL, actual)
    assert refused.value.exit_code == 4


def test_the_same_model_passes(tmp_path):
    save(tmp_path, 1)
    expected = checkpoint_files.architecture(example_tensors(2))
    actual = checkpoint_files.architecture(
        checkpoints.restore_step(tmp_path, 1).tensors
    )
    checkpoint_files.check_architecture(expected, actual)
    as_json = json.loads((tmp_path / "step-00000001" / STATE).read_text())
    checkpoint_files.check_architecture(expected, as_json["architecture"])


# Keeping.


def test_the_newest_and_the_best_are_kept(tmp_path):
    folder_with(tmp_path, 1, 2, 3, 4, 5)
    checkpoints.keep(tmp_path, 2, best_step=2, log=pytest.fail)
    assert sorted(os.listdir(tmp_path)) == [f"step-0000000{i}" for i in (2, 4, 5)]
    checkpoints.keep(tmp_path, 1, log=pytest.fail)
    assert checkpoints.list_steps(tmp_path) == [5]
    with pytest.raises(ValueError, match="keep_checkpoints must be 1 or more, got 0"):
        checkpoints.keep(tmp_path, 0)


def test_keeping_reads_no_tensors(tmp_path, opened):
    folder_with(tmp_path, 1, 2, 3, 4)
    opened.clear()
    checkpoints.keep(tmp_path, 2, best_step=1, log=pytest.fail)
    assert checkpoints.list_steps(tmp_path) == [1, 3, 4]
    assert not {DATA, INDEX} & set(opened)


def test_a_damaged_checkpoint_never_displaces_a_good_one(tmp_path):
    folder_with(tmp_path, 1, 2, 3, 4)
    empty(tmp_path / "step-00000003" / DATA)
    empty(tmp_path / "step-00000004" / DATA)
    lines = []
    checkpoints.keep(tmp_path, 1, log=lines.append)
    assert checkpoints.list_steps(tmp_path) == [2, 3, 4]
    assert len(lines) == 2
    for line in lines:  # the folder once, then the reason
        assert re.fullmatch(f"kept {tmp_path}/step-0000000.: {DATA}: .*", line)
    assert_restores(tmp_path, 2)


def test_nothing_more_is_removed_where_the_check_before_it_fails(tmp_path):
    folder_with(tmp_path, 1, 2, 3, 4)
    checks = iter([None, RunFolderError("gone")])

    def check():
        error = next(checks)
        if error:
            raise error

    with pytest.raises(RunFolderError):
        checkpoints.keep(tmp_path, 1, log=pytest.fail, before_removal=check)
    assert sorted(os.listdir(tmp_path)) == [f"step-0000000{i}" for i in (1, 2, 4)]
