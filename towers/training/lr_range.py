"""Learning-rate range tests: the loss while the rate grows, step by step.

Smith 2015, arXiv:1506.01186, section 3.3; with a rate that grows exponentially, the end
at four times the lowest smoothed loss: Gugger 2018, "How Do You Find A Good Learning
Rate". The suggestion is where the loss falls most steeply, as fastai's `steep`.
"""

import dataclasses
import io
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers import build_trainer, console, store
from towers.cluster.cluster_spec import Cluster
from towers.config import Config
from towers.data.sets.arrays import Data
from towers.errors import ConfigError, NumericError
from towers.optim.schedules import Schedule
from towers.parallel.trainer import Trainer
from towers.reporting.display import Display, Status, create_display
from towers.run.restore import load_trainer
from towers.run.standardization import with_resize_of_weights
from towers.training.banner import print_banner
from towers.training.linear_probe import fit_head
from towers.training.setup import (
    build_run,
    folder_of_trial,
    take_steps,
    watched,
    with_given,
)

NAME = "lr_range_test"  # of the flag and the picture

# The rates. Most optimizers that divide by the size of the gradients take smaller ones.
LOWEST, LOWEST_SCALE_FREE, HIGHEST = 1e-5, 1e-6, 100.0

# The number of steps: some epochs, within these bounds.
NUM_EPOCHS, FEWEST_STEPS, MOST_STEPS = 4, 200, 300

# Standard deviation of the Gaussian means of the loss, in powers of ten of the rate.
SMOOTHING = 0.1

# The loss has diverged at this multiple of the lowest one.
DIVERGED = 4.0

# Where the loss falls by less than this share, nothing is suggested.
LEAST_FALL = 0.01


class LrRange(NamedTuple):
    """The result of a test: of each step its learning rate, the mean loss of its batch
    before the update, and its Gaussian mean over neighboring rates, float64 [steps].

    The suggestion is the rate at which the smoothed loss falls most steeply, by the
    logarithm of the rate, in two digits; None where the loss does not fall.
    """

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    suggestion: float | None


def smooth(
    rates: np.ndarray, losses: np.ndarray, width: float = SMOOTHING
) -> np.ndarray:
    """The means of losses [n], with Gaussian weights by the distance between the rates;
    the width is in powers of ten."""
    distances = np.log10(rates)[:, None] - np.log10(rates)
    weights = np.exp(-((distances / width) ** 2) / 2)
    return weights @ losses / weights.sum(axis=1)


