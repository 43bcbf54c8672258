"""Coordination of the threads of towers that share variables: fetches, applies, ends.

The staleness of an update is the number of other updates that are applied between its
fetch and its apply. This module does not depend on TensorFlow.
"""

import collections
import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from towers.threads import JobThread

# Shares drawn ahead for each tower. The slowest tower decides when the next batch is
# drawn, so others make at most 2 * SHARES_AHEAD + 1 updates during one of its own: that
# bounds the staleness even without `max_staleness`.
SHARES_AHEAD = 2


class Abandoned(Exception):
    """A call ends because another thread has failed."""


class Coordinator:
    """Coordinates towers that each make one update for their share of each batch.

    One lock guards all attributes, and is held during a fetch or an apply. Towers wait
    so that no update is staler than `max_staleness`; 0 does not bound it.

    Attributes:
        begun, applied: updates of each tower, counted from step 0.
        staleness: of the updates of the last `run`, in the order of their applies.
        input_wait_secs: per tower, how long it waited in the last `run` while a batch
            was being drawn; waiting for slower towers does not count.
    """

    def __init__(self, num_towers: int, steps: int, *, max_staleness: int = 0):
        self.lock = threading.Condition()
        names = ["batches", *(f"tower_{tower}" for tower in range(num_towers))]
        self._threads, self._num_running = list(map(JobThread, names)), 0
        self._max_staleness = max_staleness or math.inf
        self.restart(steps)

    def restart(self, steps: int) -> None:
        """Reset all but the threads; every tower has made `steps` updates."""
        num_towers = len(self._threads) - 1
        self.begun, self.applied = [steps] * num_towers, [steps] * num_towers
        self.staleness: list[int] = []
        self.input_wait_secs = [0.0] * num_towers
        # Per tower (share, times at which drawing its batch began and ended).
        self._shares: list[collections.deque] = [
            collections.deque() for _ in range(num_towers)
        ]
        # Tower -> number of updates applied before its fetch, oldest fetch first.
        self._in_flight: dict[int, int] = {}
        self._holder: int | None = None  # The tower that fetches or applies.
        self._target = steps
        self._errors: list[BaseException] = []
        self._stop = False

    def run(
        self,
        num_steps: int,
        draw: Callable[[], Sequence[Any]],
        work: Callable[[int], None],
    ) -> None:
        """Let every tower make `num_steps` updates; fewer after a stop request.

        Steps that some towers have begun by then are finished by all. `draw` draws the
        next batch, a share for each tower. `work` is called for each tower, in its
        thread, to `take_share`, `fetch` and `apply` until no share is left. The first
        exception of any thread is raised when all have ended; then call `restart`.
        """
        num_towers = len(self.applied)
        self._target = self.applied[0] + num_steps
        self.staleness, self.input_wait_secs = [], [0.0] * num_towers
        calls = [functools.partial(self._draw_ahead, draw)]
        calls += [functools.partial(work, tower) for tower in range(num_towers)]
        self._num_running = len(calls)
        for thread, call in zip(self._threads, calls, strict=True):
            thread.submit(functools.partial(self._guard, call))
        with self.lock:
            self.lock.wait_for(lambda: not self._num_running)
        if self._errors:
            raise self._errors[0]

    def _guard(self, call):
        try:
            with contextlib.suppress(Abandoned):
                call()
        except BaseException as error:
            self._errors.append(error)
        with self.lock:
            self._num_running -= 1
            self.lock.notify_all()

    def request_stop(self) -> None:
        """End `run` after the current steps; does not wait for the lock."""
        self._stop = True

    def _last_step(self):
        """Return the step at which every tower ends."""
        if self._errors:
            return 0
        return max(self.begun) if self._stop else self._target

    def progress(self) -> tuple[int, bool, int | None]:
        """Return the steps that all towers have applied, without waiting for the lock.

        Also whether all are between the same two steps, or which tower is the last.
        """
        # Applied updates were begun: if both are equal, read in this order, the state
        # was consistent when the second was read.
        applied, begun = list(self.applied), list(self.begun)
        steps = sum(applied) // len(applied)
        if applied == begun == [steps] * len(applied):
            return steps, True, None
        holder, oldest = self._holder, list(self._in_flight)[:1]
        return steps, False, oldest[0] if holder is None and oldest else holder

    def _draw_ahead(self, draw):
        def is_drawn():
            return self.begun[0] + len(self._shares[0]) >= self._last_step()

        def may_draw():
            return max(map(len, self._shares)) < SHARES_AHEAD

        while True:
            with self.lock:
                self.lock.wait_for(lambda: may_draw() or is_drawn())
                if is_drawn():
                    return
            begun = time.monotonic()
            shares = draw()
            drawn = time.monotonic()
            with self.lock:
                for queue, share in zip(self._shares, shares, strict=True):
                    queue.append((share, begun, drawn))
                self.lock.notify_all()

    def take_share(self, tower: int) -> Any | None:
        """Wait for a tower's share of its next batch; None at its end."""

        def is_at_end():
            return self.begun[tower] >= self._last_step()

        wanted = time.monotonic()
        with self.lock:
            self.lock.wait_for(lambda: self._shares[tower] or is_at_end())
            if is_at_end():
                return None
            self.begun[tower] += 1
            self.lock.notify_all()
            share, begun, drawn = self._shares[tower].popleft()
        self.input_wait_secs[tower] += max(0.0, drawn - max(wanted, begun))
        return share

    @contextlib.contextmanager
    def fetch(self, tower: int) -> Iterator[None]:
        """Hold the lock while a tower copies the variables."""
        is_allowed = functools.partial(may_fetch, self._in_flight, self._max_staleness)
        with self._locked(tower, is_allowed):
            self._in_flight[tower] = sum(self.applied)
            yield

    @contextlib.contextmanager
    def apply(self, tower: int) -> Iterator[int]:
        """Hold the lock during an update; yield its number over all towers, from 0."""

        def is_allowed():
            return may_apply(
                tower, sum(self.applied), self._in_flight, self._max_staleness
            )

        with self._locked(tower, is_allowed):
            number = sum(self.applied)
            yield number
            self.staleness.append(number - self._in_flight.pop(tower))
            self.applied[tower] += 1
            self.lock.notify_all()

    @contextlib.contextmanager
    def _locked(self, tower, is_allowed):
        with self.lock:
            self.lock.wait_for(lambda: self._errors or is_allowed())
            if self._errors:
                raise Abandoned
            self._holder = tower
            yield
            self._holder = None


def may_fetch(in_flight: Mapping[int, int], max_staleness: float) -> bool:
    """Return whether one more update may be in flight; see `may_apply`."""
    return len(in_flight) <= max_staleness


def may_apply(
    tower: int, num_updates: int, in_flight: Mapping[int, int], max_staleness: float
) -> bool:
    """Return whether a tower may apply its update without making another too stale.

    At any time the updates in flight could be applied in the order of their fetches,
    none staler than the bound: a fetch is behind at most max_staleness others, and an
    apply that overtakes waits if it would break that. The oldest never waits, so towers
    cannot deadlock. `in_flight` is tower -> number of updates applied before its fetch,
    oldest fetch first.
    """
    older = list(in_flight.values())[: list(in_flight).index(tower)]
    return all(
        num_updates + 1 + index - fetched <= max_staleness
        for index, fetched in enumerate(older)
    )
