"""Rows of the tables of choices: what is known of a network, an optimizer and so on."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from towers.config.preprocessing import Preprocessing


@dataclasses.dataclass(frozen=True)
class Choice:
    """One row of a table."""

    help: str  # one line, without a full stop
    # Keyword arguments that the row fixes.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # "module:function" in towers, "path/to/file.py:function", or a function of the
    # option's module, by default of the choice's own name; see `choices.target_of`.
    target: str = ""
    is_given: bool = False  # an object of a Python program, see `factories.give`

    @property
    def is_in_a_file(self) -> bool:
        return re.fullmatch(r".+\.py:\w+", self.target) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContainerRow(Choice):
    """A data set of images in containers, such as tar files."""

    # Of the names of its files.
    endings: tuple[str, ...]
    # Other names of its files, a regular expression.
    numbered: str = ""
    # Endings of files that are read if --data_dir names them.
    if_named: tuple[str, ...] = ()

    def matches(self, path: str) -> bool:
        """True if a file, or the last file of a pattern, has such a name."""
        is_numbered = self.numbered and re.search(self.numbered, path)
        return bool(is_numbered) or path.lower().endswith(self.endings)

    def reads(self, path: str) -> bool:
        """True if a file that --data_dir names has such a name."""
        return self.matches(path) or path.lower().endswith(self.if_named)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentRow(Choice):
    """An augmentation."""

    standardizes_images: bool = False  # each image by itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRow(Choice):
    """A network."""

    # Its images are standardized by its own mean and standard deviation.
    own_moments: bool = False
    # Of trained weights that others publish for it.
    pretrained: Preprocessing | None = None
    # For 10 classes of images of 32x32x3, of 24x24x3 for `cnn`.
    num_params: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerRow(Choice):
    """An optimizer."""

    scale_free: bool = False  # a step is as long, however long the gradients are
    # Its update adds up elements of a parameter; assumed of a function in a file.
    sums: bool = False
    whole_parameters: bool = False  # its update needs all elements of a parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleRow(Choice):
    """A schedule of the learning rate."""

    # Its shape depends on --num_epochs; assumed of a function in a file.
    by_length: bool = False
    by_accuracy: bool = False  # evaluations lower its rate
    warms_up: bool = False  # --warmup_epochs=-1 lets its rate rise first


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyRow(Choice):
    """A strategy."""

    asynchronous: bool = False  # each tower applies its own gradients at once
    trainer_options: tuple[str, ...] = ()  # the options that its trainer reads
    processes: bool = False  # several processes may train together
    sharded: bool = False  # no device holds a whole kernel
