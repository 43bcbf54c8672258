"""Few cases that together have every pair of values of any two axes."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Case = Mapping[str, Any]  # axis -> value


def pairwise(
    axes: Mapping[str, Sequence],
    first: Sequence[Case] = (),
    is_possible: Callable[[Case], bool] = lambda case: True,
    apart: Sequence[set[str]] = (),
) -> list[Case]:
    """The cases `first`, then each time one with a pair that is missing: of some random
    ones that which has most others.

    Args:
        axes: name -> its values, the default first.
        is_possible: of a whole case.
        apart: pairs of axes that do not meet.
    """

    def pairs(case) -> Iterator:
        for pair in itertools.combinations(sorted(case), 2):
            if set(pair) not in apart:
                yield tuple((axis, case[axis]) for axis in pair)

    draw, chosen, missing = random.Random(0), list(first), {}
    default = {axis: values[0] for axis, values in axes.items()}
    for one, other in itertools.combinations(sorted(axes), 2):
        for values in itertools.product(axes[one], axes[other]):
            pair = tuple(zip((one, other), values, strict=True))
            if {one, other} not in apart and is_possible(default | dict(pair)):
                missing[pair] = None
    for case in chosen:
        for pair in pairs(case):
            missing.pop(pair, None)
    while missing:
        fixed = dict(next(iter(missing)))
        drawn = [{k: draw.choice(v) for k, v in axes.items()} for _ in range(60)]
        candidates = [default | fixed, *(case | fixed for case in drawn)]
        chosen.append(
            max(
                filter(is_possible, candidates),
                key=lambda case: sum(pair in missing for pair in pairs(case)),
            )
        )
        for pair in pairs(chosen[-1]):
            missing.pop(pair, None)
    return chosen
