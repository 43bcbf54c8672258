"""Images whose label is probably wrong."""

import os
from typing import Any

import numpy as np

from towers import console
from towers.data.sources import location_of
from towers.evaluation.split_predictions import (
    SplitPredictions,
    predict_split,
    write_to_run,
)
from towers.messages import shown
from towers.metrics.results import spreadsheet_csv
from towers.run.folder import RunFolder

# Probabilities that differ by less are equal in a search for label errors.
TOLERANCE = 1e-6

SUSPECT_COLUMNS = (
    *("index", "path", "label", "suggestion"),
    *("probability", "probability_of_suggestion"),
)


def find_suspects(
    workdir: str | os.PathLike, split: str = "train", **options: Any
) -> list[dict[str, Any]]:
    """Find images whose label is probably wrong, and write `suspects.csv`.

    See `label_errors`.

    Args:
        workdir: the run's folder.
        split: see `predict_split`. A network has learned some of the wrong labels of
            the images that it was trained on, but not of "validation".
        **options: of `predict_split`.

    Returns:
        The rows of the file, the likeliest errors first: "index" in the split, "path",
        "label", "suggestion", and "probability" of the label and of the suggestion,
        "probability_of_suggestion". Of label sets a row is about one class: the name of
        a class that an image lacks, or should lack, begins with "no ".

    Raises:
        ConfigError: the run has no images of the split.
    """
    if split == "train":
        why = "the network has learned some wrong labels of these images"
        console.warn(f"{why}; --split=validation, or --folds, find more")
    predicted = predict_split(workdir, split, **options)
    rows = suspect_rows(predicted)
    text = spreadsheet_csv(SUSPECT_COLUMNS, (row.values() for row in rows))
    if write_to_run(workdir, "suspects", text):
        count = f"{len(rows)} of {len(predicted.labels)} labels"
        path = RunFolder(workdir).suspects
        console.line(f"{count} are suspected to be wrong: {path}")
    return rows


def suspect_rows(predicted: SplitPredictions) -> list[dict[str, Any]]:
    """Return the rows of `find_suspects`."""
    labels, names, rows = predicted.labels, predicted.class_names, []
    probabilities, multi_label = predicted.probabilities, labels.ndim == 2
    find = label_set_errors if multi_label else label_errors
    for index, other in zip(*find(labels, probabilities), strict=True):
        suggested = probabilities[index, other]
        suggestion = names[other]
        if multi_label:
            label, own = f"no {suggestion}", 1 - suggested
            if labels[index, other]:
                label, suggestion, own, suggested = suggestion, label, suggested, own
        else:
            label, own = names[labels[index]], probabilities[index, labels[index]]
        path = shown(location_of(predicted.source, int(index)), most=4096)
        numbers = round(float(own), 6), round(float(suggested), 6)
        cells = int(index), path, label, suggestion, *numbers
        rows.append(dict(zip(SUSPECT_COLUMNS, cells, strict=True)))
    return rows


def label_errors(
    labels: np.ndarray, probabilities: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find images that a network confidently assigns to another class than their label.

    It is confident of a class if its probability is at least the mean over the images
    with this label; of several classes the most probable one counts. Images that are
    predicted as their label are left out, as in cleanlab, which has the same tolerance.
    Source: Northcutt et al. 2021, "Confident learning", arXiv:1911.00068.

    Labels are integers [n], probabilities [n, classes]; images and classes come with
    the least probable labels first.
    """
    images = np.arange(len(labels))
    counts = np.bincount(labels, minlength=probabilities.shape[1])
    own = probabilities[images, labels]
    means = np.bincount(labels, own, len(counts)) / np.maximum(counts, 1)
    means[counts == 0] = np.inf
    confident = probabilities >= np.maximum(means, 2 * TOLERANCE) - TOLERANCE
    is_single = confident.sum(1) == 1
    classes = np.where(is_single, confident.argmax(1), probabilities.argmax(1))
    raised = probabilities.copy()
    raised[images, labels] += TOLERANCE
    is_wrong = confident.any(1) & (classes != labels) & (raised.argmax(1) != labels)
    wrong = np.flatnonzero(is_wrong)
    order = np.argsort(own[wrong] - probabilities[wrong, classes[wrong]], kind="stable")
    return wrong[order], classes[wrong][order]


def label_set_errors(
    labels: np.ndarray, probabilities: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return images, and classes that they lack or should lack, as `label_errors`."""
    pairs = []
    for number in range(labels.shape[1]):
        positive = probabilities[:, number]
        both = np.column_stack([1 - positive, positive])
        wrong, _ = label_errors(labels[:, number].astype(np.int64), both)
        pairs += [(image, number) for image in wrong]
    images, classes = np.array(pairs, np.int64).reshape(-1, 2).T
    own = np.where(labels, probabilities, 1 - probabilities)[images, classes]
    order = np.argsort(own, kind="stable")
    return images[order], classes[order]
