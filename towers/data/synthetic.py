"""Constant random images, for timing."""

import numpy as np

from towers.data.sources import ArraySource, DataSet, channel_moments


def load(
    data_dir: str = "",
    *,
    image_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int = 10,
) -> DataSet:
    """10,000 training and 2,000 test images of noise, the same every time.

    Args:
        data_dir: not looked at; every data set takes it.
        image_shape: height, width, channels.
        num_classes: number of labels.
    """
    rng = np.random.default_rng(0)

    def draw(count):
        images = rng.integers(0, 256, (count, *image_shape), dtype=np.uint8)
        return images, rng.integers(0, num_classes, count, dtype=np.int32)

    train, test = draw(10_000), draw(2_000)
    mean, deviation = channel_moments(train[0])
    return DataSet(
        name="synthetic",
        train=ArraySource(*train),
        test=ArraySource(*test),
        class_names=tuple(f"class {label}" for label in range(num_classes)),
        mean=mean,
        deviation=deviation,
        found="random noise",
    )
