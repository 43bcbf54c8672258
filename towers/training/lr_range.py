"""Learning-rate range tests: the loss while the rate grows, step by step.

Smith 2015, arXiv:1506.01186, section 3.3; with a rate that grows exponentially, the end
at four times the lowest smoothed loss, and a tenth of the rate of the lowest one as the
suggestion: Gugger 2018, "How Do You Find A Good Learning Rate", and fastai's `minimum`.
"""

import csv
import dataclasses
import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

from towers import console, store
from towers.config import Config
from towers.data.paths import data_folder
from towers.errors import ConfigError, NumericError
from towers.optim.schedules import Schedule
from towers.parallel.trainer import Trainer
from towers.run.banner import start_banner
from towers.run.cluster_spec import Cluster
from towers.run.display import Display, Status, create_display
from towers.run.folder import RunFolder
from towers.run.restore import load_trainer
from towers.run.watchdog import Watchdog
from towers.training.setup import (
    configure_devices,
    create_trainer,
    take_steps,
    validate_alone,
    watched,
)

NAME = "lr_range_test"  # of the files

# The rates. Most optimizers that divide by the size of the gradients take smaller ones.
LOWEST, LOWEST_SCALE_FREE, HIGHEST = 1e-5, 1e-6, 100.0

# The steps: those of some epochs, within these bounds.
NUM_EPOCHS, FEWEST_STEPS, MOST_STEPS = 4, 200, 300

# Standard deviation of the Gaussian means of the loss, in powers of ten of the rate.
SMOOTHING = 0.1

# The loss has diverged at so many times the lowest one.
DIVERGED = 4.0

# The suggestion is the rate with the lowest smoothed loss divided by this.
MARGIN = 10.0

# Where the loss falls by less than this share, nothing is suggested.
LEAST_FALL = 0.01


class LrRange(NamedTuple):
    """The result of a test.

    Attributes:
        rates: float64 [n], increasing: of each step its learning rate.
        losses: float64 [n], the mean cross-entropy of its batch, before the update.
        smoothed: float64 [n], Gaussian means of these over neighboring rates.
        suggestion: a tenth of the rate with the lowest smoothed loss, in two digits;
            None where the loss does not fall.
    """

    rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    suggestion: float | None


