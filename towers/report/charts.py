"""Charts of a report, by Matplotlib: SVG images on white, with texts as texts."""

import base64
import functools
import html
import io
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from towers.messages import printable, shown

logging.getLogger("matplotlib").setLevel(logging.ERROR)  # "building the font cache"

# Colors of series; further ones are dashed.
COLORS = "#1f5fbf", "#c2540a", "#1a7f4b", "#8b3fa8", "#8a6d00", "#c02670"

# Maximum number of classes of a confusion matrix, and of one with counts in its cells.
MAX_CONFUSED, MAX_COUNTED = 120, 20

# Maximum number of classes in the chart of accuracies, and of characters of a name.
MAX_CLASSES, _MAX_CHARACTERS = 25, 40

# Accuracies from here on have a logarithmic axis with these ticks.
HIGH_SHARE = 0.9
SHARE_TICKS = 0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999

# Pixels per inch, and width of a chart in pixels.
_DPI, _WIDTH = 96, 380

_MUTED, _GRID = "#59636e", "#d8dee4"
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


class Series(NamedTuple):
    """A curve: its points, and how it is drawn."""

    name: str  # in the legend
    x: Sequence[float]
    y: Sequence[float] | np.ndarray  # NaN leaves a gap
    color: int = 0  # from len(COLORS) on the curve is dashed
    is_faint: bool = False  # for values of single steps


def _chart(draw: Callable[..., tuple[Figure, str]]) -> Callable[..., str]:
    """Decorate a function that returns a figure and its description, for HTML."""

    @functools.wraps(draw)
    def draw_svg(*args, **options):
        buffer = io.BytesIO()
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # glyphs that only the browser has
            figure, about = draw(*args, **options)
            about_file = dict.fromkeys(["Creator", "Date", "Format", "Type"])
            figure.savefig(buffer, format="svg", metadata=about_file)
        data = base64.b64encode(buffer.getvalue()).decode()
        source = f"data:image/svg+xml;base64,{data}"
        return f'<img alt="{html.escape(printable(about))}" src="{source}">'

    return draw_svg


def _figure(width=_WIDTH, height=230) -> tuple[Figure, Axes]:
    figure = Figure((width / _DPI, height / _DPI), layout="constrained")
    return figure, figure.subplots()


@_chart
def curves(
    title: str, series: Sequence[Series], is_share: bool = False
) -> tuple[Figure, str]:
    """Draw curves over the epochs; shares near 1 with a logarithmic axis."""
    figure, axes = _figure()
    for _, x, y, color, is_faint in series:
        axes.plot(
            x,
            y,
            color=COLORS[color % len(COLORS)],
            linestyle="--" if color >= len(COLORS) else "-",
            linewidth=0.9 if is_faint else None,
            alpha=0.45 if is_faint else None,
            marker="o" if len(x) <= 40 and not is_faint else None,
            markersize=3.5,
        )
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=2))
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", scilimits=(-3, 5))
    steady = [y for s in series if not s.is_faint for y in s.y if y < 1]
    if is_share and max(steady, default=0) >= HIGH_SHARE:
        top = (1 + min(max(steady), SHARE_TICKS[-1])) / 2
        ends = lambda y: -np.log10(1 - np.minimum(y, top)), lambda z: 1 - 10.0**-z
        axes.set_yscale("function", functions=ends)
        axes.set_ylim(0, top)
        ticks = [x for x in SHARE_TICKS if x <= top]
        axes.set_yticks(ticks, [f"{x:g}" for x in ticks])
        axes.set_ylabel("logarithmic towards 1")
    axes.grid(axis="x", visible=False)
    return figure, f"{title}: {', '.join(s.name for s in series)}"


