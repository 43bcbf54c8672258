"""Draws augmented photographs: python docs/draw_augmentations.py PICTURE.jpg"""

import pathlib
import sys

import matplotlib
import numpy as np
import tensorflow as tf
from PIL import ImageOps
from scenes import SCENES, photograph

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from towers.config.choices import POLICIES
from towers.data.augment.augmentation import create_augment
from towers.data.augment.distortions import extend
from towers.data.augment.mixing import create_mix
from towers.data.randomness import Draw

SIDE, COUNT = 72, 8
SHAPE, MOMENTS = (SIDE, SIDE, 3), ((0.0,) * 3, (1.0,) * 3)
NAMES = ("pad_crop_flip", "translate_4_flip", "random_resized_crop", "rand_augment")
STRENGTHS = {"color_jitter": 0.4, "random_erasing": 1.0, "cutout_size": SIDE // 2}


def rows() -> dict[str, np.ndarray]:
    """Return caption -> images, uint8 [COUNT, height, width, 3]."""
    rng = np.random.Generator(np.random.Philox(5))
    photos = [photograph(name, rng) for name in ([*SCENES] * 2)[:COUNT]]
    images = np.stack([ImageOps.fit(x.convert("RGB"), (SIDE, SIDE)) for x in photos])
    numbers = tf.range(COUNT, dtype=tf.int64)
    draw = Draw(2, tf.constant(0, tf.int64), numbers, tf.zeros_like(numbers))
    plain = create_augment("none", SHAPE, *MOMENTS)
    augments = {
        f"{name}={strength}": extend(plain, **{name: strength})
        for name, strength in STRENGTHS.items()
    }
    augments |= {name: create_augment(name, SHAPE, *MOMENTS) for name in NAMES}
    augments |= {
        name: create_augment("none", SHAPE, *MOMENTS, policy=name)
        for name in POLICIES
        if name not in ("none", *NAMES)
    }
    found = {"evaluated": images}
    found |= {name: x.train(images, draw) for name, x in augments.items()}
    batch = {"images": tf.cast(images, tf.float32), "labels": tf.zeros(COUNT, tf.int32)}
    found["mixup=1"] = create_mix(1.0, 0.0, 2)(batch, draw)["images"]
    found["cutmix=1"] = create_mix(0.0, 1.0, 2)(batch, draw)["images"]
    return {name: np.clip(x, 0, 255).astype(np.uint8) for name, x in found.items()}


def main(path: str) -> None:
    """Draw a row for each augmentation."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    drawn = rows()
    size = COUNT + 2, len(drawn)
    _, axes = pyplot.subplots(len(drawn), COUNT, figsize=size, layout="constrained")
    for row, (name, images) in zip(axes, drawn.items(), strict=True):
        for axis, image in zip(row, images, strict=True):
            axis.imshow(image)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, rotation="horizontal", ha="right", va="center")
    pyplot.savefig(path, dpi=75, pil_kwargs={"quality": 70})


if __name__ == "__main__":
    main(sys.argv[1])
