"""The share of every batch that a tower, or one of several processes, computes."""

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Share:
    """Images [first, first + size) of every (micro-)batch of `whole` images."""

    first: int
    size: int
    whole: int

    @classmethod
    def all_of(cls, whole: int) -> "Share":
        """Return the share that is the whole batch."""
        return cls(0, whole, whole)

    def split(self, sizes: Sequence[int]) -> list["Share"]:
        """Return neighboring shares of these sizes, which add up to this one's."""
        ends = itertools.accumulate(sizes, initial=self.first)
        pairs = zip(ends, sizes, strict=False)
        return [Share(first, size, self.whole) for first, size in pairs]

    @property
    def is_whole(self) -> bool:
        """True for the whole batch."""
        return self.size == self.whole

    def rows(self, num_micro_batches: int, with_previous: bool = False) -> list[range]:
        """Return the share's images in a step, a range of numbers for each micro-batch.

        `with_previous` adds the image before each piece, which is mixed with its first
        one; for the first image of a step it is the last.
        """
        num_images = num_micro_batches * self.whole
        if self.is_whole:
            return [range(num_images)]
        rows = []
        for first in range(self.first, num_images, self.whole):
            if with_previous and first == 0:
                rows.append(range(num_images - 1, num_images))
            begin = first - 1 if with_previous and first else first
            rows.append(range(begin, first + self.size))
        return rows


def shares(num_images: int, num_towers: int) -> list[int]:
    """Return the images of each tower; the first take one more if needed."""
    least, more = divmod(num_images, num_towers)
    return [least + (tower < more) for tower in range(num_towers)]
