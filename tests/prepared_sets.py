"""Small data sets that tensorflow-datasets itself writes into a folder."""

import numpy as np
import pytest
import tensorflow as tf

from towers.errors import DataError

CLASSES = ["circle", "square", "star"]


def features(**changes):
    from tensorflow_datasets import features

    parts = {
        "image": features.Image(shape=(8, 6, 3)),
        "label": features.ClassLabel(names=CLASSES),
        "id": features.Text(),
        **changes,
    }
    return features.FeaturesDict({k: v for k, v in parts.items() if v is not None})


def random_examples(num_examples, seed):
    rng = np.random.default_rng(seed)
    return [
        {
            "image": rng.integers(0, 256, (8, 6, 3)).astype(np.uint8),
            "label": int(rng.integers(3)),
            "id": f"{i:05d}",
        }
        for i in range(num_examples)
    ]


def store(data_dir, train, test=None, name="shapes", spec=None, others=None, **options):
    """A folder that TFDS itself writes, in its own shuffled order."""
    import tensorflow_datasets

    spec = spec or features()
    splits = {"train": train, "test": test, **(others or {})}
    splits = {split: x for split, x in splits.items() if x is not None}
    builder = tensorflow_datasets.dataset_builders.store_as_tfds_dataset(
        name=name,
        version="1.2.3",
        features=spec,
        split_datasets={
            split: [(i, {key: value[key] for key in spec}) for i, value in enumerate(x)]
            for split, x in splits.items()
        },
        data_dir=data_dir,
        **options,
    )
    return str(builder.data_path)


def all_of(source):
    images, labels = source.read(tf.range(source.num_examples, dtype=tf.int64))
    return images.numpy(), labels.numpy()


def message(function, *arguments):
    """The one line that a user reads."""
    with pytest.raises(DataError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)
