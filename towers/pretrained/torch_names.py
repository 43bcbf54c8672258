r"""Names and layouts of our variables in state dicts of PyTorch, in both directions.

A family of networks has `TORCH_NAMES` in its module, a table per program that writes
its files; exports use the first one. Rows map a regular expression, for the path of a
layer or of a variable that is not in KINDS, to the name of their module or parameter:

    TORCH_NAMES = (
        {
            r"stage(\d+)_block(\d+)_conv(\d)": r"layer\1.{\2-1}.conv\3",
            r"block(\d+)_key": r"blocks.{\1-1}.attn.qkv[1/3]",
            r"tokens/class_token": "cls_token",
        },
    )

`\1` is a group, `{\1-1}` a number counted from 0, `[1/3]` the second third of their
tensor along its first axis, and `[1x1]` a convolution there that is a dense layer here.
A network in FILE.py may have `TORCH_NAMES`, too.
"""

import collections
import inspect
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.config import factories

KINDS = {
    "kernel": "weight",
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}

# Ends of the paths of variables that have inputs and outputs in the other order.
TRANSPOSED = ("/kernel", "/attention_biases")

Table = Mapping[str, str]


class Place(NamedTuple):
    """A tensor of a state dict, or one of several equal parts of its first axis."""

    name: str
    part: int = 0
    parts: int = 1
    is_pixel: bool = False  # a kernel of shape [outputs, inputs, 1, 1]

    def part_of(self, values: np.ndarray) -> np.ndarray:
        """Return the part of a tensor, of a 1x1 convolution as a matrix."""
        values = values.reshape(values.shape[:2]) if self.is_pixel else values
        return np.split(values, self.parts)[self.part] if self.parts > 1 else values


def tables(model: str) -> Sequence[Table]:
    """Return the tables of a network, a value of --model; empty if it has none."""
    target = factories.resolve("model", model)
    module = inspect.getmodule(getattr(target, "func", target))
    choice = getattr(module, "TORCH_NAMES", ())
    return choice(getattr(target, "keywords", {})) if callable(choice) else choice


def place(variable: str, table: Table) -> Place | None:
    """Return the place of a variable, such as conv1/kernel, if it has one."""
    layer, _, last_name = variable.rpartition("/")
    for pattern, template in table.items():
        if match := re.fullmatch(pattern, variable):
            suffix = ""
        elif last_name in KINDS and (match := re.fullmatch(pattern, layer)):
            suffix = f".{KINDS[last_name]}"
        else:
            continue
        name = match.expand(template)
        name = re.sub(r"\{(\d+)-1\}", lambda x: str(int(x[1]) - 1), name)
        name, _, share = name.removesuffix("]").partition("[")
        if share == "1x1":
            return Place(name + suffix, is_pixel=last_name == "kernel")
        part, _, parts = share.partition("/")
        return Place(name + suffix, int(part or 0), int(parts or 1))
    return None


def places(
    variables: Iterable[str], choice: Sequence[Table], names: Iterable[str]
) -> tuple[dict[str, Place], Table]:
    """Return the places of variables by the table with most of the names, and it."""
    variables, names = list(variables), set(names)
    pairs: list[tuple[dict[str, Place], Table]] = [({}, {})]
    for table in choice:
        placed = {v: p for v in variables if (p := place(v, table)) and p.name in names}
        pairs.append((placed, table))
    return max(pairs, key=lambda pair: len(pair[0]))


def prefix(ours: Iterable[str], choice: Sequence[Table], names: Iterable[str]) -> str:
    """Return what wrappers, such as averages, put before the names of tensors."""
    ours = list(ours)
    ends = {p.name for table in choice for x in ours if (p := place(x, table))}
    counts: collections.Counter[str] = collections.Counter()
    for name in names:
        parts = name.split(".")
        tails = (".".join(parts[i:]) for i in range(len(parts)))
        counts.update(name.removesuffix(x) for x in tails if x in ends)
    most = max(counts.values(), default=0)
    if 2 * most < len(ours):  # another network
        return ""
    prefixes = [x for x, count in counts.items() if count == most]
    averages = [x for x in prefixes if "ema" in x or "average" in x]
    if len(averages or prefixes) > 1:
        listed = " and ".join(f"{x}*" for x in prefixes)
        raise ValueError(f"it has several networks, {listed}; save one of them alone")
    return (averages or prefixes or [""])[0]


def missing_variables(table: Table, ours: Container[str]) -> dict[str, str]:
    """Return the rows of single variables, such as tokens/class_token, we lack."""
    return {
        variable: name
        for variable, name in table.items()
        if "/" in variable and re.escape(variable) == variable and variable not in ours
    }


def shape_of_ours(shape: Sequence[int], variable: str, ours: Sequence[int]) -> tuple:
    """Return the shape of their tensor, or a part of it, in our layout.

    Axes of size 1 are placed as in our shape if the others agree: a depthwise kernel
    [c, 1, h, w] is [h, w, c, 1] or [h, w, 1, c] here.
    """
    shape = tuple(shape)
    if variable.endswith(TRANSPOSED):
        shape = (*shape[2:], *shape[1::-1])
    is_same = [x for x in shape if x != 1] == [x for x in ours if x != 1]
    return tuple(ours) if is_same else shape


def to_ours(values: np.ndarray, variable: str) -> np.ndarray:
    """Return their values with kernels in our order, [h, w, inputs, outputs]."""
    if variable.endswith(TRANSPOSED):
        return values.transpose((*range(2, values.ndim), 1, 0))
    return values


def state_dict(model: keras.Model, table: Table) -> dict[str, np.ndarray]:
    """Return the state dict of a network; KeyError if the table lacks a variable."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    for layer in model.layers:
        for variable in layer.weights:
            where, values = place(variable.path, table), variable.numpy()
            if where is None:
                raise KeyError(variable.path)
            if variable.path.endswith(TRANSPOSED):
                values = values.transpose((-1, -2, *range(values.ndim - 2)))
                if where.is_pixel:
                    values = values[..., None, None]
            elif values.ndim == 2:  # tokens, for all images of a batch
                values = values[None]
            parts.setdefault(where.name, {})[where.part] = values
    return {  # in C order, which safetensors needs
        name: np.concatenate(
            [np.ascontiguousarray(values[part]) for part in sorted(values)]
        )
        for name, values in parts.items()
    }


def is_resampled(
    shape: Sequence[int], ours: Sequence[int], grid: tuple[int, int]
) -> bool:
    """Return whether positions of a square of patches fit ours of another grid.

    Both may begin with the position of a class token.
    """
    if len(shape) != 3 or shape[0] != 1 or shape[2] != ours[1]:
        return False
    num_patches = shape[1] - (ours[0] - math.prod(grid))
    return num_patches > 0 and math.isqrt(num_patches) ** 2 == num_patches


def resample_positions(
    positions: np.ndarray, grid: tuple[int, int], num_tokens: int = 1
) -> np.ndarray:
    """Resample positions of class tokens and a square of patches, as timm does."""
    size = math.isqrt(len(positions) - num_tokens)
    patches = np.asarray(positions[num_tokens:], np.float32).reshape(size, size, -1)
    patches = tf.image.resize(patches, grid, "bicubic", antialias=True).numpy()
    patches = patches.reshape(math.prod(grid), -1)
    return np.concatenate([positions[:num_tokens], patches])
