"""The continuation of a run from a checkpoint, or its start from trained weights."""

import dataclasses
from collections.abc import Sequence

from towers.config import (
    Config,
    changed_mathematics,
    check_names,
    factories,
    from_values,
)
from towers.data.sources import DataSet
from towers.errors import ConfigError
from towers.parallel.trainer import Trainer
from towers.pretrained.initial import start_from
from towers.pretrained.standardization import with_options_of_weights
from towers.run.checkpoint import Checkpoint
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.restore import restore_fitting

MAX_LISTED = 6  # maximum number of changed options in a message

# Messages about objects of a Python program that differ when they are given again.
_GIVEN_ANEW = {
    "dataset": "data has other images, labels, weights or class_names (a tf.data."
    "Dataset should repeat them: leave random augmentation to the config)",
    "model": "model has other layers",
}


def validate_changes(
    config: Config,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    allow_change: tuple[str, ...],
) -> None:
    """Raise ConfigError if options that may not change differ from the checkpoint's."""
    check_names(allow_change, "--allow_change takes names of options, by commas, and ")
    if checkpoint is None:
        return
    trained = from_values(checkpoint.run_state["config"])
    config = with_options_of_weights(config, checkpoint)
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
        way = "Choose another --workdir, start again with --overwrite, or "
        way += f"--allow_change={','.join(refused)}"
        raise ConfigError(f"{folder.path} holds another run: {listed}. {way}")


def validate_dataset(
    data: DataSet, checkpoint: Checkpoint | None, allow_change: tuple[str, ...]
) -> None:
    """Raise ConfigError for other classes, or for data that may not change."""
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


def load_trainer(
    trainer: Trainer,
    config: Config,
    checkpoint: Checkpoint | None,
    class_names: Sequence[str] = (),
) -> dict[str, Sequence[int]]:
    """Load a checkpoint or initial parameters; return `new` as `start_from`."""
    if checkpoint is not None:
        trainer.load(restore_fitting(checkpoint.tensors, trainer.state()))
        apply_plateau_decay(trainer, config, checkpoint.run_state["num_plateaus"])
    elif config.init_from:
        return start_from(trainer, config.init_from, config.model, class_names)
    return {}


def apply_plateau_decay(trainer: Trainer, config: Config, num_plateaus: int) -> None:
    """Set a trainer's factor on the rate after `num_plateaus`."""
    if config.choice_of("schedule").by_accuracy:
        trainer.set_rate_factor(config.decay_factor**num_plateaus)
