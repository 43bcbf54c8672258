"""The one seam to the disk: whole or not at all, also after a power cut.

The operations are recorded and replayed into all that a disk may hold, see `disk`.
"""

import contextlib
import os
import random
import resource

import pytest
from engines.disk import Disk, read_tree
from engines.file_recorder import Recorder, crash_states

from towers import store

OLD, NEW = b"the old content", b"the new one, longer"


def contents_after_power_cuts(folder, act, content_of):
    """What may be read after a power cut during `act`; after it that is NEW."""
    states = [{content_of(x) for x in y} for y in crash_states(folder, act, 2000)]
    assert states[-1] == {NEW}
    return set.union(*states)


def test_a_file_is_the_old_or_the_new_one(tmp_path):
    (tmp_path / "file").write_bytes(OLD)

    def act():
        store.write_aside(tmp_path / "file", NEW)

    contents = contents_after_power_cuts(tmp_path, act, lambda tree: tree["file"])
    assert contents == {OLD, NEW}


def test_a_folder_is_the_old_one_or_gone_or_the_new_one(tmp_path):
    """A folder is not replaced in one piece."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(OLD)

    def act():
        with store.aside(tmp_path / "folder") as temporary:
            temporary.mkdir()
            (temporary / "file").write_bytes(NEW)

    def content_of(tree):
        return tree["folder/file"] if "folder" in tree else None

    contents = contents_after_power_cuts(tmp_path, act, content_of)
    assert contents == {OLD, None, NEW}
    assert os.listdir(tmp_path) == ["folder"]


@pytest.mark.row(53)
def test_what_others_put_into_a_folder_is_kept_at_every_moment(tmp_path):
    (tmp_path / "folder" / "below" / "deep").mkdir(parents=True)
    for name in ("file", "mine", "below/deep/mine"):
        (tmp_path / "folder" / name).write_bytes(OLD)

    def act():
        with store.aside(tmp_path / "folder") as new:
            (new / "below").mkdir(parents=True)
            (new / "file").write_bytes(NEW)
            kept = store.keep_others(tmp_path / "folder", new)
        assert kept == [tmp_path / "folder/below/deep", tmp_path / "folder/mine"]

    def content_of(tree):
        folders = [x for x in tree if x in ("folder", ".tmp-replaced-folder")]
        for name in ("mine", "below/deep/mine"):
            assert OLD in {tree.get(f"{folder}/{name}") for folder in folders}
        return tree.get("folder/file")

    contents = contents_after_power_cuts(tmp_path, act, content_of)
    assert {OLD, NEW} <= contents and os.listdir(tmp_path) == ["folder"]


def test_after_an_error_the_old_one_stays_and_nothing_else(tmp_path):
    (tmp_path / "file").write_bytes(OLD)

    def write(name):
        with store.aside(tmp_path / name) as temporary:
            temporary.write_bytes(NEW)
            raise KeyError

    for name, error in ("file", KeyError), ("absent/file", FileNotFoundError):
        with pytest.raises(error):
            write(name)
    assert read_tree(tmp_path) == {"file": OLD}


def test_what_is_removed_loses_its_name_first(tmp_path):
    (tmp_path / "folder" / "below").mkdir(parents=True)
    (tmp_path / "folder" / "below" / "file").touch()
    with Recorder(tmp_path) as recorder:
        store.remove(tmp_path / "folder")
    assert recorder.operations[0] == ("rename", "folder", ".tmp-removed-folder")
    assert not os.listdir(tmp_path)


def test_all_is_appended_or_nothing(tmp_path):
    """The file may not grow beyond 100 bytes."""
    path, lines = tmp_path / "log", []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        for number in range(30):
            line = f"{number}: {'x' * 7}\n".encode()
            with contextlib.suppress(OSError):
                store.append(path, line)
                lines.append(line)
            assert path.read_bytes() == b"".join(lines)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert 5 < len(lines) < 30
    store.append(path, b"more\n")
    assert path.read_bytes() == b"".join([*lines, b"more\n"])


# The states of a disk after a power cut, by hand.


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
