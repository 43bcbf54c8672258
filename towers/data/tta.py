"""What an evaluation shows the network of an image beside the image itself."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

# (weight, float images [n, height, width, channels] -> the same shape); None for the
# image itself.
View = tuple[float, Callable[[tf.Tensor], tf.Tensor] | None]


class Views(NamedTuple):
    """What an evaluation looks at beside the images.

    Attributes:
        views: the logits of an image are the weighted mean over them.
        share: the part of each batch that is looked at so, those images whose two best
            logits are nearest; the others keep their answer. Below 1 the batch size has
            a say in which they are.
    """

    transforms: tuple[View, ...] = ()
    fraction: float = 1.0


def _mirrored(images):
    return tf.reverse(images, [2])


def _moved(images, offset):
    """By one pixel (offset 0: down and right, 2: up and left), mirrored at the edge."""
    height, width = images.shape[1:3]
    padded = tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT")
    return padded[:, offset : offset + height, offset : offset + width]


def _with_mirrors(weight, view=None):
    if view is None:
        return (weight / 2, None), (weight / 2, _mirrored)
    return (weight / 2, view), (weight / 2, lambda images: _mirrored(view(images)))


# Jordan 2024, arXiv:2404.00498, section 3.5.
SIX = (
    *_with_mirrors(0.5),
    *_with_mirrors(0.25, lambda images: _moved(images, 0)),
    *_with_mirrors(0.25, lambda images: _moved(images, 2)),
)

VIEWS = {
    "plain": Views(),
    "mirror": Views(_with_mirrors(1.0)),
    "six": Views(SIX),
    "six_unsure": Views(SIX, fraction=0.25),
}
