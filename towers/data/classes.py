"""Classes with few images, weights of the classes, and offsets of the logits."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any
from unicodedata import normalize

import numpy as np

from towers.data.files.paths import reason
from towers.data.files.reading import read_data_file
from towers.data.sources import DataSet, Source, known_labels
from towers.errors import ConfigError, with_nearest
from towers.messages import shown

BALANCED = "balanced"

FEW = 0.1  # classes with fewer images than this share of the largest class are reported
MAX_NAMED = 5

MAX_FILE_BYTES = 2**24


def few_images(data_set: DataSet) -> list[str]:
    """Return a line that names the classes with few images; empty without such."""
    num_classes, named = len(data_set.class_names), []
    for split, source in data_set.sources.items():
        labels = known_labels(source)
        if labels is None:
            continue
        counts = images_of_classes(labels, num_classes)
        few = np.flatnonzero(counts < FEW * counts.max())
        names = [f"{shown(data_set.class_names[i], 40)} {counts[i]:,}" for i in few]
        if names[MAX_NAMED:]:
            names = [*names[:MAX_NAMED], f"{len(names) - MAX_NAMED} more"]
        if names:
            named.append(f"{', '.join(names)} of {counts.max():,} {split} images")
    if not named:
        return []
    about = "few images of some classes, compared with the largest"
    return [f"{about}: {'; '.join(named)}; see --class_weights and --sampler"]


def similar_names(class_names: Sequence[str]) -> list[str]:
    """Return a line that names classes which differ only in case or leading zeros."""
    by_plain: dict[str, list[str]] = {}
    for name in class_names:
        plain = re.sub(r"\b0+(?=\d)", "", name.casefold())
        by_plain.setdefault(plain, []).append(shown(name, 40))
    pairs = [" and ".join(names) for names in by_plain.values() if names[1:]]
    if not pairs:
        return []
    named = shown("; ".join(pairs[:MAX_NAMED]))
    return [f"classes whose names differ only in case or leading zeros: {named}"]


def images_of_classes(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Count the images of each class, from integers [n] or sets [n, classes]."""
    if labels.ndim == 2:
        return labels.sum(0, dtype=np.int64)
    # Images of no class are labeled `num_classes`.
    return np.bincount(labels, minlength=num_classes)[:num_classes]


def class_weights(
    text: str,
    source: Source,
    class_names: tuple[str, ...],
    option: str = "class_weights",
) -> tuple[float, ...]:
    """Return class weights for the text of `class_weights` or `pos_weights`.

    `"balanced"`: inverse frequencies with the mean 1 over the images (label sets: over
    their labels), or for `pos_weights` negatives divided by positives. Otherwise a JSON
    file, an object of class names and numbers, or pairs in JSON of a class and a
    weight. 1 for other classes. ConfigError if the labels are not known, or the file is
    wrong.
    """
    if text == BALANCED:
        labels = labels_for(source, f"{option}={BALANCED}")
        counts = images_of_classes(labels, len(class_names))
        weights = counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1))
        # A smoothed label has a part of a class without images.
        weights = np.where(counts > 0, weights, 1.0)
        if option == "pos_weights":
            rest = len(labels) - counts
            weights = np.where(counts * rest > 0, rest / np.maximum(counts, 1), 1.0)
        return tuple(weights.tolist())
    option = f"{option}={shown(text)}"
    try:
        is_json = text.startswith("[[")  # of a dict, see `options.check_option`
        content = text if is_json else read_data_file(text, MAX_FILE_BYTES)
        weights = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        example = f'{{"{shown(class_names[0], 40)}": 2.0}}'
        way = f"give {BALANCED}, or a JSON file such as {example}"
        raise ConfigError(f"{option}: {reason(error)}; {way}") from None
    weights = dict(weights) if is_json else weights
    if not isinstance(weights, dict):
        raise ConfigError(f"{option}: an object of classes and weights is expected")
    weights = {
        x if isinstance(x, int) else normalize("NFC", str(x)): weight
        for x, weight in weights.items()
    }
    names = [normalize("NFC", name) for name in class_names]
    numbers = range(len(names))
    for name, weight in weights.items():
        if name not in (numbers if isinstance(name, int) else names):
            message = f"{option}: unknown class {shown(str(name), 40)!r}"
            raise ConfigError(with_nearest(message, name, names))
        if type(weight) not in (int, float) or not 0 <= weight < math.inf:
            what = f"the weight of {shown(str(name), 40)}"
            raise ConfigError(f"{option}: {what} must be 0 or more, is {weight!r:.40}")
    return tuple(float(weights.get(i, weights.get(x, 1))) for i, x in enumerate(names))


def logit_offsets(factor: float, source: Source, num_classes: int) -> tuple[float, ...]:
    """Return offsets of the training logits (Menon et al. 2020, arXiv:2007.07314)."""
    labels = labels_for(source, f"logit_adjustment={factor}")
    counts = np.maximum(images_of_classes(labels, num_classes), 1)
    return tuple((factor * np.log(counts / len(labels))).tolist())


def labels_for(source: Any, option: str) -> np.ndarray:
    """Return the labels of all training images, or raise a ConfigError."""
    if not hasattr(source, "labels"):
        way = "give its source a NumPy array `labels`"
        raise ConfigError(f"{option}: the labels of this data set are not known; {way}")
    if source.labels is None:
        return source.read_labels(np.arange(source.num_examples))
    return source.labels
