"""The continuation of a run from its newest checkpoint."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from towers import console
from towers.config import (
    Config,
    changed_mathematics,
    check_names,
    factories,
    from_values,
)
from towers.data.sources import DataSet
from towers.errors import CheckpointError, ConfigError
from towers.parallel.trainer import Trainer
from towers.run.checkpoint import Checkpoint, Tensors
from towers.run.checkpointer import Checkpointer
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.initial import start_from
from towers.run.progress import Progress
from towers.run.standardization import with_resize_of_weights

# Maximum number of options that are listed with both values.
MAX_LISTED = 6

# What was given in Python, and is given again, and differs.
_GIVEN_ANEW = {
    "dataset": "data has other images, labels, weights or class_names (a tf.data."
    "Dataset should repeat them: leave random augmentation to the config)",
    "model": "model has other layers",
}


def checkpointer_of(
    folder: RunFolder, log: Callable[[str], None] = console.line, **options
) -> Checkpointer:
    """The Checkpointer of a run, which says each line once."""
    log = functools.cache(log)
    return Checkpointer(folder.checkpoints, log, validate_run_state, **options)


def validate_run_state(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a run cannot go on with a trainer state."""
    state = checkpoint.run_state
    try:
        from_values(state["config"])
        DatasetInfo.from_values(state["dataset_info"])
        Progress.from_json(state)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: its run state is invalid: {error!r}"
        ) from error


def validate_changes(
    config: Config,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    allow_change: tuple[str, ...],
) -> None:
    """Raise ConfigError if options differ from the checkpoint's and may not."""
    check_names(
        allow_change, "--allow_change takes names of options, with commas between, and "
    )
    if checkpoint is None:
        return
    trained = from_values(checkpoint.run_state["config"])
    config = with_resize_of_weights(config, checkpoint)
    changed = changed_mathematics(trained, config)
    refused = {k: v for k, v in changed.items() if k not in allow_change}
    messages = {k: f"{k} was {x!r} and is {y!r}" for k, (x, y) in refused.items()}
    for name, text in _GIVEN_ANEW.items():
        if name in refused and trained.choice_of(name).is_given:
            if not config.choice_of(name).is_given:
                raise factories.asks_for(name, refused[name][0])
            messages[name] = text
    if refused:
        listed = ", ".join([*messages.values()][:MAX_LISTED])
        if (more := len(messages) - MAX_LISTED) > 0:
            listed += f", and {more} more differ"
        raise ConfigError(
            f"{folder.path} holds another run: {listed}. Choose another --workdir, "
            f"start again with --overwrite, or --allow_change={','.join(refused)}"
        )


def validate_dataset(
    data: DataSet, checkpoint: Checkpoint | None, allow_change: tuple[str, ...]
) -> None:
    """Raise ConfigError for other classes, or data that may not change."""
    if checkpoint is None:
        return
    info = DatasetInfo.from_values(checkpoint.run_state["dataset_info"])
    if difference := info.class_difference(DatasetInfo.of(data)):
        folder = checkpoint.path.parent.parent
        raise ConfigError(
            f"not the data set of the run: {difference}. For other classes start a new "
            f"run from this one: --init_from={folder} --workdir=NEW_FOLDER"
        )
    if {"dataset", "data_dir"} & set(allow_change):
        return
    if {"init_from", "standardize"} & set(allow_change):
        info = dataclasses.replace(info, mean=data.mean, std=data.std)
    info.validate_training(data)


def validate_architecture(model: Tensors, saved: Tensors) -> None:
    """Raise CheckpointError for the first tensor that differs, in order."""
    model, saved = (
        {name: f"{np.dtype(x.dtype).name} {list(x.shape)}" for name, x in each.items()}
        for each in (model, saved)
    )
    for ours, its in itertools.zip_longest(model, saved):
        if ours is not None and ours not in saved:
            problem = f"{ours} is in the model but not in the checkpoint"
        elif its is not None and its not in model:
            problem = f"{its} is in the checkpoint but not in the model"
        elif ours != its:
            problem = f"{ours} of the model stands where the checkpoint has {its}"
        elif model[ours] != saved[its]:
            problem = f"{ours} is {model[ours]} here, {saved[its]} in the checkpoint"
        else:
            continue
        kind = problem.partition("/")[0]
        other = {"slots": "optimizer", "averages": "ema_decay"}.get(kind, "model")
        raise CheckpointError(f"the checkpoint is of another {other}: {problem}")


def restore_fitting(tensors: Tensors, state: Tensors) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint as a trainer's state; CheckpointError if they
    are of another model. The loss scale and counts of skipped steps may be missing.
    """
    optional = "loss_scale/", "skipped/"
    validate_architecture(
        *(
            {name: x for name, x in each.items() if not name.startswith(optional)}
            for each in (state, tensors)
        )
    )
    return {name: tensors.get(name, value) for name, value in state.items()}


def load_trainer(
    trainer: Trainer,
    config: Config,
    checkpoint: Checkpoint | None,
    class_names: Sequence[str] = (),
) -> set[str]:
    """Load a checkpoint, or initial parameters; return variables without values."""
    if checkpoint is not None:
        trainer.load(restore_fitting(checkpoint.tensors, trainer.state()))
        scale_rate(trainer, config, checkpoint.run_state["num_plateaus"])
    elif config.init_from:
        return start_from(trainer, config.init_from, config.model, class_names)
    return set()


def scale_rate(trainer: Trainer, config: Config, num_plateaus: int) -> None:
    """Set a trainer's factor on the rate after `num_plateaus`."""
    if config.choice_of("schedule").by_accuracy:
        trainer.scale_rate(config.decay_factor**num_plateaus)
