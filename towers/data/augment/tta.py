"""Test-time augmentation (TTA): the mean logits over several views of an image.

The functions return the weighted transforms of `towers.config.choices.TTA`.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

# (weight, float images [n, h, w, channels] -> the same); None for the image itself.
Transform = tuple[float, Callable[[tf.Tensor], tf.Tensor] | None]


def none() -> Sequence[Transform]:
    """Return no transforms."""
    return ()


def mirror() -> Sequence[Transform]:
    """Return the transforms to the image and its mirror image."""
    return (0.5, None), (0.5, _mirrored)


def translate() -> Sequence[Transform]:
    """Return both of them, also moved along the diagonals (Jordan 2024)."""
    return (
        (0.25, None),
        (0.25, _mirrored),
        (0.125, lambda images: _moved(images, 0)),
        (0.125, lambda images: _mirrored(_moved(images, 0))),
        (0.125, lambda images: _moved(images, 2)),
        (0.125, lambda images: _mirrored(_moved(images, 2))),
    )


def _mirrored(images):
    return tf.reverse(images, [2])


def _moved(images, offset):
    """Move down and right (offset 0), or up and left (2), mirrored at the edge."""
    height, width = images.shape[1:3]
    padded = tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT")
    return padded[:, offset : offset + height, offset : offset + width]
