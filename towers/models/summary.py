"""The size of a network: parameters layer by layer, activations and operations."""

import io
import itertools
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf
from keras import layers

from towers.models.layers.attention import Attention, Tokens
from towers.models.layers.core import LayerScale, SameConv2D
from towers.models.variables import variable_names
from towers.models.zoo.speedrun import Whitening

# Rows of a table; a longer one is folded.
MOST_ROWS = 24
_WIDTH = 80


class Row(NamedTuple):
    """One layer, or several."""

    name: str  # or "..."
    shapes: str  # of its parameters, or how many layers they are
    count: int  # of parameters
    num_frozen: int

    @property
    def status(self) -> str:
        if not self.num_frozen:
            return "trained"
        return "frozen" if self.num_frozen == self.count else "partly frozen"


def parameter_rows(model: keras.Model, frozen: Collection[str] = ()) -> list[Row]:
    """The layers that have parameters, in the order of the network; `frozen` are names
    of parameters that are not trained."""
    rows, names = [], variable_names(model.trainable_variables)
    pairs = list(zip(names, model.trainable_variables, strict=True))
    for layer, own in itertools.groupby(pairs, lambda x: x[0].rpartition("/")[0]):
        own = [(name, tuple(variable.shape)) for name, variable in own]
        shapes = " + ".join("x".join(map(str, shape)) or "1" for _, shape in own)
        sizes = {name: math.prod(shape) for name, shape in own}
        num_frozen = sum(size for name, size in sizes.items() if name in frozen)
        rows.append(Row(layer, shapes, sum(sizes.values()), num_frozen))
    return rows


def folded(rows: Sequence[Row], most: int = MOST_ROWS) -> list[Row]:
    """At most `most` rows: the middle ones are merged into one."""
    if len(rows) <= most:
        return list(rows)
    ends = (most - 1) // 2
    middle = rows[ends : len(rows) - ends]
    return [*rows[:ends], _merged("...", middle), *rows[len(rows) - ends :]]


def _merged(name, rows):
    count, num_frozen = (sum(r.count for r in rows), sum(r.num_frozen for r in rows))
    return Row(name, f"{len(rows)} layers", count, num_frozen)


def parameter_table(model: keras.Model, frozen: Collection[str] = ()) -> list[str]:
    """Lines of at most 80 characters: the `parameter_rows`, folded, and their sum."""
    from rich.console import Console
    from rich.table import Table

    rows = parameter_rows(model, frozen)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layer", no_wrap=True)
    table.add_column("parameters", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in folded(rows):
        table.add_row(row.name, row.shapes, f"{row.count:,}", row.status)
    total = _merged("total", rows)
    num_trained = total.count - total.num_frozen
    status = f"{num_trained:,} trained" if total.num_frozen else "trained"
    table.add_row("total", total.shapes, f"{total.count:,}", status)
    text = io.StringIO()
    Console(file=text, width=_WIDTH, color_system=None).print(table, markup=False)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def activation_bytes(model: keras.Model) -> int:
    """Bytes of the outputs of all layers for one image, in the types that they have:
    about what training keeps of it for the backward pass."""
    outputs = (keras.tree.flatten(layer.output) for layer in model.operations)
    return sum(
        math.prod(x.shape[1:]) * tf.as_dtype(x.dtype).size
        for x in itertools.chain.from_iterable(outputs)
    )


# Layers without products of inputs and parameters, or with a few per channel.
UNCOUNTED = (layers.BatchNormalization, layers.LayerNormalization, LayerScale, Tokens)

CONVOLUTIONS = (layers.Conv2D, layers.DepthwiseConv2D, layers.SeparableConv2D)


def flops_per_image(model: keras.Model) -> int:
    """Floating-point operations of the forward pass on one image.

    A multiplication and an addition per weight of a convolution or dense layer and per
    position of its output, padding counted like pixels, and so is what `SameConv2D` can
    leave out; and per channel for each pair of tokens in both products of attention;
    nothing else. Training takes about three times as much. ValueError where a layer has
    parameters and is of no kind that is counted.
    """
    return sum(_flops(layer) for layer in model.layers)


def _flops(layer):
    if isinstance(layer, (*CONVOLUTIONS, layers.Dense, Whitening)):
        # A kernel of a grouped convolution has the inputs of one group only.
        image = layer.input if isinstance(layer, SameConv2D) else layer.output
        positions = math.prod(image.shape[1:-1])
        kernels = [w for w in layer.weights if "kernel" in w.name]
        return 2 * positions * sum(math.prod(kernel.shape) for kernel in kernels)
    if isinstance(layer, Attention):
        tokens, channels = layer.output.shape[1:]
        return 2 * 2 * tokens**2 * channels
    if layer.weights and not isinstance(layer, UNCOUNTED):
        raise ValueError(
            f"layer {layer.name} ({type(layer).__name__}): its operations are not "
            "counted"
        )
    return 0
