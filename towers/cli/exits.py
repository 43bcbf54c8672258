"""The end of a program, without that of its interpreter."""

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def exiting_at_once() -> Iterator[None]:
    """Let SystemExit end the process after the functions of `atexit`.

    An interpreter that ends crashes where a thread is in TensorFlow: exit code 134 or
    139 of a program that has done its work.
    """
    exit_codes: list[int] = []
    atexit.register(_exit, exit_codes)  # before others, to be called after them
    try:
        yield
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            exit_codes.append(end.code or 0)
        raise


def _exit(exit_codes):
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # lost, or closed
            stream.flush()
    if exit_codes:
        os._exit(exit_codes[0])
