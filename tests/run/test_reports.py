"""Reports that cannot be written."""

import errno
import os
import shutil

import pytest
from boards import read_board

from towers import store
from towers.errors import RunFolderError
from towers.run.folder import RunFolder
from towers.run.records import Reports


@pytest.mark.row(35)
def test_row_35_on_a_full_disk_curves_are_lost_and_others_are_not(small_disk, capsys):
    folder = RunFolder(small_disk)
    with Reports(folder, "train") as reports:
        reports.scalars(1, {"loss": 0.5})
        (small_disk / "fill").write_bytes(bytes(shutil.disk_usage(small_disk).free))
        for step in range(2, 202):
            reports.scalars(step, {"loss": 0.5, "accuracy": 0.25})
        (small_disk / "fill").unlink()
        reports.scalars(300, {"loss": 0.125})
    curve = read_board(folder.tensorboard, "train")["curves/loss"]
    assert curve[0] == (1, 0.5) and curve[-1] == (300, 0.125)
    first, last = capsys.readouterr().out.splitlines()
    assert "warning: TensorBoard cannot be written: No space left on device" in first
    lost = 202 - len(curve)
    assert lost > 100
    assert last == f"TensorBoard can be written again; {lost} report(s) are lost"


@pytest.mark.row(35)
def test_row_35_what_is_lost_is_told(tmp_path, monkeypatch, capsys):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "write_aside", full)
    with Reports(RunFolder(tmp_path), "train") as reports:
        reports.open_metrics(0, 0)
        for step in (1, 2, 3):
            reports.record({"step": step})
            reports.sync()
        assert [record["step"] for record in reports.records()] == [1, 2, 3]
        reports.file(tmp_path / "config.json", "{}")
    first, second, third, last = capsys.readouterr().out.splitlines()
    assert "warning: metrics.jsonl cannot be written: No space left" in first
    assert "bytes are free" in first and "config.json cannot" in second
    assert "warning: 1 report(s) in config.json" in third
    assert "warning: 3 report(s) in metrics.jsonl" in last


@pytest.mark.row(36)
def test_row_36_nothing_is_written_in_the_folder_of_another_run(tmp_path, capsys):
    def check():
        raise RunFolderError("it was replaced")

    with Reports(RunFolder(tmp_path), "train", check) as reports:
        reports.open_metrics(0, 0)
        reports.record({"step": 1})
        reports.scalars(1, {"loss": 0.5})
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().out
