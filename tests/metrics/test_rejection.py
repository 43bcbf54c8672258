"""Thresholds below which an image is answered with unknown."""

import numpy as np
import pytest
from scipy import special
from sklearn import metrics

from towers.errors import ConfigError
from towers.metrics.rejection import Answers, choose_threshold, wish_of

RNG = np.random.default_rng(0)
LOGITS = np.round(3 * RNG.standard_normal((90, 4)), 1)  # some probabilities are equal
LABELS = np.where(RNG.random(70) < 0.6, LOGITS[:70].argmax(1), 3)
ANSWERS = Answers.of(LOGITS, LABELS, 1.7)


def numpy_answers():
    """Probabilities and correctness; the last 20 images are of no class."""
    probabilities = special.softmax(LOGITS / 1.7, axis=1)
    correct = np.append(probabilities[:70].argmax(1) == LABELS, np.zeros(20, bool))
    return probabilities.max(1), correct


def at(threshold):
    """Precision and coverage by a loop over the images."""
    answered = right = known = 0
    for number, (p, is_right) in enumerate(zip(*numpy_answers(), strict=True)):
        if p >= threshold:
            answered, right = answered + 1, right + is_right
            known += number < 70
    return right / answered, known / 70


def test_the_curve_is_that_of_a_loop_over_the_images():
    precision, coverage, thresholds = ANSWERS.curve()
    np.testing.assert_allclose(thresholds, np.unique(numpy_answers()[0])[::-1])
    for row in zip(precision, coverage, thresholds, strict=True):
        assert row[:2] == pytest.approx(at(row[2] - 1e-9))
    probabilities, correct = numpy_answers()
    theirs, _, _ = metrics.precision_recall_curve(correct, probabilities)
    np.testing.assert_allclose(precision, theirs[-2::-1])


@pytest.mark.parametrize("wish", [0.5, 0.6, 0.73, 0.9])
def test_a_threshold_grants_the_wish_and_no_other_grants_more(wish):
    candidates = np.unique(numpy_answers()[0])
    precise = [at(x)[1] for x in candidates - 1e-9 if at(x)[0] >= wish]
    chosen = choose_threshold(ANSWERS, "precision_at", wish)
    assert at(chosen)[0] >= wish and at(chosen)[1] == max(precise)
    covering = [at(x)[0] for x in candidates - 1e-9 if at(x)[1] >= wish]
    chosen = choose_threshold(ANSWERS, "coverage_at", wish)
    assert at(chosen)[1] >= wish and at(chosen)[0] == covering[-1]
    figures = ANSWERS.figures(chosen)
    assert (figures["precision"], figures["coverage"]) == pytest.approx(at(chosen))
    rejected = np.mean(numpy_answers()[0][70:] < chosen)
    assert figures["unknown_rejected"] == pytest.approx(rejected)
    gap = np.abs(candidates - chosen).min()  # halfway, so that rounding does not matter
    assert gap > 1e-5


def test_what_cannot_be_reached_is_said_with_what_can():
    right = np.array([False, True, True, False])
    answers = Answers(np.array([0.9, 0.8, 0.7, 0.6]), right, 4)
    words = r"precision_at=0.9: .* 0\.6667 can be reached.* coverage 0\.7500"
    with pytest.raises(ConfigError, match=words):
        choose_threshold(answers, "precision_at", 0.9)
    assert choose_threshold(answers, "precision_at", 0.666) == pytest.approx(0.65)
    for wishes in ((None, None), (0.5, 0.5), (0.0, None), (None, 1.5)):
        with pytest.raises(ConfigError, match=r"precision_at|coverage_at"):
            wish_of(*wishes)


def test_an_image_with_nan_is_never_answered():
    logits = LOGITS.copy()
    logits[:7] = np.nan
    answers = Answers.of(logits, LABELS, 1.7)
    chosen = choose_threshold(answers, "coverage_at", 0.9)
    assert answers.figures(chosen)["coverage"] == pytest.approx(0.9)
    with pytest.raises(ConfigError, match=r"coverage_at=0.91: .*at most 0\.9000"):
        choose_threshold(answers, "coverage_at", 0.91)
