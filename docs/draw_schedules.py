"""Draws schedules.svg from the schedules themselves: python -m docs.draw_schedules"""

import pathlib

import tensorflow as tf

from towers.build import create_schedule
from towers.config import Config

PICTURE = pathlib.Path(__file__).with_name("schedules.svg")

# All panels show this run; what else was set stands under the name of the schedule.
LEARNING_RATE, NUM_EPOCHS, NUM_EXAMPLES = 0.1, 60.0, 50_000
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

WIDTH, COLUMNS, PANEL_HEIGHT, TOP = 700, 2, 150, 16
PLOT_WIDTH, PLOT_HEIGHT = 280, 84
STYLE = """\
    text { font-family: sans-serif; font-size: 13px; fill: #1b1f24; }
    .name { font-weight: bold; }
    .small { font-size: 11px; fill: #57606a; }
    .end { text-anchor: end; }
    .axes { fill: none; stroke: #8c959f; }
    .rate { fill: none; stroke: #1f5fbf; stroke-width: 2; stroke-linejoin: round; }"""


def create(name: str, options: dict):
    """The schedule of a panel, as a run with these options has it."""
    config = Config(
        schedule=name,
        learning_rate=LEARNING_RATE,
        num_epochs=NUM_EPOCHS,
        **{"warmup_epochs": 0.0} | options,
    )
    return create_schedule(config, NUM_EXAMPLES)


def curve(schedule, left: int, bottom: int) -> list[tuple[int, int]]:
    """Points of the rate every half epoch, in tenths of a pixel: with the last image
    before it and with it, so that steps are upright."""
    images = [half * NUM_EXAMPLES // 2 for half in range(int(2 * NUM_EPOCHS) + 1)]
    seen = [0, *(n for first in images[1:] for n in (first - 1, first))]
    points = []
    for count, rate in zip(
        seen, schedule(tf.constant(seen, tf.int64)).numpy(), strict=True
    ):
        x = left + PLOT_WIDTH * count / (NUM_EPOCHS * NUM_EXAMPLES)
        y = bottom - PLOT_HEIGHT * rate / LEARNING_RATE
        points.append((round(10 * x), round(10 * y)))
    return without_middles(points)


def without_middles(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The points without those that lie on the line between their neighbours."""
    kept = []
    for x, y in points:
        if kept and kept[-1] == (x, y):
            continue
        while len(kept) > 1:
            (x0, y0), (x1, y1) = kept[-2:]
            if (x1 - x0) * (y - y0) != (x - x0) * (y1 - y0):
                break
            kept.pop()
        kept.append((x, y))
    return kept


def panel(place: int, name: str, options: dict) -> str:
    row, column = divmod(place, COLUMNS)
    left = 46 + column * (WIDTH - 20) // COLUMNS
    top = TOP + row * PANEL_HEIGHT
    bottom, right = top + 30 + PLOT_HEIGHT, left + PLOT_WIDTH
    flags = [
        f"--{option}={value:g}" if isinstance(value, float) else f"--{option}={value}"
        for option, value in options.items()
    ]
    x, y = zip(*curve(create(name, options), left, bottom), strict=True)
    path = " ".join(f"{a / 10:g} {b / 10:g}" for a, b in zip(x, y, strict=True))
    plot_top = bottom - PLOT_HEIGHT
    return f"""
  <text class="name" x="{left}" y="{top + 6}">{name}</text>
  <text class="small" x="{left}" y="{top + 21}">{" ".join(flags)}</text>
  <path class="axes" d="M{left} {plot_top}V{bottom}H{right}"/>
  <text class="small end" x="{left - 5}" y="{plot_top + 8}">{LEARNING_RATE:g}</text>
  <text class="small end" x="{left - 5}" y="{bottom + 4}">0</text>
  <text class="small end" x="{right}" y="{bottom + 13}">{NUM_EPOCHS:g} epochs</text>
  <path class="rate" d="M{path}"/>
"""


def picture() -> str:
    """The SVG as text."""
    height = TOP + PANEL_HEIGHT * -(-len(PANELS) // COLUMNS)
    panels = "".join(panel(i, *shown) for i, shown in enumerate(PANELS))
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" \
width="{WIDTH}" height="{height}" role="img" aria-labelledby="title">
  <title id="title">The learning rate of every schedule over a run of \
{NUM_EPOCHS:g} epochs</title>
  <style>
{STYLE}
  </style>
  <rect width="{WIDTH}" height="{height}" fill="#ffffff"/>
{panels}</svg>
"""


if __name__ == "__main__":
    PICTURE.write_text(picture())
