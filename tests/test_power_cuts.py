"""The power fails at any moment of a training run; rows 1 and 32.

The file operations of a real run are recorded and replayed into what a disk may hold
after a power cut between any two of them, see `disk`. From each such state the run must
go on from the last checkpoint that it had committed, or a later one.
"""

import dataclasses
import os
import pathlib
import random
import shutil

import pytest
import small_runs
from disk import Disk, Tree, write_tree
from file_recorder import Operation, Recorder
from small_runs import small_config

from towers.config import Config
from towers.errors import ConfigError
from towers.run import checkpoints
from towers.run.folder import RunFolder
from towers.run.run import check_stored_config
from towers.run.summaries import MetricsFile
from towers.training import train

WORKDIR = "runs/mine"  # neither of the folders exists before
CHECKPOINTS = f"{WORKDIR}/checkpoints"

RUN = {
    "log_every_steps": 1,
    "checkpoint_every_steps": 3,
    "keep_checkpoints": 2,
    "num_epochs": 2.0,
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    small_runs.use(monkeypatch)


def recorded_training(root: pathlib.Path, *configs: Config) -> list[Operation]:
    """Trains, and continues with each further Config.

    Returns:
        The file operations below `root`; ("said", step) where a save has returned.
    """
    recorder = Recorder(root, leave_out=("tensorboard",))
    save = checkpoints.save

    def saying(folder, step, *args):
        path = save(folder, step, *args)
        recorder.say(step)
        return path

    with pytest.MonkeyPatch.context() as patch, recorder:
        patch.setattr(checkpoints, "save", saying)
        for config in configs:
            train(root / WORKDIR, config)
    return recorder.operations


@dataclasses.dataclass(frozen=True)
class Saved:
    """What of a run must be there after a power cut.

    Attributes:
        said: steps of committed checkpoints that the run has not begun to remove.
        contents: step -> the files of the checkpoint, as it was renamed.
        lines: of metrics.jsonl, in the whole run.
    """

    said: set[int] = dataclasses.field(default_factory=set)
    contents: dict[int, Tree] = dataclasses.field(default_factory=dict)
    lines: list[dict] = dataclasses.field(default_factory=list)

    def rename(self, old: str, new: str, tree: Tree) -> None:
        if self._step(new):
            self.contents[self._step(new)] = below(tree, old)
        self.said.discard(self._step(old))

    def _step(self, path):
        folder, _, name = path.rpartition("/step-")
        return int(name) if folder == CHECKPOINTS else None


def below(tree: Tree, folder: str) -> Tree:
    prefix = f"{folder}/"
    return {k.removeprefix(prefix): v for k, v in tree.items() if k.startswith(prefix)}


class PowerCuts:
    """Recovers from every state that a disk may be in.

    Args:
        scratch: an empty folder on a fast disk.
        config: of the run.
        lines: of its metrics.jsonl.
    """

    def __init__(self, scratch: pathlib.Path, config: Config, lines: list[dict]):
        self.num_states = 0
        self._scratch, self._config, self._lines = scratch, config, lines
        self._seen = set()

    def replay(self, operations: list[Operation], most: int, first: int = 0) -> None:
        """Cuts the power before each operation, from the `first` on, and at the end.

        Args:
            operations: see `recorded_training`.
            most: states that are tried per place, see `Disk.crash_states`.
            first: operations before it only happen.
        """
        disk, saved, rng = Disk(), Saved(lines=self._lines), random.Random(0)
        for place, (kind, *args) in enumerate([*operations, ("said", None)]):
            if place >= first:
                for tree in disk.crash_states(rng, most):
                    self._recover_once(tree, saved)
            if kind == "said":
                saved.said.update(step for step in args if step)
                continue
            if kind == "rename":
                saved.rename(*args, disk.tree())
            getattr(disk, kind)(*args)

    def _recover_once(self, tree, saved):
        key = (frozenset(tree.items()), frozenset(saved.said))
        if key in self._seen:
            return
        self._seen.add(key)
        root = self._scratch / str(self.num_states)
        write_tree(root, tree)
        try:
            recover(root / WORKDIR, self._config, tree, saved)
        except BaseException as error:
            listing = {k: v if v is None else len(v) for k, v in tree.items()}
            error.add_note(f"state {self.num_states}: said {saved.said}, {listing}")
            raise
        shutil.rmtree(root)
        self.num_states += 1


def recover(workdir: pathlib.Path, config: Config, tree: Tree, saved: Saved) -> None:
    """What `train` does at its start; raises where something is lost, or wrong."""
    for step in saved.said:
        name = f"{CHECKPOINTS}/step-{step:08d}"
        assert below(tree, name) == saved.contents[step], f"{name} is lost"
    folder = RunFolder(workdir)
    folder.create()
    with folder.lock():
        check_stored_config(config, folder, ())
        checkpoints.remove_leftovers(folder.checkpoints, log=lambda line: None)
        restored = checkpoints.restore_latest(folder.checkpoints, lambda line: None)
        step = restored.step if restored else 0
        assert step >= max(saved.said, default=0)
        if restored:
            files = {p.name: p.read_bytes() for p in restored.path.iterdir()}
            assert files == saved.contents[step]
            with pytest.raises(ConfigError, match="seed"):
                check_stored_config(
                    dataclasses.replace(config, seed=config.seed + 1), folder, ()
                )
        MetricsFile(folder.metrics, resume_step=step)
        lines = small_runs.records(workdir) if folder.metrics.exists() else []
        assert lines == [line for line in saved.lines if line["step"] <= step]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    root = tmp_path_factory.mktemp("disk")
    config = small_config(**RUN)
    with pytest.MonkeyPatch.context() as patch:
        small_runs.use(patch)
        stopped = dataclasses.replace(config, max_steps=5)
        operations = recorded_training(root, stopped, config)
    return config, operations, small_runs.records(root / WORKDIR)


def test_row_1_after_a_power_cut_what_was_saved_is_there(
    recorded, tmp_path, monkeypatch, count
):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # of the recovery itself
    config, operations, lines = recorded
    cuts = PowerCuts(tmp_path, config, lines)
    cuts.replay(operations, most=12)
    assert cuts.num_states > 300
    count("crash states replayed", cuts.num_states)
