"""Data sets that need no file: the drawn shapes, always the same; and synthetic,
constant noise of any size."""

import time

import numpy as np
import pytest
from prepared_sets import all_of

from towers.data.sets import shapes


def test_another_load_gives_the_same_bits_and_another_seed_others(monkeypatch):
    monkeypatch.setattr(shapes, "NUM_TRAIN", 40)
    monkeypatch.setattr(shapes, "NUM_TEST", 20)
    first, again, other = (shapes.load(seed=seed) for seed in (0, 0, 1))
    (images, labels), (same, same_labels) = all_of(first.train), all_of(again.train)
    np.testing.assert_array_equal(same, images)
    np.testing.assert_array_equal(same_labels, labels)
    assert again.mean == first.mean
    all_images = [images, all_of(first.test)[0], all_of(other.train)[0]]
    assert len({x.tobytes() for x in np.concatenate(all_images)}) == 100


@pytest.mark.slow
def test_all_images_differ_and_classes_are_balanced():
    started = time.process_time()
    data = shapes.load()
    assert time.process_time() - started < 5
    (images, labels), (test_images, test_labels) = all_of(data.train), all_of(data.test)
    assert images.shape == (10_000, 32, 32, 3) and len(test_images) == 2_000
    assert np.bincount(labels).tolist() == [1_000] * 10
    assert np.bincount(test_labels).tolist() == [200] * 10
    assert np.bincount(labels[:500]).tolist() == [50] * 10
    assert len({x.tobytes() for x in [*images, *test_images]}) == 12_000
    # Loose enough for another NumPy or processor, which may round otherwise.
    np.testing.assert_allclose(data.mean, (125.5, 125.6, 125.8), atol=0.5)
    np.testing.assert_allclose(data.std, (55.9, 56.1, 56.3), atol=0.5)
