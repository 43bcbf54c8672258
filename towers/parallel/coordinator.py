"""Coordination of the threads of towers that share variables: fetches, applies, ends.

It knows nothing of TensorFlow and of what is fetched and applied. The staleness of an
update is the number of other updates applied between its fetch and its apply.
"""

import collections
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# Shares drawn ahead for each tower. The slowest tower decides when the next batch is
# drawn, so no other one makes more than 2 * SHARES_AHEAD + 1 updates during one of its
# own: that bounds the staleness even where nothing else does.
SHARES_AHEAD = 2


class Abandoned(Exception):
    """Ends a thread because another one has failed."""


class Coordinator:
    """Every tower makes as many updates, one for its share of each batch.

    One lock guards everything here, and is held by whoever fetches or applies.

    Args:
        num_towers: number of threads that update.
        steps: updates that each of them has made before.
        max_staleness: towers wait so that no update is staler; 0 does not bound it.
        record: is given each ("fetch" or "apply", tower, number of that tower's update
            counted from 0) in the order in which they take place.
        clock: seconds, as `time.monotonic`.

    Attributes:
        lock: between two updates for whoever holds it.
        staleness: of the updates of the last `run`, in the order of their applies.
        input_wait_secs: per tower, how long it waited in the last `run` for batches
            that were being drawn; not for slower towers, which put the drawing off.
    """

    def __init__(
        self,
        num_towers: int,
        steps: int,
        *,
        max_staleness: int = 0,
        record: list[tuple[str, int, int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.lock = threading.Condition()
        self.staleness: list[int] = []
        self.input_wait_secs = [0.0] * num_towers
        self._clock = clock
        self._max_staleness = max_staleness
        self._record = record
        # Per tower (share, when its batch was begun and drawn).
        self._shares = [collections.deque() for _ in range(num_towers)]
        # Per tower its updates, from step 0 on.
        self._begun = [steps] * num_towers
        self._applied = [steps] * num_towers
        # Tower -> number of updates applied before its fetch, the oldest fetch first.
        self._in_flight: dict[int, int] = {}
        self._holder: int | None = None  # the tower that fetches or applies
        self._target = steps
        self._errors: list[BaseException] = []
        self._stop = False

    # The threads.

    def run(
        self,
        num_steps: int,
        draw: Callable[[], Sequence[Any]],
        work: Callable[[int], None],
    ) -> None:
        """Has every tower make `num_steps` updates; fewer after a stop request.

        Where some have begun a step by then, the others take it as well.

        Args:
            draw: draws the next batch and returns a share for each tower.
            work: is called with each tower, in a thread of its own, to `take_share`,
                `fetch` and `apply` until there is no share left.

        Raises:
            Exception: what any thread raised first. All have ended then, and this
                object is of no more use.
        """
        self._target = self._applied[0] + num_steps
        self.staleness = []
        self.input_wait_secs = [0.0] * len(self._applied)
        calls = {"batches": functools.partial(self._draw_ahead, draw)}
        for tower in range(len(self._applied)):
            calls[f"tower_{tower}"] = functools.partial(work, tower)
        threads = [
            threading.Thread(target=self._guard, args=(call,), name=name, daemon=True)
            for name, call in calls.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _guard(self, call):
        try:
            call()
        except Abandoned:
            pass
        except BaseException as error:
            self._errors.append(error)
        with self.lock:
            self.lock.notify_all()

    def request_stop(self) -> None:
        """Ends `run` after the steps in hand; waits for nothing, not for the lock."""
        self._stop = True

    def _last_step(self):
        """The step up to which every tower goes."""
        if self._errors:
            return 0
        return max(self._begun) if self._stop else self._target

    def progress(self) -> tuple[int, bool, int | None]:
        """(whole steps applied, whether all towers are between the same two steps, else
        which one is the last), without waiting for the lock."""
        # What was applied is begun. Hence if these, read in this order, are equal, that
        # is how things stood when the second was read.
        applied, begun = list(self._applied), list(self._begun)
        steps = sum(applied) // len(applied)
        if applied == begun == [steps] * len(applied):
            return steps, True, None
        holder, oldest = self._holder, list(self._in_flight)[:1]
        return steps, False, oldest[0] if holder is None and oldest else holder

    def is_even(self) -> bool:
        """True if every tower has applied as many updates as the others."""
        return len(set(self._applied)) == 1

    # Shares of batches.

    def _draw_ahead(self, draw):
        def drawn():
            return self._begun[0] + len(self._shares[0])

        while True:
            with self.lock:
                self.lock.wait_for(
                    lambda: (
                        max(map(len, self._shares)) < SHARES_AHEAD
                        or drawn() >= self._last_step()
                    )
                )
                if drawn() >= self._last_step():
                    return
            begun = self._clock()
            shares = draw()
            drawn_at = self._clock()
            with self.lock:
                for queue, share in zip(self._shares, shares, strict=True):
                    queue.append((share, begun, drawn_at))
                self.lock.notify_all()

    def take_share(self, tower: int) -> Any | None:
        """A tower's share of its next batch, waited for; None once it is to end."""
        wanted = self._clock()
        with self.lock:
            self.lock.wait_for(
                lambda: self._shares[tower] or self._begun[tower] >= self._last_step()
            )
            if self._begun[tower] >= self._last_step():
                return None
            self._begun[tower] += 1
            self.lock.notify_all()
            share, begun, drawn_at = self._shares[tower].popleft()
        self.input_wait_secs[tower] += max(0.0, drawn_at - max(wanted, begun))
        return share

    def num_begun(self, tower: int) -> int:
        """The updates of a tower, counted from step 0, the one under way included."""
        return self._begun[tower]

    # Fetch and apply.

    @contextlib.contextmanager
    def fetch(self, tower: int) -> Iterator[None]:
        """Holds the lock while a tower copies the variables."""
        with self.lock:
            self._wait_for(lambda: may_fetch(self._in_flight, self._max_staleness))
            self._in_flight[tower] = sum(self._applied)
            with self._noted("fetch", tower):
                yield

    @contextlib.contextmanager
    def apply(self, tower: int) -> Iterator[int]:
        """Holds the lock while a tower updates the variables; gives the number of the
        update, counted over all towers from 0."""
        with self.lock:
            self._wait_for(
                lambda: may_apply(
                    tower, sum(self._applied), self._in_flight, self._max_staleness
                )
            )
            number = sum(self._applied)
            with self._noted("apply", tower):
                yield number
            self.staleness.append(number - self._in_flight.pop(tower))
            self._applied[tower] += 1
            self.lock.notify_all()

    def _wait_for(self, is_allowed):
        self.lock.wait_for(lambda: self._errors or is_allowed())
        if self._errors:
            raise Abandoned

    @contextlib.contextmanager
    def _noted(self, event, tower):
        self._holder = tower
        yield
        self._holder = None
        if self._record is not None:
            self._record.append((event, tower, self._begun[tower] - 1))


def may_fetch(in_flight: Mapping[int, int], max_staleness: int) -> bool:
    """True if one more update may be under way; see `may_apply`.

    Args:
        in_flight: tower -> number of updates applied before its fetch, the oldest
            fetch first.
        max_staleness: the bound; 0 for none.
    """
    return max_staleness == 0 or len(in_flight) <= max_staleness


def may_apply(
    tower: int, num_updates: int, in_flight: Mapping[int, int], max_staleness: int
) -> bool:
    """True if a tower may apply its update without another ever becoming too stale.

    At any time the updates in flight could be applied in the order of their fetches,
    none staler than the bound: a fetch goes behind max_staleness others at most, and an
    apply that overtakes is put off where that would no longer hold. The oldest is never
    put off, so nothing waits for ever.

    Args:
        num_updates: applied so far.
        in_flight, max_staleness: as in `may_fetch`; the tower is in flight.
    """
    if max_staleness == 0:
        return True
    older = list(in_flight.values())[: list(in_flight).index(tower)]
    return all(
        num_updates + 1 + place - fetched <= max_staleness
        for place, fetched in enumerate(older)
    )
