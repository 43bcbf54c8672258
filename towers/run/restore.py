"""The continuation of a run from its newest checkpoint."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from towers.config import FIELDS, Config, changed_mathematics, from_values
from towers.config.synonyms import suggestion
from towers.data.sources import DataSet
from towers.errors import CheckpointError, ConfigError
from towers.output import say
from towers.run import checkpoint_files, checkpoints
from towers.run.checkpoint_files import Checkpoint
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.initial import start_from
from towers.run.metrics import last_accuracy
from towers.run.run import Run
from towers.run.stopwatch import Stopwatch


def newest_checkpoint(
    folder: RunFolder,
    log: Callable[[str], None] = say,
    known: dict[str, tuple[Any, str]] | None = None,
) -> Checkpoint | None:
    """The newest valid checkpoint of a run, see `checkpoints.restore_latest`.

    Raises:
        CheckpointError: there are checkpoints and none is valid.
    """
    return checkpoints.restore_latest(
        folder.checkpoints, log, check_trainer_state, known
    )


def check_trainer_state(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError where a run cannot be continued with what a checkpoint
    stores besides the tensors."""
    state = checkpoint.trainer_state
    try:
        from_values(state["config"])
        dataset_info_of(state)
        best, unfinished = state["best"], state.get("unfinished")
        steps = [record["step"] for record in state.get("unwritten", ())]
        numbers = [
            state["images_seen"],
            *dataclasses.asdict(stopwatch_of(state)).values(),
        ]
        if best is not None:
            steps.append(best["step"])
            numbers.append(best["accuracy"])
        if unfinished:
            steps.append(unfinished["step"])
            for value in unfinished.values():
                np.asarray(value, np.float64)
        if not all(type(step) is int and 0 <= step < 2**63 for step in steps):
            raise ValueError(f"not all of {steps} are steps")
        # JSON also has numbers beyond any type, NaN and infinity.
        if not all(type(x) in (int, float) and abs(x) < 2**63 for x in numbers):
            raise ValueError(f"not all of {numbers} are finite numbers")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: its trainer state is not that of a run: {error!r}"
        ) from error


def dataset_info_of(trainer_state: Mapping[str, Any]) -> DatasetInfo | None:
    """Classes and preprocessing of the data set; None in a checkpoint of a run that was
    trained before they were stored. ConfigError where they are no such values."""
    values = trainer_state.get("dataset_info")
    return None if values is None else DatasetInfo.from_values(values)


def stopwatch_of(trainer_state: Mapping[str, Any]) -> Stopwatch:
    """The Stopwatch of a run; what an older run did not measure is zero."""
    names = [field.name for field in dataclasses.fields(Stopwatch)]
    return Stopwatch(**{n: trainer_state[n] for n in names if n in trainer_state})


def check_changes(
    config: Config,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    allow_change: tuple[str, ...],
) -> None:
    """Refuses to continue a run with options that would make it another run.

    Args:
        config: of the command.
        folder: of the run.
        checkpoint: to continue from; its own config decides, not config.json.
        allow_change: options that may differ.

    Raises:
        ConfigError: the options are listed.
    """
    for name in allow_change:
        if name not in FIELDS:
            raise ConfigError(
                f"--allow_change={name}: there is no such option; "
                + suggestion(name, FIELDS).strip()
            )
    if checkpoint is None:
        return
    trained = from_values(checkpoint.trainer_state["config"])
    changed = changed_mathematics(trained, config)
    refused = {k: v for k, v in changed.items() if k not in allow_change}
    if refused:
        listed = ", ".join(
            f"{name} was {before!r} and is {after!r}"
            for name, (before, after) in refused.items()
        )
        raise ConfigError(
            f"{folder.path} holds another run: {listed}. Choose another --workdir, "
            f"start again with --overwrite, or --allow_change={','.join(refused)}"
        )


def check_dataset(
    data: DataSet, checkpoint: Checkpoint | None, allow_change: tuple[str, ...]
) -> None:
    """Refuses to continue a run with another data set, unless "dataset" or "data_dir"
    may change.

    Raises:
        ConfigError: what differs.
    """
    if checkpoint is None or {"dataset", "data_dir"} & set(allow_change):
        return
    info = dataset_info_of(checkpoint.trainer_state)
    if info is not None:
        info.check_training(data)


def load_values(run: Run, checkpoint: Checkpoint | None) -> None:
    """Continues from a checkpoint; without one, starts from the parameters that
    `init_from` names, if any."""
    if checkpoint is not None:
        stored = checkpoint.trainer_state
        run.trainer.load(
            checkpoint_files.restore_fitting(checkpoint.tensors, run.trainer.state())
        )
        run.step = run.saved_step = checkpoint.step
        run.best, run.pending_record = stored["best"], stored.get("unfinished")
        run.stopwatch = stopwatch_of(stored)
        say(f"restored step {run.step} from {checkpoint.path}")
    elif run.config.init_from:
        start_from(run)


def open_metrics(run: Run, checkpoint: Checkpoint | None) -> None:
    """Continues the metrics of a run where the checkpoint has them."""
    unwritten = checkpoint.trainer_state.get("unwritten", []) if checkpoint else []
    # A step whose record is unfinished is evaluated and logged once more.
    run.reports.open_metrics(run.step - bool(run.pending_record), unwritten)
    run.accuracy = last_accuracy(run.folder.metrics, run.step)
