"""Rows of the tables of choices: what is known of a network, an optimizer and so on."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from towers.config.preprocessing import Preprocessing


@dataclasses.dataclass(frozen=True)
class Choice:
    """One row of a table.

    Attributes:
        target: "module:function", the module in towers, or "path/to/file.py:function".
        help: one line, without a full stop.
        options: keyword arguments that the row fixes.
        is_given: an object of a Python program, see `factories.give`.
    """

    target: str
    help: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    _: dataclasses.KW_ONLY
    is_given: bool = False

    @property
    def is_in_a_file(self) -> bool:
        return re.fullmatch(r".+\.py:\w+", self.target) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AugmentRow(Choice):
    """An augmentation.

    Attributes:
        standardizes_images: each image by itself.
    """

    standardizes_images: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRow(Choice):
    """A network.

    Attributes:
        own_moments: its images are standardized by its own mean and standard deviation.
        pretrained: the preprocessing of trained weights that others publish for it,
            None without such.
        num_params: its parameters for images of 32x32x3, of 24x24x3 for `cnn`, in 10
            classes.
    """

    own_moments: bool = False
    pretrained: Preprocessing | None = None
    num_params: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerRow(Choice):
    """An optimizer.

    Attributes:
        scale_free: a step is as long, however long the gradients are.
        sums: its update adds up elements of a parameter; assumed of a function in a
            file.
        whole_parameters: its update needs all elements of a parameter.
    """

    scale_free: bool = False
    sums: bool = False
    whole_parameters: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleRow(Choice):
    """A schedule of the learning rate.

    Attributes:
        by_length: its shape depends on --num_epochs; assumed of a function in a file.
        by_accuracy: evaluations lower its rate.
        warms_up: --warmup_epochs=-1 lets its rate rise first.
    """

    by_length: bool = False
    by_accuracy: bool = False
    warms_up: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyRow(Choice):
    """A strategy.

    Attributes:
        asynchronous: each tower applies its own gradients at once.
        trainer_options: the options that its trainer reads.
        processes: several processes may train together.
        sharded: no device holds a whole kernel.
    """

    asynchronous: bool = False
    trainer_options: tuple[str, ...] = ()
    processes: bool = False
    sharded: bool = False
