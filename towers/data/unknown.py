"""Images of no class: they train as uniform targets, and are never a class."""

import dataclasses

import numpy as np

from towers.data.classes import labels_for
from towers.data.sources import DataSet, Source, Subset
from towers.errors import ConfigError, with_nearest
from towers.messages import counted, shown

UNKNOWN = "unknown"  # the answer for an image of no class


def set_apart(data_set: DataSet, name: str) -> DataSet:
    """Return the data set without a class, whose images are of no class.

    Training images of the class get the label `len(class_names)`. Held-out ones are in
    `DataSet.unknown`, not in the sources of the evaluations. ConfigError if the data
    set lacks the class, has label sets, or a single class is left.
    """
    names, option = data_set.class_names, f"unknown_class={shown(name, 40)}"
    if name not in names:
        raise ConfigError(with_nearest(f"{option}: is not a class", name, names))
    if data_set.multi_label:
        way = "leave out the option, and give these images no label"
        raise ConfigError(f"{option}: images have several labels; {way}")
    rest = tuple(x for x in names if x != name)
    if len(rest) < 2:
        raise ConfigError(f"{option}: fewer than two classes are left; drop the option")
    order = {x: number for number, x in enumerate((*rest, name))}
    table = np.array([order[x] for x in names], np.int32)
    sources, counts = {}, []
    unknown: dict[str, Source] = {}
    for split, source in data_set.sources.items():
        indices = np.arange(source.num_examples)
        relabeled = Subset(source, indices, table)
        known, others = separated(relabeled, indices, len(rest))
        counts.append(counted(others.num_examples, f"{split} image"))
        if not known.num_examples:
            raise ConfigError(f"{option}: there are no other {split} images")
        sources[split] = relabeled if split == "training" else known
        if split != "training":
            unknown[split] = others
    about = f"{', '.join(counts)} of {shown(name, 40)}, which is not a class"
    data_set.inventory.infer("unknown", f"{about}; they train as uniform targets")
    validation = sources.get("validation", data_set.validation and sources["test"])
    return dataclasses.replace(
        data_set,
        train=sources.get("training"),
        test=sources["test"],
        validation=validation,
        class_names=rest,
        unknown=unknown,
    )


def separated(
    source: Source, indices: np.ndarray, num_classes: int
) -> tuple[Subset, Subset]:
    """Return images of the classes, and of no class with the label 0 for the loss."""
    is_known = labels_for(Subset(source, indices), "unknown_class") < num_classes
    others = Subset(source, indices[~is_known], np.zeros(num_classes + 1, np.int32))
    return Subset(source, indices[is_known]), others
