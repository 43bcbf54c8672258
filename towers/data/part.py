"""The part of every batch that a tower, or one of several processes, computes."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Part:
    """Images [first, first + size) of every (micro-)batch of `whole` images.

    Attributes:
        first, size: of the images.
        whole: images of a (micro-)batch over all processes.
    """

    first: int
    size: int
    whole: int

    @classmethod
    def all_of(cls, whole: int) -> "Part":
        """The whole batch."""
        return cls(0, whole, whole)

    def split(self, sizes: Sequence[int]) -> list["Part"]:
        """Neighboring parts of these sizes, which add up to this one's."""
        ends = itertools.accumulate(sizes, initial=self.first)
        return [
            Part(first, size, self.whole)
            for first, size in zip(ends, sizes, strict=False)
        ]

    @property
    def is_whole(self) -> bool:
        return self.size == self.whole

    def ranges(self, count: int, before: int = 0) -> list[tuple[int, int]]:
        """The places of the part in `count` (micro-)batches, one after the other.

        Args:
            count: of the (micro-)batches.
            before: images that come before each piece of the part and are wanted too; 0
                or 1. Before the first image of all is the last one.

        Returns:
            [first, end) of each piece, in order.
        """
        if self.is_whole:
            return [(0, count * self.whole)]
        ranges = []
        for number in range(count):
            first = number * self.whole + self.first
            if before and first == 0:
                ranges.append((count * self.whole - 1, count * self.whole))
                ranges.append((0, self.size))
            else:
                ranges.append((first - before, first + self.size))
        return ranges


def places(ranges: list[tuple[int, int]]) -> np.ndarray:
    """int64: the places in ranges, one after the other."""
    return np.concatenate([np.arange(*pair, dtype=np.int64) for pair in ranges])


def shares(num_images: int, num_towers: int) -> list[int]:
    """Images per tower; where the batch does not divide, the first take one more."""
    least, more = divmod(num_images, num_towers)
    return [least + (tower < more) for tower in range(num_towers)]