def range_test(steps: Iterable[tuple[float, float]]) -> LrRange:
    """Takes steps, which give their learning rate and loss, until the loss diverges,
    and reads the suggestion. NumericError where the first loss is not finite."""
    taken = []
    for rate, loss in steps:
        if not math.isfinite(loss):
            break
        taken.append((rate, loss))
        smoothed = smooth(*np.array(taken).T)
        if smoothed[-1] > DIVERGED * smoothed.min():
            break
    if not taken:
        raise NumericError(
            f"the loss of the first step, at the learning rate {rate:g}, is not "
            "finite: check the images and the network"
        )
    (rates, losses), suggestion = np.array(taken).T, None
    begin = smoothed[: max(1, len(taken) // 10)].mean()
    if smoothed.min() < (1 - LEAST_FALL) * begin:
        # A loss that has diverged may fall steeply as well.
        falling = slice(smoothed.argmin() + 1)
        wide = smooth(rates, losses, 2 * SMOOTHING)  # a slope is noisier than a loss
        slopes = np.gradient(wide, np.log(rates))[falling]
        suggestion = float(f"{rates[slopes.argmin()]:.2g}")
    return LrRange(rates, losses, smoothed, suggestion)


def num_steps(config: Config, num_examples: int) -> int:
    epochs = math.ceil(NUM_EPOCHS * num_examples / config.images_per_step)
    return min(max(epochs, FEWEST_STEPS), MOST_STEPS)


def growing_rate(config: Config, num_examples: int) -> Schedule:
    """The schedule of a test: up to HIGHEST, by the same factor in each step."""
    last = (num_steps(config, num_examples) - 1) * config.images_per_step
    is_scale_free = config.choice_of("optimizer").scale_free
    lowest = LOWEST_SCALE_FREE if is_scale_free else LOWEST

    def rate(images_seen):
        done = tf.cast(images_seen, tf.float64) / last
        return lowest * tf.pow(tf.constant(HIGHEST / lowest, tf.float64), done)

    return rate


def lr_range_test(
    workdir: str | os.PathLike,
    config: Config,
    *,
    model: Any = None,
    data: Data | None = None,
    class_names: Sequence[str | int] = (),
    cluster: Cluster | None = None,
    allow_public_address: bool = False,
    origins: Mapping[str, str] = MappingProxyType({}),
    progress: str = "auto",
) -> LrRange:
    """Takes the first steps of a run with a learning rate that grows until the loss
    diverges, and suggests one. The run itself is not begun, nor one in the folder
    touched: `lr_range_test.png` is written there.

    Args:
        workdir, config: of the run.
        model, data, class_names, cluster, allow_public_address, origins, progress: as
            of `train`.

    Returns:
        `rates`, `losses` and `smoothed`, float64 [steps], and the `suggestion`, None
        where the loss does not fall.

    Raises:
        TowersError: such as a ConfigError where the folder cannot be written.
    """
    config, _ = with_given(config, model, data, class_names)
    folder = folder_of_trial(NAME, workdir, config, cluster, allow_public_address)
    config = with_resize_of_weights(config, None)
    # A step that is not finite is the end of the test, and no error.
    tested = dataclasses.replace(config, on_nonfinite="skip", ema_decay=0.0)
    devices = build_trainer.configure_devices(tested)
    parts, trainer = build_run(tested, devices, schedule_fn=growing_rate)
    print_banner(config, folder, devices, parts, trainer, origins)
    new = load_trainer(trainer, config, None, parts.data.class_names)
    if config.linear_probe:
        fit_head(trainer, parts, config.batch_size, new)
    count = num_steps(config, parts.num_examples)
    per_step = config.images_per_step / parts.num_examples
    status = Status(count, count * per_step, epochs_per_step=per_step)
    console.line(
        f"learning rates from {trainer.learning_rate(0):g} to {HIGHEST:g} in {count} "
        "steps"
    )
    with create_display(progress, status) as display:

        def test(heartbeat):
            return range_test(_steps(trainer, display))

        result = watched(test, trainer, config, display.tick)
    lowest = result.smoothed.argmin()
    console.line(
        f"{len(result.rates)} steps, to {result.rates[-1]:.2g}; the smoothed loss is "
        f"lowest, {result.smoothed[lowest]:.3f}, at {result.rates[lowest]:.2g}"
    )
    folder.create()
    picture = folder.path / f"{NAME}.png"
    try:
        store.write_aside(picture, draw(result))
    except OSError as error:
        raise ConfigError(f"{picture} cannot be written: {error.strerror}") from None
    console.line(f"picture: {picture}")
    if result.suggestion is None:
        console.line("the loss does not fall, so no learning rate is suggested")
    return result


def _steps(trainer: Trainer, display: Display) -> Iterator[tuple[float, float]]:
    """Learning rate and loss of each step; NaN where it is not finite."""
    status, started = display.status, time.monotonic()
    for step in range(1, status.last_step + 1):
        metrics = take_steps(trainer, 1)
        rate, loss = float(metrics["learning_rate"]), float(metrics["loss"])
        secs_per_step = (time.monotonic() - started) / step
        display.update(
            step=step,
            epoch=step * status.epochs_per_step,
            loss=loss,
            accuracy=metrics["accuracy"],
            learning_rate=rate,
            secs_left=(status.last_step - step) * secs_per_step,
        )
        yield rate, math.nan if metrics["skipped_steps"] else loss


def draw(result: LrRange) -> bytes:
    """The loss against the rate, as a PNG; the suggestion is marked."""
    from matplotlib.figure import Figure  # takes a while

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(
        xscale="log", xlabel="learning rate", ylabel="loss", title="Learning-rate range"
    )
    axes.plot(result.rates, result.losses, color="0.75", label="of each batch")
    axes.plot(result.rates, result.smoothed, color="C0", label="smoothed")
    begin, lowest = result.smoothed[0], result.smoothed.min()
    height = max(begin - lowest, LEAST_FALL * begin)
    axes.set_ylim(lowest - 0.1 * height, begin + 0.5 * height)
    if (rate := result.suggestion) is not None:
        axes.axvline(rate, color="C3", linestyle="--", label=f"suggested: {rate:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
