"""Phases of a run: progressive resizing and layer freezing.

All phases have the same parameters. Each is traced separately, so what its steps leave
out costs nothing. Functions refer to a phase by its number.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.errors import ConfigError
from towers.optim.schedules import exact


class Phase(NamedTuple):
    """Steps with one network and one set of frozen parameters, without gradients."""

    end_step: float  # first step after it; infinite for the last phase
    model: keras.Model  # the network for images of this phase's size
    frozen: frozenset[str] = frozenset()  # names of parameters


def create_phases(
    model: keras.Model,
    *,
    total_steps: int,
    early_sizes: Sequence[tuple[int, float]],
    freezing_steps: Mapping[str, int],
    create_model: Callable[[int, int], keras.Model],
) -> tuple[Phase, ...]:
    """Return the phases of a run; empty if it has one phase and nothing is frozen.

    `early_sizes` are (pixels of the shorter side, part of the run at which they end);
    `freezing_steps` name -> step from which a parameter is frozen; `create_model`
    height, width -> the network for such images.
    """
    early = [(math.floor(exact(p) * total_steps), size) for size, p in early_sizes]
    smaller = {
        size: _smaller_model(model, size, f"early_sizes={size}:{part:g}", create_model)
        for size, part in early_sizes
    }
    ends = {end for end, _ in early} | set(freezing_steps.values())
    phases, begin = [], 0.0
    for end in [*sorted(end for end in ends if 0 < end < total_steps), math.inf]:
        size = next((size for until, size in early if begin < until), 0)
        frozen = {name for name, since in freezing_steps.items() if since <= begin}
        phases.append(Phase(end, smaller.get(size, model), frozenset(frozen)))
        begin = end
    return tuple(phases) if len(phases) > 1 or phases[0].frozen else ()


def _smaller_model(model, size, source, create_model):
    full_size = image_size(model)
    height, width = (round(size * x / min(full_size)) for x in full_size)
    if size >= min(full_size):
        raise ConfigError(
            f"{source}: images of {'x'.join(map(str, full_size))} cannot be downscaled "
            f"to {height}x{width}"
        )
    try:
        smaller = create_model(height, width)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    for change, shapes, hint in (
        ("other parameters", _shapes_of_variables, "another --model or size"),
        ("dropout of another size", _shapes_of_noise, "no --dropout"),
    ):
        if shapes(smaller) != shapes(model):
            raise ConfigError(
                f"{source}: --model has {change} on images of {height}x{width}; choose "
                f"{hint}"
            )
    return smaller


def _shapes_of_variables(model):
    return [(v.path, v.shape) for v in model.variables]


def _shapes_of_noise(model):
    return [(x.name, x.shape) for x in model.inputs if x.name != "images"]


def phases_of(phases: Sequence[Phase], model: keras.Model) -> list[Phase]:
    """Return the phases, or the single one of a run without phases."""
    return list(phases) or [Phase(math.inf, model)]


def phase_at(phases: Sequence[Phase], step: int) -> int:
    """Return the number of the phase of a step, which is 0 for the first one."""
    return next(i for i, phase in enumerate(phases) if step < phase.end_step)


def steps_within(phases: Sequence[Phase], step: int, num_steps: int) -> tuple[int, int]:
    """Return the phase of a step, and how many of the next steps belong to it."""
    phase = phase_at(phases, step)
    return phase, int(min(num_steps, phases[phase].end_step - step))


def image_size(model: keras.Model) -> tuple[int, int]:
    """Return height and width of the images that a network takes."""
    [height_and_width] = [x.shape[1:3] for x in model.inputs if x.name == "images"]
    return tuple(height_and_width)


def resize_to_phase(
    batch: Mapping[str, tf.Tensor], model: keras.Model
) -> dict[str, tf.Tensor]:
    """Downscale the images of a batch to the size that the network takes."""
    if tuple(batch["images"].shape[1:3]) == image_size(model):
        return dict(batch)
    return dict(batch) | {"images": downscale(batch["images"], *image_size(model))}


def downscale(images: tf.Tensor, height: int, width: int) -> tf.Tensor:
    """Downscale images as antialiased `tf.image.resize`, by matrix products."""
    down = tf.constant(_weights(images.shape[1], height), images.dtype)
    across = tf.constant(_weights(images.shape[2], width), images.dtype)
    return tf.einsum("yh,nhwc,xw->nyxc", down, images, across)


def _weights(length: int, smaller: int) -> np.ndarray:
    """Return the triangular weights of pixels in new pixels, [smaller, length]."""
    scale = length / smaller
    centers = (np.arange(smaller)[:, None] + 0.5) * scale - 0.5
    weights = np.maximum(0, 1 - np.abs(np.arange(length) - centers) / scale)
    return weights / weights.sum(axis=1, keepdims=True)
