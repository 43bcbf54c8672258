"""Threads that share variables: orders, bounds and ends, with nothing to compute."""

import threading

import numpy as np
import pytest
from recipes import record_events

from towers.parallel.coordinator import SHARES_AHEAD, Coordinator, may_apply, may_fetch

WAIT_SECS = 30  # Timeout for what should happen at once.


class Work:
    """Batches numbered from 0, and towers that do nothing with their shares.

    `before_fetch` and `before_apply` are called with a tower and the number of its
    update.
    """

    def __init__(
        self,
        num_towers,
        *,
        before_fetch=lambda tower, number: None,
        before_apply=lambda tower, number: None,
        **options,
    ):
        self.record, self.shares = [], []
        self.num_drawn, self.num_towers = 0, num_towers
        self.before_fetch, self.before_apply = before_fetch, before_apply
        self.coordinator = Coordinator(num_towers, 0, **options)
        record_events(self.coordinator, self.record)

    def draw(self):
        self.num_drawn += 1
        return [(tower, self.num_drawn - 1) for tower in range(self.num_towers)]

    def tower(self, tower):
        while (share := self.coordinator.take_share(tower)) is not None:
            self.before_fetch(*share)
            with self.coordinator.fetch(tower):
                pass
            self.before_apply(*share)
            with self.coordinator.apply(tower):
                self.shares.append(share)

    def run(self, num_steps):
        self.coordinator.run(num_steps, self.draw, self.tower)

    def numbers_of(self, tower):
        return [number for which, number in self.shares if which == tower]


@pytest.mark.parametrize("num_towers", [1, 2, 8])
def test_every_tower_gets_its_share_of_every_batch_once_and_in_order(num_towers):
    work = Work(num_towers)
    work.run(3)
    assert len(work.coordinator.staleness) == 3 * num_towers
    work.run(20)
    for tower in range(num_towers):
        assert work.numbers_of(tower) == list(range(23))
    assert work.num_drawn == 23
    assert len(work.coordinator.staleness) == 20 * num_towers
    assert work.coordinator.progress() == (23, True, None)


# The bound on staleness.


@pytest.mark.parametrize("max_staleness", [1, 2, 3, 5])
@pytest.mark.parametrize("num_towers", [2, 3, 4, 8])
def test_any_order_that_is_allowed_keeps_the_bound_and_can_go_on(
    num_towers, max_staleness
):
    rng = np.random.default_rng(num_towers)
    in_flight, num_updates, seen = {}, 0, []
    for _ in range(2000):
        fetching = set(range(num_towers)) - set(in_flight)
        if not may_fetch(in_flight, max_staleness):
            fetching = set()
        applying = {
            tower
            for tower in in_flight
            if may_apply(tower, num_updates, in_flight, max_staleness)
        }
        assert not in_flight or next(iter(in_flight)) in applying
        # Towers of different speed, so that some are overtaken again and again.
        choices = sorted(fetching | applying)
        speed = 4.0 ** -np.array(choices)
        tower = int(rng.choice(choices, p=speed / speed.sum()))
        if tower in in_flight:
            seen.append(num_updates - in_flight.pop(tower))
            num_updates += 1
        else:
            in_flight[tower] = num_updates
    assert max(seen) == max_staleness


# Ends.


@pytest.mark.row(15)
@pytest.mark.parametrize(
    "place,max_staleness", [("before_fetch", 0), ("before_apply", 1)]
)
def test_an_error_of_one_tower_ends_all_and_is_the_one_raised(place, max_staleness):
    error = ZeroDivisionError("in tower 1")

    def fail(tower, number):
        if (tower, number) == (1, 3):
            raise error

    work = Work(4, max_staleness=max_staleness, **{place: fail})
    with pytest.raises(ZeroDivisionError) as caught:
        work.run(50)
    assert caught.value is error
    assert work.numbers_of(1) == [0, 1, 2]
    # Shares are drawn batch by batch, so the others came no further than this.
    assert max(number for _, number in work.shares) <= 3 + SHARES_AHEAD


def test_what_was_under_way_when_another_tower_failed_is_not_applied():
    ready = threading.Barrier(3)

    def before_apply(tower, number):
        ready.wait(WAIT_SECS)
        if tower == 1:
            raise ZeroDivisionError
        while work.coordinator.take_share(tower) is not None:
            pass  # until the error is known

    work = Work(3, before_apply=before_apply)
    with pytest.raises(ZeroDivisionError):
        work.run(5)
    assert work.shares == []
    assert work.coordinator.staleness == []


def test_a_stop_ends_all_at_the_furthest_step_that_any_has_begun():
    held, work = threading.Event(), None

    def before_fetch(tower, number):
        if (tower, number) == (0, 0):
            assert held.wait(WAIT_SECS)
        if (tower, number) == (2, 2):
            work.coordinator.request_stop()
            held.set()

    work = Work(3, before_fetch=before_fetch)
    work.run(50)
    assert [work.numbers_of(tower) for tower in range(3)] == 3 * [[0, 1, 2]]
    assert work.coordinator.progress() == (3, True, None)
    work.run(50)
    assert len(work.shares) == 9
