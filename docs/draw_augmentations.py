"""Draws what each augmentation makes of eight photographs, and each operation of one.

python docs/draw_augmentations.py docs/augmentations.jpg
"""

import pathlib
import sys

import numpy as np
import tensorflow as tf
from PIL import Image, ImageDraw, ImageFont
from scenes import SCENES, photograph

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

from towers.config.choices import POLICIES
from towers.data.augment.augmentation import create_augment
from towers.data.augment.distortions import extend
from towers.data.augment.mixing import create_mix
from towers.data.augment.operations import MAX_BLUR, OPERATIONS, apply
from towers.data.augment.policies import TRIVIAL
from towers.data.randomness import Draw

SIDE, GAP, CAPTION, COUNT = 72, 3, 152, 8
SHAPE, MOMENTS = (SIDE, SIDE, 3), ((0.0,) * 3, (1.0,) * 3)
NAMES = ("pad_crop_flip", "translate_4_flip", "random_resized_crop", "rand_augment")
STRENGTHS = {"color_jitter": 0.4, "random_erasing": 1.0, "cutout_size": SIDE // 2}


def photographs() -> np.ndarray:
    """uint8 [COUNT, *SHAPE]."""
    rng, names = np.random.Generator(np.random.Philox(5)), [*SCENES] * 2
    drawn = [photograph(name, rng).convert("RGB") for name in names[:COUNT]]
    middles = [min(x.size) for x in drawn]
    boxes = [
        ((x.width - n) / 2, (x.height - n) / 2, (x.width + n) / 2, (x.height + n) / 2)
        for x, n in zip(drawn, middles, strict=True)
    ]
    return np.stack(
        [
            np.asarray(x.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box))
            for x, box in zip(drawn, boxes, strict=True)
        ]
    )


def rows() -> dict[str, np.ndarray]:
    """Caption -> [COUNT, height, width, 3], at most SIDE high and wide."""
    images = tf.constant(photographs())
    numbers = tf.range(COUNT, dtype=tf.int64)
    draw = Draw(2, tf.constant(0, tf.int64), numbers, tf.zeros_like(numbers))
    found = {"evaluated": images}
    plain = create_augment("none", SHAPE, *MOMENTS)
    for name, strength in STRENGTHS.items():
        found[f"{name}={strength}"] = extend(plain, **{name: strength}).train(
            images, draw
        )
    standardized = create_augment("tutorial", SHAPE, *MOMENTS).train(images, draw)
    found["tutorial"] = 128 + 60 * standardized
    for name in NAMES:
        found[name] = create_augment(name, SHAPE, *MOMENTS).train(images, draw)
        if name == "random_resized_crop":
            milder = create_augment(name, SHAPE, *MOMENTS, (0.35, 1.0))
            found["crop_scale=0.35,1"] = milder.train(images, draw)
    for name in POLICIES:
        if name not in ("none", *NAMES):
            policy = create_augment("none", SHAPE, *MOMENTS, policy=name)
            found[name] = policy.train(images, draw)
    labels = tf.zeros(COUNT, tf.int32)
    for name, shares in {"mixup=1": (1.0, 0.0), "cutmix=1": (0.0, 1.0)}.items():
        mix = create_mix(*shares, num_classes=2)
        found[name] = mix(tf.cast(images, tf.float32), labels, draw)[0]
    return {name: np.clip(x, 0, 255).astype(np.uint8) for name, x in found.items()}


def operations() -> dict[str, np.ndarray]:
    """Name -> [SIDE, SIDE, 3]: at the middle magnitude of TrivialAugment."""
    image, middle = tf.constant(photographs()[2:3], tf.float32), TRIVIAL.most // 2
    found = {}
    for number, name in enumerate(OPERATIONS):
        value = TRIVIAL.value(name, middle, 1, SIDE, SIDE)
        value = MAX_BLUR if name == "blur" else value
        chosen = tf.constant([number], tf.int64), tf.constant([value], tf.float64)
        found[name] = apply(image, *chosen)[0].numpy().astype(np.uint8)
    return found


def main(path: str) -> None:
    found, cell, font = rows(), SIDE + GAP, ImageFont.load_default(12)
    single, label, small = operations(), 14, ImageFont.load_default(10)
    lines = -(-len(single) // COUNT)
    size = CAPTION + COUNT * cell, len(found) * cell + lines * (cell + label)
    page = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(page)
    for row, (name, images) in enumerate(found.items()):
        draw.text((4, row * cell + SIDE // 2 - 6), name, "black", font)
        for column, image in enumerate(images):
            edge = (SIDE - len(image)) // 2
            place = CAPTION + column * cell + edge, row * cell + edge
            page.paste(Image.fromarray(image), place)
    draw.text((4, len(found) * cell + SIDE // 2 - 6), "operations", "black", font)
    for number, (name, image) in enumerate(single.items()):
        line, column = divmod(number, COUNT)
        left, top = CAPTION + column * cell, len(found) * cell + line * (cell + label)
        page.paste(Image.fromarray(image), (left, top))
        draw.text((left, top + SIDE), name, "black", small)
    page.save(path, quality=70, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
