"""A row of a table of choices: what is known of a network, an optimizer and so on."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from towers.config.preprocessing import Preprocessing


@dataclasses.dataclass(frozen=True)
class Choice:
    """One row of a table; most attributes are for the rows of one table."""

    help: str  # one line, without a full stop
    # Keyword arguments that the row fixes.
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # "module:function" in towers, "path/to/file.py:function", or a function of the
    # option's module, by default of the choice's own name; see `choices.target_of`.
    target: str = ""
    is_given: bool = False  # an object of a Python program, see `factories.give`

    # Containers of images, such as tar files.
    endings: tuple[str, ...] = ()  # of file names
    numbered: str = ""  # regular expression for other file names
    if_named: tuple[str, ...] = ()  # endings of files that --data_dir names

    standardizes_images: bool = False  # an augmentation, each image by itself

    # Networks.
    has_standardization: bool = False  # standardizes images by its own mean and std
    pretrained: Preprocessing | None = None  # of published weights
    num_params: int = 0  # for 10 classes of 32x32x3 images, `cnn` of 24x24x3

    # Optimizers.
    scale_free: bool = False  # the step does not depend on the scale of the gradients
    sums: bool = False  # adds up elements of a parameter
    whole_parameters: bool = False  # needs all elements of a parameter

    # Learning rate schedules.
    by_length: bool = False  # the shape depends on --num_epochs
    by_accuracy: bool = False  # evaluations lower the rate
    warms_up: bool = False  # --warmup_epochs=-1 is a warm-up

    # Strategies.
    asynchronous: bool = False  # each tower applies its own gradients at once
    trainer_options: tuple[str, ...] = ()  # options that its trainer reads
    processes: bool = False  # several processes may train together
    sharded: bool = False  # no device holds a whole kernel

    @property
    def is_in_a_file(self) -> bool:
        """Return whether the target is a function of a user's file."""
        return re.fullmatch(r".+\.py:\w+", self.target) is not None

    def matches(self, path: str) -> bool:
        """Return whether a file, or the last of a pattern, has such a name."""
        is_numbered = self.numbered and re.search(self.numbered, path)
        return bool(is_numbered) or path.lower().endswith(self.endings)

    def reads(self, path: str) -> bool:
        """Return whether a file that --data_dir names has such a name."""
        return self.matches(path) or path.lower().endswith(self.if_named)
