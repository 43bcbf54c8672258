"""Constant random images, for timing."""

import numpy as np

from towers.config.list_options import height_and_width
from towers.data.sources import ArraySource, DataSet, Subset, channel_moments

NUM_DIFFERENT = 256  # images; the others repeat them, to save time and memory


def load(
    *,
    image_size: int | str = 0,
    num_classes: int = 10,
    num_examples: tuple[int, int] = (10_000, 2_000),
) -> DataSet:
    """Return noise, uint8 [n, height, width, 3] of `image_size`, with random labels."""
    rng = np.random.Generator(np.random.Philox(0))

    def draw():
        shape = (NUM_DIFFERENT, *height_and_width(image_size or 32), 3)
        images = rng.integers(0, 256, shape, dtype=np.uint8)
        return images, rng.integers(0, num_classes, NUM_DIFFERENT, dtype=np.int32)

    def repeat(examples, count):
        return Subset(ArraySource(*examples), np.arange(count) % NUM_DIFFERENT)

    train, test = draw(), draw()
    mean, std = channel_moments(train[0])
    return DataSet(
        name="synthetic",
        train=repeat(train, num_examples[0]),
        test=repeat(test, num_examples[1]),
        class_names=tuple(f"class {label}" for label in range(num_classes)),
        mean=mean,
        std=std,
        origin="random noise",
    )
