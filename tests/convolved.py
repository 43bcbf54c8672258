"""What the oracle says of a convolution whose first rows and columns are kept."""

import numpy as np
import oracle_layers


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
