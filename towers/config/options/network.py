"""Options of the network and of its arithmetic."""

import dataclasses

from towers.config import choices
from towers.config.options import option


@dataclasses.dataclass(frozen=True)
class NetworkOptions:
    """Network, precision and compiler."""

    model: str = option("cnn", f"Network: {choices.explained('model')}.", table="model")
    width: float = option(
        1.0, "Factor on the channels of every layer.", read_by="model", above=0
    )
    precision: str = option(
        "float32",
        "Arithmetic of the network; parameters, slots and sums stay float32. With "
        "float16 the loss is scaled, and a step that overflows is skipped.",
        choices=choices.PRECISIONS,
    )
    compile: str = option(
        "none",
        "xla: the forward and backward part of each tower is compiled as one, and "
        "on GPUs the update.",
        choices=("none", "xla"),
        free=True,
    )
