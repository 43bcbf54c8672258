"""Counts of what the reliability tests tried, printed at the end of the tests.

A test takes the fixture `count` and calls `count("kills survived", 5)`. The counts
travel with the reports of the tests, also from the workers of pytest-xdist; those of
tests that fail are left out.
"""

import collections
from collections.abc import Iterable

import pytest

KINDS = (
    "kills survived",
    "crash states replayed",
    "corruptions tried",
    "inputs fuzzed",
    "steps soaked",
    "workers lost",
)


@pytest.fixture
def count(record_property):
    """A function that adds to a count: `count(kind, number)`, kind one of KINDS."""

    def add(kind: str, number: int = 1) -> None:
        assert kind in KINDS, f"{kind!r} is none of {KINDS}"
        record_property(kind, number)

    return add


def totals(reports: Iterable[pytest.TestReport]) -> dict[str, int]:
    """Kind -> sum over the reports; kinds that no test counted are left out."""
    sums = collections.Counter()
    for report in reports:
        for kind, number in report.user_properties:
            if kind in KINDS:
                sums[kind] += number
    return {kind: sums[kind] for kind in KINDS if kind in sums}


def pytest_terminal_summary(terminalreporter):
    sums = totals(terminalreporter.getreports("passed"))
    if sums:
        terminalreporter.section("counts")
    for kind, number in sums.items():
        terminalreporter.write_line(f"{kind}: {number:,}")
