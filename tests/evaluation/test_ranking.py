"""The order in which unlabeled images are worth a label."""

import numpy as np
import pytest
from PIL import Image
from scipy import special

from towers.evaluation import ranking
from towers.evaluation.ranking import farthest_first, ranked, write_sheet


def brute_force(features, first):
    """Greedy k-center by all distances."""
    distances = np.linalg.norm(features[:, None] - features[None], axis=2)
    order, rest = [first], set(range(len(features))) - {first}
    while rest:
        nearest = {i: distances[i, order].min() for i in rest}
        order.append(max(sorted(rest), key=nearest.get))
        rest.remove(order[-1])
    return order


def test_k_center_is_the_greedy_one(monkeypatch):
    features = np.random.default_rng(0).standard_normal((60, 5)) + 1000
    expected = brute_force(features, 17)
    assert farthest_first(features, 17).tolist() == expected
    monkeypatch.setattr(ranking, "MAX_CENTERS", 20)
    order = farthest_first(features, 17)
    assert order[:20].tolist() == expected[:20]
    assert sorted(order) == [*range(60)]
    centers = features[order[:20]]
    nearest = np.linalg.norm(features[order[20:], None] - centers, axis=2).min(1)
    assert (np.diff(nearest) <= 1e-9).all()


def test_near_duplicates_do_not_fill_the_first_places():
    rng = np.random.default_rng(0)
    others = rng.standard_normal((10, 8))
    copies = others[0] + 1e-3 * rng.standard_normal((20, 8))
    features = np.concatenate([copies, others[1:]])
    logits = rng.standard_normal((29, 3))
    logits[:20] *= 0.01  # the copies are the least certain ones
    probabilities = special.softmax(logits, axis=1)
    assert set(ranked("uncertain", probabilities, features)[:20]) == {*range(20)}
    first = ranked("diverse", probabilities, features)[:10]
    assert np.sum(first < 20) == 1 and first[0] < 20


def test_the_smallest_margin_is_first():
    probabilities = np.array([[0.9, 0.1, 0], [0.4, 0.35, 0.25], [np.nan] * 3])
    assert ranked("uncertain", probabilities, probabilities).tolist() == [2, 1, 0]
    thresholds = np.array([0.5, 0.9, 0.1])  # of label sets
    probabilities = np.array([[0.9, 0.1, 0.6], [0.4, 0.8, 0.9], [0, 0.91, 0.9]])
    order = ranked("uncertain", probabilities, probabilities, thresholds)
    assert order.tolist() == [2, 1, 0]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_the_sheet_has_the_images_in_order(channels, tmp_path):
    images = [np.full((8, 4, channels), 20 * i, np.uint8) for i in range(11)]
    path = tmp_path / "sheet.png"
    write_sheet(str(path), images, ["a"] * 11)
    sheet = np.asarray(Image.open(path))
    side, height = ranking.SIDE, ranking.SIDE + ranking.LINE
    assert sheet.shape == (2 * height, 10 * side, 3)
    for number in range(11):
        row, column = divmod(number, 10)
        pixel = sheet[row * height + side // 2, column * side + side // 4]
        assert pixel.tolist() == [20 * number] * 3
