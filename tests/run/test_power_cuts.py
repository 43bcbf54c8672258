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
import tempfile
from collections.abc import Iterator

import pytest
import small_runs
from engines.disk import Disk, Tree, write_tree
from engines.file_recorder import Operation, Recorder
from marks import slow
from small_runs import small_config

from towers.config import Config
from towers.errors import ConfigError
from towers.run.checkpointer import Checkpointer
from towers.run.folder import RunFolder
from towers.run.records import MetricsFile
from towers.run.restore import checkpointer_of
from towers.training.restore import validate_changes
from towers.training.train import train

WORKDIR = "runs/mine"  # neither of the folders exists before
CHECKPOINTS = f"{WORKDIR}/checkpoints"

RUN = {
    "log_every_steps": 1,
    "checkpoint_every_steps": 3,
    "keep_checkpoints": 2,
    "num_epochs": 2.0,
}


pytestmark = pytest.mark.usefixtures("small")


def recorded_training(root: pathlib.Path, *configs: Config) -> list[Operation]:
    """Train, and continue with each further Config; return the file operations.

    ("said", step) is an operation after each save.
    """
    recorder = Recorder(root, leave_out=("tensorboard",))
    save = Checkpointer.save

    def saying(checkpointer, snapshot):
        save(checkpointer, snapshot)
        recorder.say(snapshot.step)

    with pytest.MonkeyPatch.context() as patch, recorder:
        patch.setattr(Checkpointer, "save", saying)
        for config in configs:
            train(root / WORKDIR, config)
    return recorder.operations


@dataclasses.dataclass(frozen=True)
class Saved:
    """What of a run must be there after a power cut."""

    lines: list[dict]  # of metrics.jsonl, in the whole run
    # Steps of committed checkpoints that the run has not begun to remove.
    said: set[int] = dataclasses.field(default_factory=set)
    # Step -> the files of the checkpoint when it was renamed.
    contents: dict[int, Tree] = dataclasses.field(default_factory=dict)

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


def crash_states(
    operations: list[Operation], lines: list[dict], most: int
) -> Iterator[tuple[Tree, Saved]]:
    """Yield each state of the disk after a power cut, and what had been saved by then.

    The power is cut before each operation and at the end; `most` states are tried each
    time, see `Disk.crash_states`.
    """
    disk, saved = Disk(), Saved(lines)
    rng, known = random.Random(0), set()
    for kind, *args in [*operations, ("said", None)]:
        for tree in disk.crash_states(rng, most):
            key = hash((frozenset(tree.items()), frozenset(saved.said)))
            if key not in known:
                known.add(key)
                yield tree, saved
        if kind == "said":
            saved.said.update(step for step in args if step)
            continue
        if kind == "rename":
            saved.rename(*args, disk.tree())
        getattr(disk, kind)(*args)


def recover_from_all(states, config: Config, scratch: pathlib.Path) -> int:
    """Recover from each state in its own folder; return their number."""
    number = 0
    for number, (tree, saved) in enumerate(states, 1):
        root = scratch / str(number)
        write_tree(root, tree)
        try:
            recover(root / WORKDIR, config, tree, saved)
        except BaseException as error:
            sizes = {k: v if v is None else len(v) for k, v in tree.items()}
            error.add_note(f"state {number}: said {saved.said}, on the disk {sizes}")
            raise
        shutil.rmtree(root)
    return number


def recover(workdir: pathlib.Path, config: Config, tree: Tree, saved: Saved) -> None:
    """Do what `train` does at its start; fail if something is lost or wrong."""
    for step in saved.said:
        name = f"{CHECKPOINTS}/step-{step:08d}"
        assert below(tree, name) == saved.contents[step], f"{name} is lost"
    folder = RunFolder(workdir)
    folder.create()
    with folder.lock():
        checkpointer = checkpointer_of(folder, log=list)
        restored = checkpointer.read()
        validate_changes(config, folder, restored, ())
        checkpointer.remove_leftovers()
        step = restored.step if restored else 0
        assert step >= max(saved.said, default=0)
        if restored:
            files = {p.name: p.read_bytes() for p in restored.path.iterdir()}
            assert files == saved.contents[step]
            other = dataclasses.replace(config, seed=config.seed + 1)
            with pytest.raises(ConfigError, match="seed"):
                validate_changes(other, folder, restored, ())
        MetricsFile(folder.metrics, resume_step=step).flush()
        lines = small_runs.records(workdir) if folder.metrics.exists() else []
        assert lines == [line for line in saved.lines if line["step"] <= step]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run that is stopped and continued: Config, operations and lines."""
    root = tmp_path_factory.mktemp("disk")
    config = small_config(**RUN)
    with pytest.MonkeyPatch.context() as patch:
        small_runs.use(patch)
        stopped = dataclasses.replace(config, max_steps=5)
        operations = recorded_training(root, stopped, config)
    return config, operations, small_runs.records(root / WORKDIR)


@pytest.fixture
def scratch(tmp_path):
    """An empty folder, in memory where that can be; the recovery there is not cut."""
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        yield pathlib.Path(folder)


@pytest.mark.parametrize("most,expected", [(1, 60), slow(100, 4000)])
@pytest.mark.row(1, 32)
def test_row_1_after_a_power_cut_what_was_saved_is_there(
    recorded, scratch, most, expected
):
    config, operations, lines = recorded
    states = crash_states(operations, lines, most)
    num_states = recover_from_all(states, config, scratch)
    assert num_states > expected
