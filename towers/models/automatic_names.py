"""Keras' automatic names of layers, such as conv2d_3.

Keras numbers them per class through a process, so that the same network has other
numbers in another process. Their order is always that in which the layers were made.
"""

import inspect
import re
from collections.abc import Iterable

from keras import layers


def split_number(name: str) -> tuple[str, int]:
    """conv2d_3 -> conv2d and 3; the number of conv2d is 0."""
    match = re.fullmatch(r"(.*?)(?:_(\d{1,9}))?", name, re.DOTALL)
    return match[1], int(match[2] or 0)


def snake_case(name: str) -> str:
    """The stem of Keras' automatic names: conv2d of Conv2D, re_lu of ReLU."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def match_layers(ours: Iterable[str], theirs: Iterable[str]) -> dict[str, str | None]:
    """Pairs the layers with automatic names of the same network, built twice.

    Args:
        ours, theirs: names of layers that have variables.

    Returns:
        Our name -> their name; None where they have another number of layers of the
        class, so that it cannot be known. Explicit names, and classes that they do not
        have, are left out.
    """
    ours, theirs = _by_stem(ours), _by_stem(theirs)
    pairs = {}
    for stem in ours.keys() & theirs.keys():
        is_known = len(ours[stem]) == len(theirs[stem])
        their_names = theirs[stem] if is_known else [None] * len(ours[stem])
        pairs |= zip(ours[stem], their_names, strict=True)
    return pairs


def _by_stem(names):
    """Stem -> the automatic names of it, in the order of their numbers."""
    classes = inspect.getmembers(layers, inspect.isclass)
    stems = {snake_case(name) for name, _ in classes}
    groups = {}
    for name in sorted(set(names), key=split_number):
        stem, _ = split_number(name)
        if stem in stems:
            groups.setdefault(stem, []).append(name)
    return groups
