"""Images whose label is probably wrong, by confident learning (Northcutt et al. 2021,
arXiv:1911.00068)."""

import numpy as np


def label_errors(
    labels: np.ndarray, probabilities: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The images that a network confidently assigns to another class than their label.

    It is confident of a class where its probability is at least the mean over the
    images that are labeled so.

    Args:
        labels: integers [n].
        probabilities: [n, classes], of a network that was not trained on these images.

    Returns:
        Indices of the images, int64 [m], and the classes that they rather have, int64
        [m]; first those whose label is the least probable next to this class.
    """
    images = np.arange(len(labels))
    counts = np.bincount(labels, minlength=probabilities.shape[1])
    own = probabilities[images, labels]
    means = np.bincount(labels, own, len(counts)) / np.maximum(counts, 1)
    means[counts == 0] = np.inf
    confident = np.where(probabilities >= means, probabilities, -np.inf)
    classes = confident.argmax(1)
    most = confident[images, classes]
    wrong = np.flatnonzero((most > -np.inf) & (classes != labels))
    order = np.argsort(own[wrong] - most[wrong], kind="stable")
    return wrong[order], classes[wrong][order]


def label_set_errors(
    labels: np.ndarray, probabilities: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`label_errors` of label sets: each class is a question with two answers.

    Args:
        labels: bool [n, classes].
        probabilities: [n, classes].

    Returns:
        Indices of images, int64 [m], and of classes, int64 [m], that they have and
        should not, or lack; the least probable first.
    """
    pairs = []
    for number in range(labels.shape[1]):
        of_class = probabilities[:, number]
        both = np.column_stack([1 - of_class, of_class])
        wrong, _ = label_errors(labels[:, number].astype(np.int64), both)
        pairs += [(image, number) for image in wrong]
    images, classes = np.array(pairs, np.int64).reshape(-1, 2).T
    own = np.where(labels, probabilities, 1 - probabilities)[images, classes]
    order = np.argsort(own, kind="stable")
    return images[order], classes[order]
