"""The state of a run in its checkpoints: validation, and comparison with a model."""

import functools
import itertools
from collections.abc import Callable

import numpy as np

from towers import console
from towers.config import from_values
from towers.errors import CheckpointError
from towers.run.checkpoint import Checkpoint, Tensors
from towers.run.checkpointer import Checkpointer
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.progress import Progress


def checkpointer_of(
    folder: RunFolder, log: Callable[[str], None] = console.line, **options
) -> Checkpointer:
    """Return the Checkpointer of a run, which logs each line once."""
    log = functools.cache(log)
    return Checkpointer(folder.checkpoints, log, validate_run_state, **options)


def validate_run_state(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a run cannot continue from the run state."""
    state = checkpoint.run_state
    try:
        from_values(state["config"])
        DatasetInfo.from_values(state["dataset_info"])
        Progress.from_json(state)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: its run state is invalid: {error!r}"
        ) from error


def validate_architecture(model: Tensors, saved: Tensors) -> None:
    """Raise CheckpointError for the first tensor that differs, in order."""
    here, there = (
        {name: f"{np.dtype(x.dtype).name} {list(x.shape)}" for name, x in each.items()}
        for each in (model, saved)
    )
    for ours, its in itertools.zip_longest(here, there, fillvalue=""):
        if ours and ours not in there:
            problem = f"{ours} is in the model but not in the checkpoint"
        elif its and its not in here:
            problem = f"{its} is in the checkpoint but not in the model"
        elif ours != its:
            problem = f"{ours} of the model is at the place of {its} in the checkpoint"
        elif here[ours] != there[its]:
            problem = f"{ours} is {here[ours]} here, {there[its]} in the checkpoint"
        else:
            continue
        kind = problem.partition("/")[0]
        other = {"slots": "optimizer", "averages": "ema_decay"}.get(kind, "model")
        raise CheckpointError(f"the checkpoint is of another {other}: {problem}")


def restore_fitting(tensors: Tensors, state: Tensors) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint as a trainer's state."""
    optional = "loss_scale/", "skipped/"
    validate_architecture(
        *(
            {name: x for name, x in each.items() if not name.startswith(optional)}
            for each in (state, tensors)
        )
    )
    return {name: tensors.get(name, value) for name, value in state.items()}
