"""Config, which describes a run: one frozen, flat dataclass, stored as JSON.

Its fields are in `towers/config/options/`, a dataclass for each group of them. The
field's default is the lowest of three layers; a recipe in `configs/`, or the config
of the run that is continued, overrides it, and a flag overrides both. Where a run
happens (its folder, the addresses of a cluster) is not part of it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from towers.config import choices
from towers.config.checks import check_together
from towers.config.options import check_option
from towers.config.options.data import DataOptions
from towers.config.options.network import NetworkOptions
from towers.config.options.optimization import OptimizationOptions
from towers.config.options.parallelism import ParallelismOptions
from towers.config.options.run import RunOptions
from towers.config.synonyms import suggestion
from towers.errors import ConfigError


# A dataclass takes the fields of its last base first: --help and config.json begin with
# those of the data.
@dataclasses.dataclass(frozen=True)
class Config(
    RunOptions, ParallelismOptions, OptimizationOptions, NetworkOptions, DataOptions
):
    """Everything that says what a run is. The defaults are the tutorial's.

    Raises:
        ConfigError: a value has the wrong type, lies out of bounds, or contradicts
            another.
    """

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(
                self, field.name, check_option(field, getattr(self, field.name))
            )
        check_together(self)

    @property
    def images_per_step(self) -> int:
        """Images of one update."""
        return self.batch_size * self.accumulate_steps

    @property
    def devices_per_network(self) -> int:
        """Devices that hold one network together."""
        choice = choices.find("strategy", self.strategy)
        has_groups = choice.is_in_a_file or "sharded" in choice.traits
        return self.group_size if has_groups else 1


FIELDS: dict[str, dataclasses.Field] = {f.name: f for f in dataclasses.fields(Config)}


def non_defaults(config: Config) -> list[str]:
    """The names of the options that are not defaults, in the order of the fields."""
    return [n for n, field in FIELDS.items() if getattr(config, n) != field.default]


def changed_mathematics(stored: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Fields, with both values, whose change would make a resumed run another run."""
    changed = {}
    for name, field in FIELDS.items():
        before, after = getattr(stored, name), getattr(new, name)
        is_length = name == "num_epochs" and length_is_free(new)
        if before != after and not (field.metadata["free"] or is_length):
            changed[name] = (before, after)
    return changed


def length_is_free(config: Config) -> bool:
    """True if a run may be made longer without becoming another run."""
    return not depends_on_length(config.schedule) and not config.early_sizes


def depends_on_length(schedule: str) -> bool:
    """True if a schedule depends on the length of the run; assumed of one in a file."""
    choice = choices.find("schedule", schedule)
    return choice.is_in_a_file or "by_length" in choice.traits


def options_read_by(config: Config, option: str) -> dict[str, Any]:
    """The fields that are passed to the choice of an option, such as "optimizer"."""
    names = (name for name, f in FIELDS.items() if f.metadata["read_by"] == option)
    return {name: getattr(config, name) for name in names}


def check_names(names: Iterable[str], source: str = "") -> None:
    """Refuses names of which there is no option; `source` begins the message.

    Raises:
        ConfigError: names the nearest option.
    """
    for name in names:
        if name not in FIELDS:
            raise ConfigError(
                f"{source}there is no option {name!r}: {suggestion(name, FIELDS)}"
                "run_train.py --help lists them"
            )


def replace(config: Config, changes: Mapping[str, Any]) -> Config:
    """`dataclasses.replace` whose error names the nearest field."""
    check_names(changes)
    return dataclasses.replace(config, **changes)
