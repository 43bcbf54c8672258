"""The network of the fastest trainings on CIFAR-10 (Jordan 2024, arXiv:2404.00498)."""

import keras
import tensorflow as tf
from keras import layers

from towers.models.activations import Gelu
from towers.models.blocks import uniform
from towers.models.convolution import SameConv2D
from towers.models.layers import BatchNormalization
from towers.models.sizes import check_image_size, scaled
from towers.models.whitening import Whitening

WHITENING_SIZE = 2
SMALLEST_IMAGE = 9  # one pixel is left after the last pool


def create_model(
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    width: float,
    regularizer: keras.regularizers.Regularizer | None,
    widths: tuple[int, int, int],
    depth: int,
    momentum: float,
) -> keras.Model:
    """Whitened patches, then three groups of convolutions.

    A group is convolution, pool, normalization, GELU, convolution, normalization, GELU;
    a third convolution and normalization follow in the deeper network, where a shortcut
    leads from the first GELU to the last. Normalizations have offsets and no scales.
    Marked for decay are the parameters that Muon leaves to momentum: offsets, the bias
    of the whitening, and the head.

    The author divides the logits of airbench94 by the number of features and begins
    with a head of standard deviation 1; here the initial head is smaller by that
    factor, in the deeper network as well. Epsilon is the smallest that the fast kernel
    takes, and moving variances are the biased ones.

    Args:
        image_shape, num_classes, width, regularizer: see `models.create_model`.
        widths: filters of the groups.
        depth: convolutions of a group: 2, or 3 for `speedrun_deep`.
        momentum: of the moving averages.

    Raises:
        ConfigError: the images are too small for three pools.
    """
    name = "speedrun" if depth == 2 else "speedrun_deep"
    check_image_size(name, image_shape, at_least=SMALLEST_IMAGE)

    def group(x, number, filters):
        first = None
        for place in range(1, depth + 1):
            part = f"{number}_{place}"
            x = SameConv2D(
                filters,
                before_pool=place == 1,
                use_bias=False,
                kernel_initializer=PartlyIdentity(),
                name=f"conv{part}",
            )(x)
            if place == 1:
                x = layers.MaxPooling2D(2, name=f"pool{number}")(x)
            x = BatchNormalization(
                momentum=momentum,
                epsilon=1.001e-5,
                scale=False,
                beta_regularizer=regularizer,
                name=f"norm{part}",
            )(x)
            if place == 3:
                x = layers.Add(name=f"add{number}")([x, first])
            x = Gelu(name=f"gelu{part}")(x)
            first = x if place == 1 else first
        return x

    images = keras.Input(image_shape, name="images")
    x = Whitening(WHITENING_SIZE, bias_regularizer=regularizer, name="whitening")(
        images
    )
    x = Gelu(name="gelu0")(x)
    for number, filters in enumerate(widths, start=1):
        x = group(x, number, scaled(filters, width))
    x = layers.GlobalMaxPooling2D(name="pool")(x)  # 3x3 of 32x32 images
    stddev = 1 / x.shape[-1]
    logits = layers.Dense(
        num_classes,
        use_bias=False,
        kernel_initializer=keras.initializers.RandomUniform(
            -(3**0.5) * stddev, 3**0.5 * stddev
        ),
        kernel_regularizer=regularizer,
        name="logits",
    )(x)
    return keras.Model(images, logits, name=name)


@keras.saving.register_keras_serializable("towers")
class PartlyIdentity(keras.initializers.Initializer):
    """Kernels [height, width, inputs, filters] whose first filters are the identity,
    one per input (Dirac); the others are uniform within 1 / sqrt(fan in)."""

    def __init__(self, seed: int | None = None):
        self.seed = seed

    def __call__(self, shape, dtype=None):
        height, width, inputs, filters = shape
        drawn = uniform(self.seed)(shape, dtype)
        num_identity = min(inputs, filters)
        center = tf.scatter_nd(
            [[height // 2, width // 2, i, i] for i in range(num_identity)],
            tf.ones([num_identity], drawn.dtype),
            [height, width, inputs, num_identity],
        )
        return tf.concat([center, drawn[..., num_identity:]], axis=-1)

    def get_config(self):
        return {"seed": self.seed}
