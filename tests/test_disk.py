"""The states of a disk after a power cut are those that POSIX allows, by hand."""

import os
import random

from engines.disk import Disk, read_tree, write_tree
from engines.file_recorder import Recorder


def states(operations, most=10**6):
    disk = Disk()
    for kind, *args in operations:
        getattr(disk, kind)(*args)
    return {frozenset(t.items()) for t in disk.crash_states(random.Random(0), most)}


def each(*trees):
    return {frozenset(tree.items()) for tree in trees}


def test_a_synced_file_may_lack_its_name_and_a_synced_name_its_content():
    written = [("create", "f"), ("write", "f", b"x")]
    assert states([*written, ("sync", "f")]) == each({}, {"f": b"x"})
    assert {} not in map(dict, states([*written, ("sync", "")]))
    assert states([*written, ("sync", "f"), ("sync", "")]) == each({"f": b"x"})


def test_recorded_operations_lead_to_the_same_files(tmp_path):
    with Recorder(tmp_path) as recorder:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "f").write_text("one")
        with open(tmp_path / "a" / "f", "a") as file:
            file.write("two")
            file.flush()
            os.fsync(file.fileno())
        os.rename(tmp_path / "a", tmp_path / "b")
        (tmp_path / "b" / "g").touch()
        (tmp_path / "b" / "g").unlink()
    assert recorder.operations == [
        ("mkdir", "a"),
        ("create", "a/f"),
        ("write", "a/f", b"one"),
        ("write", "a/f", b"onetwo"),
        ("sync", "a/f"),
        ("rename", "a", "b"),
        ("create", "b/g"),
        ("remove", "b/g"),
    ]
    disk = Disk()
    for kind, *args in recorder.operations:
        getattr(disk, kind)(*args)
    assert disk.tree() == read_tree(tmp_path)
    write_tree(tmp_path / "copy", disk.tree())
    assert read_tree(tmp_path / "copy") == disk.tree()
