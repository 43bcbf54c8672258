"""Inventory of a data set: what was used, inferred and left out."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from towers.messages import shown

if TYPE_CHECKING:
    from towers.data.sources import DataSet

MAX_CLASSES = 10
MAX_NAMES = 3
MAX_COLUMNS = 20


@dataclasses.dataclass
class Inventory:
    """The readings of the files, columns and labels that a user named.

    Every reader fills one; the start banner, `--dry_run`, `python -m towers.check` and
    `dataset_info.json` print it.
    """

    # "training", "validation" or "test" -> the origin of its images.
    splits: dict[str, str] = dataclasses.field(default_factory=dict)
    # Heading such as "columns" -> what was concluded from the data.
    inferred: dict[str, str] = dataclasses.field(default_factory=dict)
    # Kind, a plural noun such as "other files" -> number of things that are not used,
    # and the first MAX_NAMES of them, of columns MAX_COLUMNS.
    unused: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    names: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def infer(self, heading: str, text: str) -> None:
        """Record a conclusion under a heading of at most 11 characters."""
        self.inferred[heading] = text

    def leave_out(self, kind: str, *names: str) -> None:
        """Record things that are not used, by a plural noun and their names."""
        if not names:
            return
        self.unused[kind] += len(names)
        first = self.names.setdefault(kind, [])
        limit = MAX_COLUMNS if kind == "columns" else MAX_NAMES
        first += names[: limit - len(first)]

    def lines(self, data_set: "DataSet") -> Iterator[tuple[str, str]]:
        """Yield (heading, text) of each line."""
        yield "classes", _classes(data_set)
        yield from self.splits.items()
        yield from self.inferred.items()
        for kind, count in self.unused.items():
            names = ", ".join(shown(name, 100) for name in self.names[kind])
            more = ", ..." if count > len(self.names[kind]) else ""
            yield "not used", f"{kind} ({count:,}): {names}{more}"


def _classes(data_set):
    """Describe the classes with their numbers of training images, or test images."""
    from towers.data.classes import images_of_classes
    from towers.data.sources import known_labels

    names = [shown(name, 40) for name in data_set.class_names[:MAX_CLASSES]]
    source = data_set.test if data_set.train is None else data_set.train
    labels = known_labels(source)
    if labels is not None and len(labels):
        counts = images_of_classes(np.maximum(labels, 0), len(data_set.class_names))
        names = [f"{name} {n:,}" for name, n in zip(names, counts, strict=False)]
    more = ", ..." if len(data_set.class_names) > MAX_CLASSES else ""
    return f"{len(data_set.class_names):,}: {', '.join(names)}{more}"