@_chart
def confusion(
    counts: np.ndarray, images: np.ndarray, names: Sequence[str]
) -> tuple[Figure, str]:
    """Draw a confusion matrix, a row per label, the darker the larger a share."""
    count = len(counts)
    is_counted = count <= MAX_COUNTED
    # The root makes small shares visible.
    shades = np.sqrt(counts / np.maximum(images[:, np.newaxis], 1))
    labels = [_short(x) for x in names]
    side = 34 if is_counted else max(10, 640 // count)
    margin = 36 + 6 * max(map(len, labels))
    figure, axes = _figure(*[margin + max(count * side, 160)] * 2)
    is_right = np.eye(count, dtype=bool)
    for hidden, colors in ((is_right, "Reds"), (~is_right, "Blues")):
        visible = np.ma.masked_where(hidden | (counts == 0), shades)
        axes.imshow(visible, colors, vmin=0, vmax=1.2, interpolation="none")
    axes.set(xlabel="predicted class", ylabel="class")
    axes.xaxis.set_label_position("top")
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.tick_params(labelcolor="black", labelsize=8.5 if is_counted else 7)
    axes.set_xticks(range(count), labels, rotation=90)
    axes.set_yticks(range(count), labels)
    axes.grid(visible=False)
    edges = np.arange(1, count) - 0.5
    axes.hlines(edges, -0.5, count - 0.5, linewidth=0.5, color=_GRID)
    axes.vlines(edges, -0.5, count - 0.5, linewidth=0.5, color=_GRID)
    for spine in axes.spines.values():
        spine.set(visible=True, color=_GRID)
    for row, column in np.argwhere(counts) if is_counted else ():
        color = "white" if shades[row, column] > 0.8 else "black"
        text = str(counts[row, column])
        size = 8 if len(text) < 5 else 6.5
        axes.text(column, row, text, color=color, size=size, ha="center", va="center")
    return figure, f"confusion matrix of {count} classes"


@_chart
def class_accuracies(
    rows: Sequence[Mapping[str, Any]], accuracy: float
) -> tuple[Figure, str]:
    """Draw the accuracy of each class with its interval, and of all as a line."""
    names = [_short(row["name"]) for row in rows]
    width = _WIDTH + 6 * max(0, max(map(len, names)) - 20)
    figure, axes = _figure(width, height=70 + 20 * len(rows))
    places = np.arange(len(rows))
    low, high = np.array([row["recall_interval"] for row in rows]).T
    axes.axvline(accuracy, color=_MUTED, linewidth=1, linestyle=":")
    axes.hlines(places, low, high, color=COLORS[0], linewidth=2.5, alpha=0.45)
    recalls = [row["recall"] for row in rows]
    axes.plot(recalls, places, "o", color=COLORS[0], markersize=5, clip_on=False)
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", length=0, labelcolor="black")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(max(0, np.floor(10 * low.min()) / 10), 1.01)
    axes.set_xlabel("accuracy, with 95 % interval; dotted: all classes")
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)
    return figure, f"accuracy of {len(rows)} classes"


@_chart
def reliability(rows: Sequence[Mapping[str, Any]]) -> tuple[Figure, str]:
    """Draw the reliability diagram, over the numbers of images in its bins."""
    figure = Figure((_WIDTH / _DPI, 360 / _DPI), layout="constrained")
    axes, below = figure.subplots(2, sharex=True, height_ratios=[4, 1])
    filled = [row for row in rows if row["images"]]
    color, probabilities = COLORS[0], [row["probability"] for row in filled]
    low, high = np.array([row["accuracy_interval"] for row in filled]).T
    axes.plot([0, 1], [0, 1], color=_MUTED, linewidth=1, linestyle=":")
    axes.vlines(probabilities, low, high, color=color, linewidth=2.5, alpha=0.45)
    accuracies = [row["accuracy"] for row in filled]
    axes.plot(probabilities, accuracies, "o", color=color, markersize=5, clip_on=False)
    axes.set(xlim=(0, 1.01), ylim=(0, 1.02), ylabel="accuracy")
    images, edges = [row["images"] for row in rows], [row["low"] for row in rows]
    width = 0.9 / len(rows)
    below.bar(edges, images, width, align="edge", color=color, alpha=0.6)
    below.set(xlabel="probability of the prediction", ylabel="images")
    below.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    below.grid(axis="x", visible=False)
    return figure, "reliability diagram: accuracy over probability"


@_chart
def steps(
    series: Sequence[Series], x_label: str = "recall", y_label: str = "precision"
) -> tuple[Figure, str]:
    """Draw curves of shares in steps, by default precision over recall."""
    figure, axes = _figure(height=300)
    for name, x, y, color, _ in series:
        axes.step(x, y, where="pre", color=COLORS[color % len(COLORS)], label=name)
    axes.set(xlim=(0, 1.01), xlabel=x_label, ylabel=y_label)
    axes.set_ylim(bottom=0)
    return figure, f"{y_label}-{x_label} curves: {', '.join(s.name for s in series)}"


def _short(name):
    """Cut out the middle of a long name, whose ends tell it apart."""
    text, half = shown(name, 10**6), _MAX_CHARACTERS // 2
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[: half - 1]}…{text[-half:]}"
