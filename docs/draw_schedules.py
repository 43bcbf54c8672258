"""Draws schedules.svg from the schedules themselves: python -m docs.draw_schedules"""

import pathlib

import matplotlib
import tensorflow as tf

from towers.build.builder import create_schedule
from towers.config import Config

PICTURE = pathlib.Path(__file__).with_name("schedules.svg")

NUM_EPOCHS, NUM_EXAMPLES = 60.0, 50_000
STAIRS = {"decay_factor": 0.4, "epochs_per_decay": 15.0}
PANELS = [
    ("constant", {}),
    ("exponential", STAIRS),
    ("smooth_exponential", STAIRS),
    ("piecewise", {"epoch_factors": "20:0.5,50:0.1"}),
    ("cosine", {}),
    ("cosine", {"warmup_epochs": 10.0}),
    ("linear", {}),
    ("one_cycle", {"peak_fraction": 0.3}),
]


def draw() -> None:
    """Write the picture, a panel for each schedule."""
    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "towers"
    from matplotlib import pyplot

    images = tf.range(0, int(NUM_EPOCHS) * NUM_EXAMPLES, NUM_EXAMPLES // 8, tf.int64)
    figure, axes = pyplot.subplots(4, 2, figsize=(7, 6.5), layout="constrained")
    for axis, (name, options) in zip(axes.flat, PANELS, strict=True):
        given = {"warmup_epochs": 0.0, "num_epochs": NUM_EPOCHS} | options
        config = Config(schedule=name, learning_rate=0.1, **given)
        rates = create_schedule(config, NUM_EXAMPLES)(images)
        axis.plot(images / NUM_EXAMPLES, rates)
        flags = " ".join(f"--{option}={value}" for option, value in options.items())
        axis.set_title(f"{name}\n{flags}", fontsize="small", loc="left")
        axis.set_ylim(0, 0.105)
    figure.supxlabel("epochs", fontsize="small")
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    draw()
