"""The Config and the data set of a run, as its folder stores them."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from towers.config import Config, changed_mathematics, from_json, from_values
from towers.errors import ConfigError, RunFolderError
from towers.run.folder import RunFolder

if TYPE_CHECKING:
    from towers.run.dataset_info import DatasetInfo

T = TypeVar("T")

EVALUATION_BATCH_SIZE = 500
# Larger batches do not fit into the CPU caches.
PREDICTION_BATCH_SIZE = 64


def stored_config(folder: RunFolder, step: int | str = "last") -> Config:
    """Return the Config of the run in a folder, or raise a ConfigError.

    The checkpoint of the step, or else the newest, has the options that change the
    mathematics, config.json the others.
    """
    trained = _stored(folder, "config", from_values, step)
    config = trained or _config_of_file(folder)
    if trained is not None:
        # The file may be missing or damaged, or contradict the checkpoint.
        with contextlib.suppress(ConfigError):
            stored = _config_of_file(folder)
            changed = changed_mathematics(stored, trained)
            config = dataclasses.replace(
                stored, **{k: value for k, (_, value) in changed.items()}
            )
    if config.choice_of("model").is_given:
        from towers.models.keras import given

        given.give_stored(config.model, folder.network)
    return config


def stored_dataset_info(
    folder: RunFolder, step: int | str = "last"
) -> "DatasetInfo | None":
    """Return a run's data set from the checkpoint of a step, another, or the file."""
    from towers.run.dataset_info import DatasetInfo

    trained = _stored(folder, "dataset_info", DatasetInfo.from_values, step)
    if trained is not None:
        return trained
    try:
        return DatasetInfo.from_json(folder.dataset_info.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{folder.dataset_info}: {reason}; remove it") from None


def _stored(
    folder: RunFolder, key: str, parse: Callable[[Any], T], step: int | str = "last"
) -> T | None:
    """Call `Checkpointer.stored`; import TensorFlow only if there are checkpoints."""
    if not os.path.isdir(folder.checkpoints):
        return None
    from towers.run.checkpointer import Checkpointer

    return Checkpointer(folder.checkpoints).stored(key, parse, step)


def _config_of_file(folder):
    try:
        return from_json(folder.config.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{folder.config}: {error}") from None
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"{folder.path} holds no run: {folder.config.name} is missing; give "
            "the folder of a run as --workdir"
        ) from None
    except OSError as error:
        raise ConfigError(f"{folder.config}: {error.strerror or error}") from None


def config_to_continue(
    workdir: str | os.PathLike,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Config | None:
    """Return the Config of the run in a folder; None if it has none to continue."""
    folder = RunFolder(workdir)
    if os.path.isdir(folder.checkpoints):
        say(f"reading the run in {folder.path}")
    try:
        is_run = _stored(folder, "config", from_values) is not None
        is_run = is_run or os.path.exists(folder.config)
        return stored_config(folder) if is_run else None
    except (ConfigError, RunFolderError):
        if overwrite:
            return None
        raise


def evaluation_config(
    folder: RunFolder, step: int | str = "last", **changes: Any
) -> Config:
    """Return the stored Config with the settings of an evaluation, and changes."""
    settings: dict[str, Any] = {
        "device": "auto",
        "device_order": "",
        "parameter_device": "cpu",
        "all_reduce": "auto",  # no gradients are reduced
        "batch_size": EVALUATION_BATCH_SIZE,
        "num_towers": 0,
        "repeats": 1,
    }
    config = dataclasses.replace(stored_config(folder, step), **settings | changes)
    if "num_towers" not in changes and config.devices_per_network > 1:
        return dataclasses.replace(config, num_towers=config.devices_per_network)
    return config


def prediction_config(
    folder: RunFolder, step: int | str = "last", **changes: Any
) -> Config:
    """Return `evaluation_config` for predictions, a whole network per device."""
    changes = {"group_size": 1, "batch_size": PREDICTION_BATCH_SIZE, **changes}
    return evaluation_config(folder, step, **changes)
