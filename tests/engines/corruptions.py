"""Ways in which files of a run's folder go bad."""

import contextlib
import json
import pathlib
import random
import signal
from collections.abc import Callable, Iterator

from example_checkpoints import STATE, rewrite_manifest

Damage = Callable[[pathlib.Path], None]

# JSON texts of another form than any file of a run.
WRONG_TEXTS = {
    "empty": "",
    "a number": "2",
    "a list": "[]",
    "an object": "{}",
    "null": "null",
    "a text": '"step"',
    "3,000 brackets": "[" * 3000 + "]" * 3000,
    "900 brackets": "[" * 900 + "]" * 900,
    "100,000 brackets": "[" * 100_000 + "]" * 100_000,
    "100,000 open brackets": '{"a":' * 100_000,
    "10**400": "1" + "0" * 400,
    "10**5000": "1" + "0" * 5000,
    "NaN": "NaN",
    "surrogate": '"\\ud800"',
}

# JSON texts of values that a key may hold wrongly.
WRONG_VALUES = (
    *("null", "true", "-1", "0", "1.5", "NaN", "Infinity", '"2"', "[]", "{}", "[1]"),
    *('{"step": null}', '[{"step": "x"}]', "1" + "0" * 400, "1e308", '"\\ud800"'),
    *("[" * 300 + "]" * 300, '{"step":' * 300 + "1" + "}" * 300),
    '{"step": 1, "accuracy": 0.5, "more": ' + "[" * 800 + "]" * 800 + "}",
)


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


def damages(num_places: int, seed: int) -> Iterator[tuple[str, Damage]]:
    """(name, damage) of a file: some at so many places, and other contents.

    Args:
        num_places: of truncations, flipped bits and overwritten blocks.
        seed: of the places.
    """
    rng = random.Random(seed)
    for i in range(num_places):
        part = i / num_places
        yield f"cut at {part:.3f}", _changed(lambda c, p=part: c[: int(p * len(c))])
        part, bit = rng.random(), rng.randrange(8)
        yield (
            f"bit {bit} at {part:.4f}",
            _changed(
                lambda c, p=part, bit=bit: (
                    _overwritten(c, p, bytes([c[int(p * len(c))] ^ 1 << bit]))
                    if c
                    else c
                )
            ),
        )
        part, length = rng.random(), rng.choice((1, 8, 512))
        noise = rng.randbytes(length)
        yield (
            f"{length} random bytes at {part:.4f}",
            _changed(lambda c, p=part, new=noise: _overwritten(c, p, new)),
        )
        part, length = rng.random(), rng.choice((1, 64, 4096))
        yield (
            f"{length} zeros at {part:.4f}",
            _changed(lambda c, p=part, n=length: _overwritten(c, p, bytes(n))),
        )
    for name, change in _CHANGES.items():
        yield name, _changed(change)
    yield "missing", pathlib.Path.unlink
    yield "a folder", _in_place(pathlib.Path.mkdir)
    yield "a dangling link", _in_place(lambda path: path.symlink_to("absent"))


def _changed(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def _in_place(make: Callable[[pathlib.Path], None]) -> Damage:
    """The damage that removes a file and makes something else of its name."""

    def damage(path):
        path.unlink()
        make(path)

    return damage


def _overwritten(content, part, block):
    """The content with a block after a part of it; its size stays."""
    start = int(part * len(content))
    block = block[: len(content) - start]
    return content[:start] + block + content[start + len(block) :]


_CHANGES = {
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


def resign(checkpoint: pathlib.Path, state_text: str) -> None:
    """Writes another trainer state, and a manifest that agrees with it."""
    content = state_text.encode("utf-8", "surrogatepass")
    (checkpoint / STATE).write_bytes(content)
    rewrite_manifest(checkpoint)


def wrong_states(state_text: str, inside: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(name, text) of trainer states of another form: other JSON, and each key missing
    or with each wrong value, also of the objects under the keys `inside`."""
    yield from WRONG_TEXTS.items()
    state = json.loads(state_text)
    places = [(key,) for key in state]
    places += [(key, below) for key in inside for below in state[key]]
    for place in places:
        for text in ("missing", *WRONG_VALUES):
            yield f"{'.'.join(place)}: {text[:30]}", _with_value(state, place, text)


def _with_value(state, place, text):
    *parents, key = place
    changed = json.loads(json.dumps(state))
    owner = changed
    for parent in parents:
        owner = owner[parent]
    if text == "missing":
        del owner[key]
        return json.dumps(changed)
    owner[key] = "PLACE"  # a text takes values that Python cannot write
    return json.dumps(changed).replace('"PLACE"', text)
