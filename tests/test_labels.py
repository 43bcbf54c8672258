"""Labels of a data set: they are those of its classes, whatever loads it."""

import pytest
from prepared_sets import CLASSES, features, random_examples, store

from towers import data
from towers.errors import DataError

IN_A_FILE = """
import numpy as np
from towers.data.sources import ArraySource, DataSet

class Unlisted:
    def __init__(self, source):
        self.num_examples, self.image_shape = source.num_examples, source.image_shape
        self.read = source.read

def load():
    images = np.zeros((30, 8, 8, 3), np.uint8)
    labels = np.arange(30) % 10
    train, test = ArraySource(images, {train}), ArraySource(images, {test})
    return DataSet("mine", {kind}(train), {kind}(test), tuple("abcdefghij"),
                   (0.0,) * 3, (1.0,) * 3, "here")
"""


@pytest.mark.parametrize("kind", ["", "Unlisted"])
@pytest.mark.parametrize(
    "train, test, words",
    [
        ("labels + 1", "labels", r"training image 9 .*the label 10, .*; 2 more are"),
        ("labels", "labels - 1", r"test image 0 .*has the label -1, "),
    ],
)
@pytest.mark.row(21, 47)
def test_row_21_labels_outside_of_the_classes(tmp_path, kind, train, test, words):
    path = tmp_path / "mine.py"
    path.write_text(IN_A_FILE.format(train=train, test=test, kind=kind))
    with pytest.raises(DataError, match=words) as caught:
        data.load(f"{path}:load")
    assert "expected 0 to 9 for 10 classes" in str(caught.value)


def test_row_21_one_hot_labels(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(IN_A_FILE.format(train="np.eye(30)", test="labels", kind=""))
    with pytest.raises(ValueError, match=r"integers \[n\], got \[30, 30\]"):
        data.load(f"{path}:load")


@pytest.mark.parametrize("file_format", ["tfrecord", "array_record"])
@pytest.mark.row(21)
def test_row_21_labels_of_tensorflow_datasets(tmp_path, file_format):
    import tensorflow_datasets

    examples = random_examples(6, 0)
    examples[4]["label"] = len(CLASSES)
    spec = features(label=tensorflow_datasets.features.ClassLabel(num_classes=4))
    folder = store(tmp_path, examples, examples, spec=spec, file_format=file_format)
    path = tmp_path / "shapes" / "1.2.3" / "features.json"
    four, three = ('"numClasses": "4"', '"numClasses": "3"')
    path.write_text(path.read_text().replace(four, three))
    with pytest.raises(DataError, match="has the label 3, expected 0 to 2") as caught:
        data.load("tfds:shapes", str(tmp_path))
    assert folder in str(caught.value)
