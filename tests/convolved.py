"""The oracle's convolution, of which the first rows and columns are kept."""

import numpy as np
import tensorflow as tf
from engines import oracle_layers


def random(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def expected(x, kernel, bias, kept):
    """The outputs, a gradient of theirs, and what it is for x, kernel and bias."""
    done = oracle_layers.conv(x, kernel, bias, stride=1, padding="same")
    inner = (slice(None), slice(kept[0]), slice(kept[1]))
    output, upstream = done.output[inner], np.zeros(done.output.shape)
    upstream[inner] = random(output.shape, 2)
    (of_x,), of_params = done.pullback(upstream)
    return output, upstream[inner], [of_x, *of_params.values()]


def ours_and_theirs(convolve, sizes, kept, channels, filters, dtype, size=3):
    """Outputs and both gradients: those of a function of (images, kernel, height,
    width), and the oracle's."""
    x = random((2, *sizes, channels))
    kernel = random((size, size, channels, filters), 1)
    output, upstream, gradients = expected(x, kernel, None, kept)
    sources = [tf.constant(x, dtype), tf.constant(kernel, dtype)]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        y = convolve(*sources, *kept)
    actual = [y, *tape.gradient(y, sources, tf.constant(upstream, dtype))]
    return zip(actual, [output, *gradients], strict=True)
