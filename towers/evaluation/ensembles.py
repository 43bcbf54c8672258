"""Ensembles and averages of trained runs (model soups)."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from towers import console
from towers.build.restored import read_checkpoint
from towers.config import to_json
from towers.data.sources import checksum
from towers.errors import CheckpointError, ConfigError, NumericError
from towers.evaluation.split_predictions import SplitPredictions, predict_split
from towers.metrics.metrics import figures
from towers.metrics.predictions import LabelSets, Predictions, predictions_of_logits
from towers.metrics.results import table
from towers.parallel.copies import Weights
from towers.parallel.evaluator import Evaluation
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.records import Reports
from towers.run.restore import validate_architecture
from towers.run.stored_config import evaluation_config, stored_config


def evaluate_ensemble(
    workdirs: Sequence[str | os.PathLike],
    split: str = "test",
    *,
    step: int | str = "best",
    use_ema: bool | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Evaluate the mean probabilities of several runs, and print the figures.

    Args:
        workdirs: their folders, of the same images and classes.
        split: of `predict_split`.
        step: of `predict_split`.
        use_ema: of `predict_split`.
        **changes: options in place of the stored ones of each run, such as `device`.

    Returns:
        The metrics, see `metrics.metrics.figures`.

    Raises:
        ConfigError: the runs differ in classes or images.
        NumericError: a run gives probabilities that are not finite.
    """
    members = []
    for workdir in workdirs:
        config = evaluation_config(RunFolder(workdir), step, **changes)
        members.append(
            predict_split(workdir, split, config, step=step, use_ema=use_ema)
        )
    result = figures(mean_predictions(workdirs, members), members[0].class_names)
    for line in table(Evaluation({Weights.RAW: result}), {Weights.RAW: "ensemble"}):
        console.line(line)
    return result


def mean_predictions(
    workdirs: Sequence[str | os.PathLike], members: Sequence[SplitPredictions]
) -> Predictions | LabelSets:
    """Return the predictions from the mean probabilities of runs."""
    first, logs = members[0], []
    for workdir, member in zip(workdirs, members, strict=True):
        sums = {checksum(x.source) for x in (first, member)}
        is_same = np.array_equal(member.labels, first.labels)
        is_same &= len(sums) == 1 or None in sums
        if member.class_names != first.class_names or not is_same:
            what = "other classes or images"
            raise ConfigError(f"{workdir} has {what} than {workdirs[0]}")
        logits = member.logits.astype(np.float64)
        if not np.isfinite(logits).all():
            raise NumericError(f"{workdir}: its probabilities are not finite")
        # Logarithms, because probabilities close to 0 or 1 are rounded.
        if first.labels.ndim == 2:
            logs.append(-np.logaddexp(0, [-logits, logits]))
        else:
            logs.append(logits - np.logaddexp.reduce(logits, 1, keepdims=True))
    logits = np.logaddexp.reduce(logs)
    if first.labels.ndim == 2:
        logits = logits[0] - logits[1]
    return predictions_of_logits(logits, first.labels)


def average(
    workdirs: Sequence[str | os.PathLike],
    workdir: str | os.PathLike,
    *,
    step: int | str = "best",
) -> None:
    """Write a run folder with the mean parameters, averages and float state of runs.

    It is evaluated, predicts and is exported as any other (model soups, Wortsman et al.
    2022, arXiv:2203.05482).

    Args:
        workdirs: folders of runs of one network on the same classes, which started from
            the same weights; otherwise the mean is of no use.
        workdir: a new folder.
        step: of the checkpoints, see `load_run`.

    Raises:
        ConfigError: the runs differ in classes, preprocessing or network, or the folder
            has a run.
    """
    begin = f"average={','.join(map(str, workdirs))}"
    if len(workdirs) < 2:
        raise ConfigError(f"{begin}: give several runs")
    folders = [RunFolder(x) for x in workdirs]
    checkpoints = [read_checkpoint(folder, step) for folder in folders]
    configs, first = [stored_config(x, step) for x in folders], checkpoints[0]
    infos = [DatasetInfo.from_values(x.run_state["dataset_info"]) for x in checkpoints]
    for folder, checkpoint, info in zip(folders, checkpoints, infos, strict=True):
        both = f"{folder.path} and {folders[0].path}"
        count, checksum_ = infos[0].num_train, infos[0].checksum
        if dataclasses.replace(info, num_train=count, checksum=checksum_) != infos[0]:
            raise ConfigError(f"{both} have other classes or preprocessing")
        try:
            validate_architecture(first.tensors, checkpoint.tensors)
        except CheckpointError as error:
            raise ConfigError(f"{both}: {error}") from None
    # Without weights to start from, the seed draws them.
    if len({os.path.normpath(x.init_from or f"seed/{x.seed}") for x in configs}) > 1:
        why = "the runs start from different weights, so that their mean is near chance"
        way = "take --ensemble, or fine-tune runs from the same --init_from"
        raise ConfigError(f"{begin}: {why}; {way}")
    tensors = dict(first.tensors)
    for name, value in first.tensors.items():
        if value.dtype.kind not in "biu":
            each = [x.tensors[name].astype(np.float64) for x in checkpoints]
            tensors[name] = np.mean(each, 0).astype(value.dtype)
    folder = RunFolder(workdir)
    folder.create()
    with folder.lock() as lock:
        check = lock.assert_same_folder
        checkpointer = Checkpointer(folder.checkpoints, assert_same_folder=check)
        if checkpointer.steps():
            raise ConfigError(f"workdir={workdir} has a run; choose another folder")
        with Reports(folder, "eval") as reports:
            reports.file(folder.config, to_json(configs[0]))
            reports.file(folder.dataset_info, infos[0].to_json())
        if folders[0].network.exists():
            folder.write_network(folders[0].network.read_text())
        # Last: without a checkpoint the same command begins again.
        state = first.run_state | {"best": None, "open_record": None}
        checkpointer.save(Snapshot(first.step, tensors, state))
    console.line(f"the mean of {len(folders)} runs is in {folder.path}")
