"""Several things timed in turn, round by round, so that a machine that becomes slower
treats them alike."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

MOST_ROUNDS, LEAST_ROUNDS = 9, 3
# Number of rounds -> Student's t of 97.5 %, with one degree of freedom less.
STUDENT = {3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31}
MOST_STEPS = 500  # in a round


def nothing() -> None:
    """Does nothing."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """What is timed.

    Attributes:
        run: takes so many steps.
        prepare, finish: called before and after it; their time does not count.
        least_steps: of a round.
    """

    run: Callable[[int], None]
    prepare: Callable[[], None] = nothing
    finish: Callable[[], None] = nothing
    least_steps: int = 1

    def secs(self, num_steps: int) -> float:
        """Seconds of a step, of so many the mean."""
        self.prepare()
        started = time.perf_counter()
        self.run(num_steps)
        secs = (time.perf_counter() - started) / num_steps
        self.finish()
        return secs


def warm_up(timed: Timed, secs: float) -> tuple[int, float]:
    """The steps of a round, which fill so many seconds, and the time that they take
    with `prepare` and `finish`."""
    timed.run(1)
    started = time.perf_counter()
    timed.run(1)
    count = int(secs / (time.perf_counter() - started))
    started = time.perf_counter()
    count = max(1, min(20, count))
    step_secs = timed.secs(count)
    others = time.perf_counter() - started - count * step_secs
    count = max(timed.least_steps, min(MOST_STEPS, int(secs / step_secs)))
    return count, others + count * step_secs


def in_rounds(
    things: Mapping[str, Timed], counts: Mapping[str, tuple[int, float]], secs: float
) -> dict[str, list[float]]:
    """Name -> seconds of a step, of each round.

    Args:
        things: each in every round; in the opposite order in every other one.
        counts: name -> what `warm_up` gave.
        secs: for all rounds; there are LEAST_ROUNDS, however long they take.
    """
    round_secs = sum(part_secs for _, part_secs in counts.values())
    num_rounds = max(LEAST_ROUNDS, min(MOST_ROUNDS, int(secs / round_secs)))
    times = {name: [] for name in things}
    for number in range(num_rounds):
        for name in list(things) if number % 2 else reversed(things):
            times[name].append(things[name].secs(counts[name][0]))
    return times


def scaled(base: Sequence[float], times: Sequence[float]) -> float:
    """The median of `base` times the median ratio, round by round: what slows a whole
    round down does not count."""
    return statistics.median(base) * statistics.median(_ratios(base, times))


def error(base: Sequence[float], times: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean ratio, by Student's t."""
    ratios = _ratios(base, times)
    return STUDENT[len(ratios)] * statistics.stdev(ratios) / math.sqrt(len(ratios))


def _ratios(base, times):
    return [x / y for x, y in zip(times, base, strict=True)]
