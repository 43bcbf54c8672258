"""Functions that are called with many inputs, in bounded time and memory."""

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

from towers.errors import TowersError, data_errors_of_tensorflow
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
    """Call a function with inputs; each call returns or raises a TowersError.

    `codes` are the exit codes that an error may have, `always` further inputs. Few
    inputs are the same each time, unless `derandomize` says otherwise. `most_secs` and
    `most_bytes` bound processor time and growth of memory.
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
        started, error = time.process_time(), None
        try:
            with time_limit(60), memory_limit(most_bytes):
                function(value)
        except TowersError as raised:
            error = raised
        if error is not None:
            line = one_line(error)
            assert error.exit_code in codes, line
            assert 1 <= len(line) <= MAX_CHARACTERS and line.isprintable()
        return time.process_time() - started

    for value in always:
        try_one = example(value)(try_one)
    try_one()


@contextlib.contextmanager
def memory_limit(num_bytes: float) -> Iterator[None]:
    """Raise an AssertionError if the peak memory of a block grows; on Linux alone."""
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


def fuzz_data(num_examples, strategy, call, *, codes=(2, 3), **options):
    """Calls with bytes of a strategy; a call may end with a TowersError alone."""

    call = data_errors_of_tensorflow()(call)
    options |= {"codes": codes, "derandomize": True, "most_secs": 3.0}
    fuzz(call, strategy, num_examples, **options)


@st.composite
def changed(draw, contents):
    """One of some files with bytes changed, put in, or cut off; or any bytes."""
    content = bytearray(draw(st.sampled_from(contents)))
    if draw(st.booleans()):
        return draw(st.binary(max_size=300))
    for _ in range(draw(st.integers(0, 4))):
        # The header is where a change matters.
        last = draw(st.sampled_from([8, 32, 64, len(content)]))
        place = draw(st.integers(0, min(last, len(content))))
        new = draw(st.binary(max_size=6))
        content[place : place + draw(st.sampled_from([0, len(new)]))] = new
    if draw(st.integers(0, 3)) == 0:
        del content[draw(st.integers(0, len(content))) :]
    return bytes(content)
