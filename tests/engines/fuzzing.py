"""Functions that are called with many inputs: each call gives a result or one line, in
bounded time and memory."""

import contextlib
import pathlib
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import pytest
from engines.corruptions import time_limit
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from marks import slow

from towers.errors import TowersError
from towers.messages import MAX_CHARACTERS, one_line

# Inputs of each test in the fast suite, which are the same each time.
FEW, MANY = 30, 1000
# Processor time, and growth of memory, of an input.
MAX_SECS = 1.0
MAX_BYTES = 300e6

many_inputs = pytest.mark.parametrize("num_inputs", [FEW, slow(MANY)])


def fuzz(
    function: Callable[[Any], object],
    inputs: st.SearchStrategy,
    num_inputs: int,
    *,
    codes: Container[int] = (2,),
    always: Iterable[Any] = (),
    derandomize: bool | None = None,
    most_secs: float = MAX_SECS,
    most_bytes: float = MAX_BYTES,
) -> None:
    """Calls a function with inputs.

    Each call returns or raises a TowersError.

    Args:
        function: is called with one input at a time.
        inputs: what they are drawn from.
        num_inputs: how many are drawn.
        codes: the exit codes that an error may have.
        always: inputs that are tried besides.
        derandomize: whether the inputs are the same each time; by default where they
            are few.
        most_secs: processor time of an input.
        most_bytes: by which the memory may grow during an input.
    """

    @settings(
        max_examples=num_inputs,
        derandomize=num_inputs < MANY if derandomize is None else derandomize,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs)
    def try_one(value):
        # The process may do something else meanwhile, such as collect its garbage.
        assert any(seconds_of(value) < most_secs for _ in range(3))

    def seconds_of(value):
        started = time.process_time()
        try:
            with time_limit(60), memory_limit(most_bytes):
                function(value)
        except TowersError as error:
            line = one_line(error)
            assert error.exit_code in codes, line
            assert 1 <= len(line) <= MAX_CHARACTERS and line.isprintable()
        return time.process_time() - started

    for value in always:
        try_one = example(value)(try_one)
    try_one()


@contextlib.contextmanager
def memory_limit(num_bytes: float) -> Iterator[None]:
    """Raises an AssertionError where the block, at its peak, needs more memory than
    before. Only Linux tells."""
    peak_of_process = pathlib.Path("/proc/self/clear_refs")
    if not peak_of_process.exists():
        yield
        return
    peak_of_process.write_text("5")  # resets it; see proc(5)
    before = _memory("VmRSS")
    try:
        yield
    finally:
        grown = _memory("VmHWM") - before
        assert grown < num_bytes, f"{grown:,} bytes"


def _memory(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"^{field}:\s+(\d+)", status, re.MULTILINE)[1])
