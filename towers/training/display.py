"""Progress of a training: live on a terminal, else lines at growing intervals."""

import dataclasses
import math
import time
from collections.abc import Callable

from towers import console
from towers.errors import ConfigError
from towers.messages import duration

# Minimum seconds between lines, which grow by this fraction of the elapsed time.
_PERIOD_SECS, _GROWTH = 5.0, 0.3

_WIDTH = 10_000  # maximum width of a line: a file has none
_WIDEST = 120  # maximum width of the bars


@dataclasses.dataclass(frozen=True)
class Status:
    """Progress of a training after a call of several steps; None is not known yet."""

    last_step: int
    num_epochs: float
    step: int = 0
    epoch: float = 0.0  # passes over the training images so far
    epochs_per_step: float = 0.0
    loss: float | None = None  # running mean over the epoch
    accuracy: float | None = None  # the same
    learning_rate: float | None = None  # at the last step
    images_per_sec: float | None = None
    input_wait_percent: float | None = None
    skipped_steps: int = 0  # because they were not finite
    secs_left: float | None = None


class Display:
    """Shows nothing; a context manager."""

    def __init__(self, status: Status, clock: Callable[[], float] = time.monotonic):
        self.status, self._clock = status, clock
        self._updated_at = clock()

    def update(self, **changes) -> None:
        """Replace fields of the status; called by the thread that trains."""
        self.status = dataclasses.replace(self.status, **changes)
        self._updated_at = self._clock()

    def tick(self, step: int, activity: str) -> None:
        """Show the step and the activity; called often, by another thread."""

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *_) -> None:
        pass

    def _secs_left(self):
        secs = self.status.secs_left
        if secs is not None:
            secs = max(0.0, secs - (self._clock() - self._updated_at))
        return secs


class PlainDisplay(Display):
    """Lines, as long as a terminal is wide."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._began_at = self._due_at = None

    def tick(self, step: int, activity: str) -> None:
        """Print a line if it is due."""
        now = self._clock()
        if self._began_at is None:
            self._began_at, self._due_at = now, now + _PERIOD_SECS
        if now >= self._due_at:
            self._due_at = now + max(_PERIOD_SECS, _GROWTH * (now - self._began_at))
            left, width = self._secs_left(), console.columns(_WIDTH)
            console.line(plain_line(self.status, step, activity, left, width))

    def __exit__(self, *_):
        self._due_at = math.inf  # the watchdog ticks on, below "done"


def plain_line(
    status: Status, step: int, activity: str, secs_left: float | None, width: int
) -> str:
    """Return a line about a training, with as much as is known and fits."""
    parts = [f"step {step}/{status.last_step}"]
    if secs_left is not None:
        parts.append(f"{duration(secs_left)} left")
    elif activity not in ("computing", "computing or waiting for data"):
        parts.append(activity)
    return _fitting([*parts, *_figures(status)], width)


def _fitting(parts, width):
    line = ""
    for part in parts:
        if len(line) + len(part) + 2 <= width:
            line += f"  {part}" if line else part
    return line


def _figures(status):
    # The most important ones first.
    if status.loss is not None:
        yield f"loss {status.loss:.3f}"
        yield f"accuracy {status.accuracy:.3f}"
    if status.skipped_steps:
        yield f"{status.skipped_steps} steps skipped"
    if status.images_per_sec is not None:
        yield f"{status.images_per_sec:,.0f} images/s"
        yield f"input wait {status.input_wait_percent:.0f}%"
    if status.learning_rate is not None:
        yield f"lr {status.learning_rate:.3g}"


class LiveDisplay(Display):
    """Three lines at the end of a terminal that are renewed four times a second."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._step, self._activity = self.status.step, "starting"
        self._live = None

    def __enter__(self):
        self._live = console.Live(self._render)
        return self

    def __exit__(self, *_):
        self._live.stop()

    def tick(self, step: int, activity: str) -> None:
        """Renew the lines."""
        self._step, self._activity = step, activity
        if self._live:
            self._live.refresh()

    def _render(self, width):
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        status, step, left = self.status, self._step, self._secs_left()
        epoch = status.epoch + (step - status.step) * status.epochs_per_step
        number = max(0, min(math.floor(epoch), math.ceil(status.num_epochs) - 1))
        in_epoch = min(1.0, epoch - number)
        # Leave space for typed characters, such as ^C.
        width = min(width - 3, _WIDEST)
        bars = Table.grid(padding=(0, 2, 0, 0))
        bars.width = width
        # Fixed widths keep the bars in place.
        percent, rest = {"width": 4, "justify": "right"}, {"width": 18}
        for column in ({}, {"ratio": 1}, percent, {}, rest):
            bars.add_column(no_wrap=True, **column)
        # Colors of the terminal fit a light and a dark one.
        colors = {"style": "bright_black", "complete_style": "cyan"}
        done, now = step / status.last_step, self._activity
        count, after = f"step {step}/{status.last_step}", ""
        if left is not None:
            now, after = f"{duration(left)} left", now
        epochs = f"{number + 1} of {status.num_epochs:g}"
        for row in (("run", done, count, now), ("epoch", in_epoch, epochs, after)):
            name, share, *texts = row
            bar = ProgressBar(total=1.0, completed=share, **colors)
            bars.add_row(name, bar, f"{share:.0%}", *texts)
        figures = _fitting(_figures(status), width)
        return Group(Text(figures, style="bold", no_wrap=True), bars)


def create_display(mode: str, status: Status) -> Display:
    """Return the display of a mode; ConfigError if `console.MODES` lacks it."""
    if mode not in console.MODES:
        raise ConfigError(f"progress={mode}: must be one of {', '.join(console.MODES)}")
    if mode == "auto" or (mode == "live" and console.is_notebook()):
        mode = "live" if console.is_terminal() else "plain"
    return {"live": LiveDisplay, "plain": PlainDisplay, "off": Display}[mode](status)
