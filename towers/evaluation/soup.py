"""Model soups: the mean of the parameters of several runs (Wortsman et al. 2022,
arXiv:2203.05482)."""

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

from towers import console
from towers.config import to_json
from towers.errors import CheckpointError, ConfigError
from towers.evaluation.restored import read_checkpoint
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.reports import Reports
from towers.run.restore import validate_architecture
from towers.run.stored_config import stored_config


def average(
    workdirs: Sequence[str | os.PathLike],
    workdir: str | os.PathLike,
    *,
    step: int | str = "best",
) -> None:
    """Writes the run folder of a network whose parameters, moving averages and float
    state are the means over several runs. It is evaluated, predicts and is exported as
    any other.

    Args:
        workdirs: folders of runs of one network on the same classes, which started from
            the same weights; otherwise the mean is of no use.
        workdir: a new folder.
        step: of the checkpoints, as of `load_run`.

    Raises:
        ConfigError: the runs differ in classes, preprocessing or network, or the folder
            has a run.
    """
    if len(workdirs) < 2:
        raise ConfigError(f"average={','.join(map(str, workdirs))}: give several runs")
    folders = [RunFolder(x) for x in workdirs]
    checkpoints = [read_checkpoint(folder, step) for folder in folders]
    first, config = checkpoints[0], stored_config(folders[0], step)
    infos = [
        DatasetInfo.from_values(x.trainer_state["dataset_info"]) for x in checkpoints
    ]
    for folder, checkpoint, info in zip(folders, checkpoints, infos, strict=True):
        own = dataclasses.replace(info, num_train=None, checksum=None)
        if own != dataclasses.replace(infos[0], num_train=None, checksum=None):
            raise ConfigError(
                f"{folder.path} has other classes or preprocessing than "
                f"{folders[0].path}"
            )
        try:
            validate_architecture(first.tensors, checkpoint.tensors)
        except CheckpointError as error:
            raise ConfigError(f"{folder.path} and {folders[0].path}: {error}") from None
    starts = {stored_config(folder, step).init_from for folder in folders}
    if starts == {""} or len(starts) > 1:
        console.warn(
            "the runs do not start from the same weights (--init_from), without which "
            "a mean of parameters is seldom of use"
        )
    tensors = {}
    for name, value in first.tensors.items():
        if value.dtype.kind not in "biu":
            each = [x.tensors[name].astype(np.float64) for x in checkpoints]
            value = np.mean(each, 0).astype(value.dtype)
        tensors[name] = value
    folder = RunFolder(workdir)
    folder.create()
    with folder.lock() as lock:
        if Checkpointer(folder.checkpoints).steps():
            raise ConfigError(f"workdir={workdir} has a run; choose another folder")
        state = first.trainer_state | {"best": None, "open_record": None}
        checkpointer = Checkpointer(
            folder.checkpoints, assert_same_folder=lock.assert_same_folder
        )
        checkpointer.save(Snapshot(first.step, tensors, state))
        with Reports(folder, "eval") as reports:
            reports.file(folder.config, to_json(config))
            reports.file(folder.dataset_info, infos[0].to_json())
        if folders[0].network.exists():
            folder.write_network(folders[0].network.read_text())
    console.line(f"the mean of {len(folders)} runs is in {folder.path}")