def smooth(rates: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """The means of losses [n] with weights by the distance between the rates."""
    distances = np.log10(rates)[:, None] - np.log10(rates)
    weights = np.exp(-((distances / SMOOTHING) ** 2) / 2)
    return weights @ losses / weights.sum(axis=1)


def range_test(steps: Iterable[tuple[float, float]]) -> LrRange:
    """Takes steps until the loss diverges, and reads the suggestion.

    Args:
        steps: of each its learning rate, which grows, and its loss.
    """
    taken = []
    for rate, loss in steps:
        if not math.isfinite(loss):
            break
        taken.append((rate, loss))
        smoothed = smooth(*np.array(taken).T)
        if smoothed[-1] > DIVERGED * smoothed.min():
            break
    rates, losses = np.array(taken).reshape(-1, 2).T
    smoothed, suggestion = smooth(rates, losses), None
    begin = smoothed[: max(1, len(taken) // 10)]
    if len(taken) and smoothed.min() < (1 - LEAST_FALL) * begin.mean():
        suggestion = float(f"{rates[smoothed.argmin()] / MARGIN:.2g}")
    return LrRange(rates, losses, smoothed, suggestion)


def num_steps(config: Config, num_examples: int) -> int:
    """The steps of a test."""
    epochs = math.ceil(NUM_EPOCHS * num_examples / config.images_per_step)
    return min(max(epochs, FEWEST_STEPS), MOST_STEPS)


def lowest_rate(config: Config) -> float:
    """The rate of the first step."""
    is_scale_free = config.choice_of("optimizer").scale_free
    return LOWEST_SCALE_FREE if is_scale_free else LOWEST


def growing_rate(config: Config, num_examples: int) -> Schedule:
    """The schedule of a test: up to HIGHEST, by the same factor in each step."""
    last = (num_steps(config, num_examples) - 1) * config.images_per_step
    lowest = lowest_rate(config)

    def rate(images_seen):
        done = tf.cast(images_seen, tf.float64) / last
        return lowest * tf.pow(tf.constant(HIGHEST / lowest, tf.float64), done)

    return rate


def lr_range_test(
    workdir: str | os.PathLike,
    config: Config,
    *,
    cluster: Cluster | None = None,
    allow_public_address: bool = False,
    origins: Mapping[str, str] = MappingProxyType({}),
    progress: str = "auto",
) -> LrRange:
    """See `towers.lr_range_test`."""
    validate_alone("lr_range_test", config, cluster, allow_public_address)
    folder = RunFolder(workdir)
    if config.dataset == "image_folder":
        folder.validate_outside_of(data_folder(config.data_dir))
    folder.validate()
    # A step that is not finite is the end of the test, and no error.
    tested = dataclasses.replace(config, on_nonfinite="skip", ema_decay=0.0)
    devices = configure_devices(tested)
    parts, trainer = create_trainer(tested, devices, schedule_fn=growing_rate)
    for line in start_banner(
        config,
        folder,
        devices,
        trainer,
        data=parts.data,
        image_shape=parts.augment.image_shape,
        num_examples=parts.num_examples,
        total_steps=parts.total_steps,
        origins=origins,
    ):
        console.line(line)
    load_trainer(trainer, config, None)
    count = num_steps(config, parts.num_examples)
    epochs_per_step = config.images_per_step / parts.num_examples
    status = Status(count, count * epochs_per_step, epochs_per_step=epochs_per_step)
    display = create_display(progress, status)
    lowest = lowest_rate(config)
    console.line(f"learning rates from {lowest:g} to {HIGHEST:g} in {count} steps")
    result = watched(
        lambda watchdog: range_test(_steps(trainer, watchdog, display, count)),
        trainer,
        config,
        display,
    )
    if not len(result.rates):
        raise NumericError(
            f"the loss of the first step, at the learning rate {lowest:g}, is not "
            "finite: look at the images and the network"
        )
    _report(result, folder)
    return result


def _steps(
    trainer: Trainer, watchdog: Watchdog, display: Display, count: int
) -> Iterator[tuple[float, float]]:
    """Learning rate and loss of each step; NaN where it is not finite."""
    for step in range(1, count + 1):
        metrics = take_steps(trainer, watchdog, 1)
        rate, loss = metrics["learning_rate"], float(metrics["loss"])
        display.update(
            step=step,
            epoch=step * display.status.epochs_per_step,
            loss=loss,
            accuracy=metrics["accuracy"],
            learning_rate=rate,
        )
        yield float(rate), math.nan if metrics["skipped_steps"] else loss


def _report(result: LrRange, folder: RunFolder) -> None:
    """Writes the curve as a picture and a table, and prints what it says."""
    lowest = result.smoothed.argmin()
    console.line(
        f"{len(result.rates)} steps, to {result.rates[-1]:.2g}; the smoothed loss is "
        f"lowest, {result.smoothed[lowest]:.3f}, at {result.rates[lowest]:.2g}"
    )
    picture, table = folder.path / f"{NAME}.png", folder.path / f"{NAME}.csv"
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["learning_rate", "loss", "smoothed_loss"])
    writer.writerows(zip(*result[:3], strict=True))
    folder.create()
    try:
        store.write_aside(table, text.getvalue())
        store.write_aside(picture, draw(result))
    except OSError as error:
        raise ConfigError(
            f"{table} or {picture.name} cannot be written: {error.strerror}"
        ) from None
    console.line(f"written: {picture} and {table.name}")
    if result.suggestion is None:
        console.line("the loss does not fall, so no learning rate is suggested")


def draw(result: LrRange) -> bytes:
    """The loss against the rate, as a PNG; the suggestion is marked."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(
        xscale="log", xlabel="learning rate", ylabel="loss", title="Learning-rate range"
    )
    axes.plot(result.rates, result.losses, color="0.75", label="of each batch")
    axes.plot(result.rates, result.smoothed, color="C0", label="smoothed")
    begin, lowest = result.smoothed[0], result.smoothed.min()
    axes.set_ylim(lowest - 0.1 * (begin - lowest), begin + 0.5 * (begin - lowest))
    if result.suggestion is not None:
        axes.axvline(
            result.suggestion,
            color="C3",
            linestyle="--",
            label=f"suggested: {result.suggestion:g}",
        )
    axes.grid(alpha=0.3)
    axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
