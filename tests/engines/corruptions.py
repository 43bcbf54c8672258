"""Ways in which files of a run's folder go bad."""

import contextlib
import itertools
import pathlib
import random
import signal
from collections.abc import Iterator

# JSON texts of another form than any file of a run.
WRONG_TEXTS = {
    "empty": "",
    "a number": "2",
    "a list": "[]",
    "an object": "{}",
    "null": "null",
    "a text": '"step"',
    "900 brackets": "[" * 900 + "]" * 900,
    "100,000 brackets": "[" * 100_000 + "]" * 100_000,
    "100,000 open brackets": '{"a":' * 100_000,
    "10**400": "1" + "0" * 400,
    "10**5000": "1" + "0" * 5000,
    "NaN": "NaN",
    "surrogate": '"\\ud800"',
}


@contextlib.contextmanager
def time_limit(secs: float) -> Iterator[None]:
    """Raises TimeoutError in the main thread when the block takes longer."""

    def end(*_):
        raise TimeoutError(f"not finished in {secs:g} s")

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, secs)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


# The content with something else at a place, which is drawn.
AT_A_PLACE = {
    "cut": lambda c, at, rng: c[:at],
    "bit": lambda c, at, rng: _overwritten(c, at, bytes([c[at] ^ 1 << at % 8])),
    "noise": lambda c, at, rng: _overwritten(
        c, at, rng.randbytes(rng.choice((1, 512)))
    ),
    "zeros": lambda c, at, rng: _overwritten(c, at, bytes(rng.choice((1, 64, 4096)))),
}

WHOLE = {
    "without its last byte": lambda c: c[:-1],
    "a zero appended": lambda c: c + b"\0",
    "a line break appended": lambda c: c + b"\n",
    "garbage appended": lambda c: c + bytes(range(256)) * 16,
    "written twice": lambda c: c + c,
    "all zeros": lambda c: bytes(len(c)),
    "all ones": lambda c: b"\xff" * len(c),
    "reversed": lambda c: c[::-1],
} | {
    name: lambda c, text=text: text.encode("utf-8", "surrogatepass")
    for name, text in WRONG_TEXTS.items()
}

IN_ITS_PLACE = {
    "missing": lambda path: None,
    "a folder": pathlib.Path.mkdir,
    "a dangling link": lambda path: path.symlink_to("absent"),
}


def damages(num_places: int) -> Iterator[str]:
    """The names of all damages of a file, those at a place for so many places."""
    yield from itertools.chain(WHOLE, IN_ITS_PLACE)
    for name, number in itertools.product(AT_A_PLACE, range(num_places)):
        yield f"{name} {number}"


def damage(path: pathlib.Path, name: str) -> None:
    if name in IN_ITS_PLACE:
        path.unlink()
        IN_ITS_PLACE[name](path)
        return
    content = path.read_bytes()
    if name in WHOLE:
        path.write_bytes(WHOLE[name](content))
    elif content:
        rng = random.Random(name)
        change = AT_A_PLACE[name.partition(" ")[0]]
        path.write_bytes(change(content, rng.randrange(len(content)), rng))


def _overwritten(content, at, block):
    """The size stays."""
    block = block[: len(content) - at]
    return content[:at] + block + content[at + len(block) :]
