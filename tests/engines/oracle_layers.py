"""The layers of the oracle: NumPy, float64, forward and backward written by hand.

Nothing here comes from the trainer, from TensorFlow or from automatic differentiation,
so that an agreement with the trainer means something. Every layer is a function

    layer(*inputs, **variables, **options) -> Applied(output, pullback, state)

where `pullback(gradient)` takes the gradient with respect to the output and gives
(one gradient per input, {variable: gradient}). Images are [N, H, W, C], kernels
[height, width, C / groups, filters], padding follows TensorFlow's rule.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Pullback = Callable[[np.ndarray], tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]]


class Applied(NamedTuple):
    """What a layer gives: its output, its pullback and what its state becomes."""

    output: np.ndarray
    pullback: Pullback | None
    state: Mapping[str, np.ndarray] = {}


def same_padding(size: int, window: int, stride: int) -> tuple[int, int]:
    """TensorFlow's 'SAME': ceil(size / stride) outputs, an odd cell goes at the end."""
    total = max((math.ceil(size / stride) - 1) * stride + window - size, 0)
    return total // 2, total - total // 2


def _unfold(x, window, stride, padding, fill=0.0):
    """Gives a view [N, H', W', C, height, width] of all windows, and the padding."""
    if padding == "same":
        rows, columns = (
            same_padding(size, extent, stride)
            for size, extent in zip(x.shape[1:3], window, strict=True)
        )
    else:
        assert padding == "valid"
        rows = columns = (0, 0)
    x = np.pad(x, ((0, 0), rows, columns, (0, 0)), constant_values=fill)
    windows = sliding_window_view(x, window, axis=(1, 2))[:, ::stride, ::stride]
    return windows, (rows, columns)


def _fold(tap_fn, shape, window, stride, pads):
    """Adds up what the windows say of each cell: the transpose of `_unfold`.

    `tap_fn(i, j)` is the gradient [N, H', W', C] of cell (i, j) of every window.
    """
    (top, bottom), (left, right) = pads
    n, height, width, channels = shape
    padded = np.zeros((n, top + height + bottom, left + width + right, channels))
    for i in range(window[0]):
        for j in range(window[1]):
            tap = tap_fn(i, j)
            rows = slice(i, i + stride * tap.shape[1], stride)
            columns = slice(j, j + stride * tap.shape[2], stride)
            padded[:, rows, columns] += tap
    return padded[:, top : top + height, left : left + width]


def conv(x, kernel, bias=None, *, stride=1, padding="same", groups=1) -> Applied:
    """Convolution; with groups, block g of the filters sees block g of the channels."""
    *window, depth, filters = kernel.shape
    windows, pads = _unfold(x, window, stride, padding)
    n, height, width = windows.shape[:3]
    # One matrix per group and image, [groups, N, H' * W', taps * depth]: small products
    # stay in one thread of BLAS, whose threads wait for each other on a busy machine.
    matrix = windows.reshape(n, height, width, groups, depth, *window)
    matrix = matrix.transpose(3, 0, 1, 2, 5, 6, 4)
    matrix = matrix.reshape(groups, n, height * width, -1)
    weights = kernel.reshape(-1, groups, filters // groups).transpose(1, 0, 2)
    output = (matrix @ weights[:, None]).transpose(1, 2, 0, 3)
    output = output.reshape(n, height, width, filters)

    def pullback(gradient):
        by_group = gradient.reshape(n, height * width, groups, -1)
        by_group = by_group.transpose(2, 0, 1, 3)
        of_kernel = (matrix.swapaxes(2, 3) @ by_group).sum(axis=1)
        of_taps = by_group @ weights[:, None].swapaxes(2, 3)
        of_taps = of_taps.reshape(groups, n, height, width, *window, depth)
        of_taps = of_taps.transpose(4, 5, 1, 2, 3, 0, 6)
        of_taps = of_taps.reshape(*window, n, height, width, groups * depth)
        of_x = _fold(lambda i, j: of_taps[i, j], x.shape, window, stride, pads)
        variables = {"kernel": of_kernel.transpose(1, 0, 2).reshape(kernel.shape)}
        if bias is not None:
            variables["bias"] = gradient.sum(axis=(0, 1, 2))
        return (of_x,), variables

    return Applied(output if bias is None else output + bias, pullback)


def depthwise(x, kernel, bias=None, *, stride=1, padding="same") -> Applied:
    """A convolution of each channel by itself; kernel [height, width, 1, C]."""
    return conv(x, kernel, bias, stride=stride, padding=padding, groups=x.shape[-1])


def pixel(x, kernel, bias=None) -> Applied:
    """A convolution of one pixel, [N, in] to [N, out]; kernel [1, 1, in, out]."""
    output, pullback, state = dense(x, kernel[0, 0], bias)

    def with_size(gradient):
        inputs, variables = pullback(gradient)
        return inputs, variables | {"kernel": variables["kernel"][None, None]}

    return Applied(output, with_size, state)


def dense(x, kernel, bias=None) -> Applied:
    """Matrix product over the last axis of [..., in]; kernel [in, out]."""
    output = x @ kernel

    def pullback(gradient):
        rows, of_rows = (y.reshape(-1, y.shape[-1]) for y in (x, gradient))
        variables = {"kernel": rows.T @ of_rows}
        if bias is not None:
            variables["bias"] = of_rows.sum(axis=0)
        return (gradient @ kernel.T,), variables

    return Applied(output if bias is None else output + bias, pullback)


def _each(output, slope) -> Applied:
    """A function of each number by itself, and its derivatives."""
    return Applied(output, lambda gradient: ((gradient * slope,), {}))


def relu(x) -> Applied:
    """max(x, 0), with gradient 0 at 0."""
    return _each(np.maximum(x, 0.0), x > 0.0)


def relu6(x) -> Applied:
    """x between 0 and 6, with gradient 0 elsewhere."""
    return _each(np.clip(x, 0.0, 6.0), (x > 0.0) & (x < 6.0))


def sigmoid(x) -> Applied:
    output = 1.0 / (1.0 + np.exp(-x))
    return _each(output, output * (1.0 - output))


def silu(x) -> Applied:
    """x times its sigmoid."""
    gate = 1.0 / (1.0 + np.exp(-x))
    return _each(x * gate, gate * (1.0 + x * (1.0 - gate)))


def hard_sigmoid(x) -> Applied:
    """x / 6 + 1 / 2 between 0 and 1."""
    return _each(np.clip(x / 6.0 + 0.5, 0.0, 1.0), (np.abs(x) < 3.0) / 6.0)


def hard_silu(x) -> Applied:
    """x times its hard sigmoid."""
    slope = np.where(np.abs(x) < 3.0, x / 3.0 + 0.5, x > 0.0)
    return _each(x * np.clip(x / 6.0 + 0.5, 0.0, 1.0), slope)


def gelu(x) -> Applied:
    """x times the probability that a normal variable is below x."""
    below = 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0)))
    density = np.exp(-0.5 * x**2) / math.sqrt(2.0 * math.pi)
    return _each(x * below, below + x * density)


def layer_scale(x, gamma) -> Applied:
    """A factor for each channel."""

    def pullback(gradient):
        outer = tuple(range(x.ndim - 1))
        return (gradient * gamma,), {"gamma": (gradient * x).sum(axis=outer)}

    return Applied(x * gamma, pullback)


def multiply(x, gates) -> Applied:
    """[N, H, W, C] times [N, C], a factor for each channel of an image."""
    gates = gates[:, None, None]

    def pullback(gradient):
        return (gradient * gates, (gradient * x).sum(axis=(1, 2))), {}

    return Applied(x * gates, pullback)


def max_pool(x, *, size, stride, padding="same") -> Applied:
    """The first maximum of a window, in row-major order, takes the whole gradient."""
    window = (size, size)
    windows, pads = _unfold(x, window, stride, padding, fill=-np.inf)
    cells = windows.reshape(*windows.shape[:4], size * size)
    winner = cells.argmax(axis=-1)
    output = np.take_along_axis(cells, winner[..., None], axis=-1)[..., 0]

    def pullback(gradient):
        def tap(i, j):
            return gradient * (winner == i * size + j)

        return (_fold(tap, x.shape, window, stride, pads),), {}

    return Applied(output, pullback)


def average_pool(x, *, size, stride, padding="same") -> Applied:
    """Mean of the cells of a window; padding is not counted, as in TensorFlow."""
    window = (size, size)
    windows, pads = _unfold(x, window, stride, padding)
    ones, _ = _unfold(np.ones((1, *x.shape[1:3], 1)), window, stride, padding)
    counts = ones.sum(axis=(-2, -1))

    def pullback(gradient):
        share = gradient / counts
        return (_fold(lambda i, j: share, x.shape, window, stride, pads),), {}

    return Applied(windows.sum(axis=(-2, -1)) / counts, pullback)


def global_average_pool(x) -> Applied:
    """Mean over all between the first axis and the last: [N, H, W, C] to [N, C]."""
    inner = tuple(range(1, x.ndim - 1))

    def pullback(gradient):
        of_each = np.expand_dims(gradient, inner) * x.shape[0] * x.shape[-1] / x.size
        return (np.broadcast_to(of_each, x.shape),), {}

    return Applied(x.mean(axis=inner), pullback)


def global_max_pool(x) -> Applied:
    """Maximum over height and width: [N, H, W, C] to [N, C]; of equal ones the first
    takes the whole gradient."""
    flat = x.reshape(len(x), -1, x.shape[-1])
    winner = flat.argmax(axis=1)[:, None]

    def pullback(gradient):
        of_x = np.zeros_like(flat)
        np.put_along_axis(of_x, winner, gradient[:, None], axis=1)
        return (of_x.reshape(x.shape),), {}

    return Applied(flat.max(axis=1), pullback)


def flatten(x) -> Applied:
    """[N, H, W, C] to [N, H * W * C]."""
    return Applied(
        x.reshape(len(x), -1), lambda gradient: ((gradient.reshape(x.shape),), {})
    )


def add(*inputs) -> Applied:
    """The sum of inputs of one shape, as where a residual branch ends."""
    return Applied(sum(inputs), lambda gradient: ((gradient,) * len(inputs), {}))


def pad(x, *, rows=(0, 0), columns=(0, 0), channels=(0, 0)) -> Applied:
    """Zeros before and after each axis of [N, H, W, C] but the first."""
    padded = np.pad(x, ((0, 0), rows, columns, channels))

    before = (0, rows[0], columns[0], channels[0])
    own = tuple(slice(b, b + n) for b, n in zip(before, x.shape, strict=True))
    return Applied(padded, lambda gradient: ((gradient[own],), {}))


def local_response_norm(x, *, depth_radius, bias, alpha, beta, groups=1) -> Applied:
    """x / (bias + alpha * sum of x^2 over the channels within the radius)^beta.

    Krizhevsky et al., 2012, in the form of `tf.nn.local_response_normalization`; with
    groups, over the channels of the same block only.
    """
    channel = np.arange(x.shape[-1])
    band = (np.abs(channel[:, None] - channel) <= depth_radius).astype(np.float64)
    block = np.repeat(np.arange(groups), x.shape[-1] // groups)
    band *= block[:, None] == block
    scale = bias + alpha * (np.square(x) @ band)
    power = scale**-beta

    def pullback(gradient):
        of_scale = -beta * gradient * x * power / scale
        return (gradient * power + 2.0 * alpha * x * (of_scale @ band),), {}

    return Applied(x * power, pullback)


def _normalized(x, axes, epsilon):
    """Give x with the moments 0 and 1 over the axes, and its pullback."""
    std = np.sqrt(x.var(axis=axes, keepdims=True) + epsilon)
    normalized = (x - x.mean(axis=axes, keepdims=True)) / std

    def pullback(gradient):
        through_mean = gradient.mean(axis=axes, keepdims=True)
        through_std = (gradient * normalized).mean(axis=axes, keepdims=True)
        return (gradient - through_mean - normalized * through_std) / std

    return normalized, pullback


def _scaled(normalized, of_normalized, gamma, beta) -> Applied:
    """The output of a normalization has a factor and an offset for each channel."""
    axes = tuple(range(normalized.ndim - 1))

    def pullback(gradient):
        of_gamma = (gradient * normalized).sum(axis=axes)
        of_x = of_normalized(gradient * gamma)
        return (of_x,), {"gamma": of_gamma, "beta": gradient.sum(axis=axes)}

    return Applied(gamma * normalized + beta, pullback)


def batch_norm(
    x,
    beta,
    moving_mean,
    moving_variance,
    *,
    training,
    gamma=1.0,
    momentum=0.99,
    epsilon=1e-3,
) -> Applied:
    """Normalises every channel by the moments of the batch it is given.

    Ioffe and Szegedy, 2015; the variance is the biased one, also in the moving
    statistics (as in Keras). Out of training it uses the moving statistics and has no
    pullback.
    """
    if not training:
        centred = (x - moving_mean) / np.sqrt(moving_variance + epsilon)
        return Applied(gamma * centred + beta, None)
    axes = tuple(range(x.ndim - 1))
    mean, variance = x.mean(axis=axes), x.var(axis=axes)
    state = {
        "moving_mean": momentum * moving_mean + (1.0 - momentum) * mean,
        "moving_variance": momentum * moving_variance + (1.0 - momentum) * variance,
    }
    return _scaled(*_normalized(x, axes, epsilon), gamma, beta)._replace(state=state)


def layer_norm(x, gamma, beta, *, epsilon=1e-3) -> Applied:
    """Normalises every position by the moments of its channels (Ba et al., 2016)."""
    return _scaled(*_normalized(x, -1, epsilon), gamma, beta)


def group_norm(x, gamma, beta, *, groups, epsilon) -> Applied:
    """Normalises the pixels of each group of channels (Wu and He, 2018)."""
    shape = (len(x), -1, groups, x.shape[-1] // groups)
    normalized, of_groups = _normalized(x.reshape(shape), (1, 3), epsilon)

    def of_normalized(gradient):
        return of_groups(gradient.reshape(shape)).reshape(x.shape)

    return _scaled(normalized.reshape(x.shape), of_normalized, gamma, beta)


def response_norm(x, gamma, beta) -> Applied:
    """Adds each channel times its norm over the mean of norms (Woo et al., 2023)."""
    norms = np.sqrt(np.square(x).sum(axis=(1, 2), keepdims=True) + 1e-12)
    mean = norms.mean(axis=-1, keepdims=True) + 1e-6
    ratios = norms / mean

    def pullback(gradient):
        scaled = gradient * gamma
        of_ratios = (scaled * x).sum(axis=(1, 2), keepdims=True)
        through_mean = (of_ratios * ratios).mean(axis=-1, keepdims=True)
        of_norms = (of_ratios - through_mean) / mean
        of_x = gradient + scaled * ratios + of_norms * x / norms
        of_gamma = (gradient * x * ratios).sum(axis=(0, 1, 2))
        return (of_x,), {"gamma": of_gamma, "beta": gradient.sum(axis=(0, 1, 2))}

    return Applied(x + gamma * x * ratios + beta, pullback)


def standardized_conv(x, kernel, **options) -> Applied:
    """A convolution whose filters have mean 0 and variance 1 (Qiao et al., 2019)."""
    normalized, of_normalized = _normalized(kernel, (0, 1, 2), 1e-8)
    output, of_conv, state = conv(x, normalized, **options)

    def pullback(gradient):
        inputs, variables = of_conv(gradient)
        return inputs, variables | {"kernel": of_normalized(variables["kernel"])}

    return Applied(output, pullback, state)


def turned(x, heads, grid, sign=1):
    """Rotary positions of the last tokens, which are a grid (Su et al., 2021).

    Channels i and i + half of a head are a complex number, which the row turns in the
    first quarter of a head and the column in the second.
    """
    size, (height, width) = x.shape[-1] // heads, grid
    y, quarter = x.copy(), size // 4
    for row in range(height):
        for column in range(width):
            token = x.shape[1] - height * width + row * width + column
            for i in range(size // 2):
                place = (2 * row + 1) / height - 1
                if i >= quarter:
                    place = (2 * column + 1) / width - 1
                turns = place / 100 ** (i % quarter / quarter)
                turn = np.exp(sign * 2j * math.pi * turns)
                real = np.arange(heads) * size + i
                imaginary = real + size // 2
                z = (x[:, token, real] + 1j * x[:, token, imaginary]) * turn
                y[:, token, real], y[:, token, imaginary] = z.real, z.imag
    return y


def _attend(queries, keys, values, biases=0.0):
    """Vaswani et al., 2017, equation 1, for one head of one image: the output and its
    pullback, to gradients by the arguments."""
    root = math.sqrt(queries.shape[-1])
    scores = queries @ keys.T / root + biases
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)

    def pullback(gradient):
        of_weights = gradient @ values.T
        mean = (of_weights * weights).sum(axis=1, keepdims=True)
        of_scores = weights * (of_weights - mean)
        of_queries, of_keys = of_scores @ keys / root, of_scores.T @ queries / root
        return of_queries, of_keys, weights.T @ gradient, of_scores

    return weights @ values, pullback


def attention(queries, keys, values, *, heads, grid=None) -> Applied:
    """One head, and one image, after the other."""
    size = queries.shape[-1] // heads
    if grid:
        queries, keys = (turned(x, heads, grid) for x in (queries, keys))
    output, pullbacks = np.zeros(values.shape), []
    for image, head in np.ndindex(len(queries), heads):
        place = (image, slice(None), slice(head * size, (head + 1) * size))
        output[place], own = _attend(queries[place], keys[place], values[place])
        pullbacks.append((place, own))

    def pullback(gradient):
        of_all = [np.zeros(x.shape) for x in (queries, keys, values)]
        for place, own in pullbacks:
            for whole, part in zip(of_all, own(gradient[place])[:3], strict=True):
                whole[place] = part
        if grid:
            of_all[:2] = (turned(x, heads, grid, -1) for x in of_all[:2])
        return tuple(of_all), {}

    return Applied(output, pullback)


def window_attention(x, attention_biases, *, heads, size) -> Applied:
    """Attention in each square of `size` pixels (Wu et al., 2022): [N, H, W, 3 * C] to
    [N, H, W, C]. Each head has its query, key and value side by side, and a number for
    each distance of two pixels, row `size` * vertical + horizontal."""
    n, height, width, channels = x.shape
    own = channels // heads // 3
    output, of_x = np.zeros((n, height, width, heads * own)), np.zeros(x.shape)
    of_biases, pullbacks = np.zeros(attention_biases.shape), []
    rows, columns = (axis.ravel() for axis in np.mgrid[:size, :size])
    apart = np.abs(rows[:, None] - rows) * size + np.abs(columns[:, None] - columns)
    for image, top, left, head in np.ndindex(n, height // size, width // size, heads):
        place = image, rows + top * size, columns + left * size
        parts = x[place].reshape(-1, heads, 3, own)[:, head].swapaxes(0, 1)
        outputs = (*place, slice(head * own, (head + 1) * own))
        output[outputs], of_part = _attend(*parts, attention_biases[apart, head])
        inputs = (*place, slice(3 * head * own, 3 * (head + 1) * own))
        pullbacks.append((head, inputs, outputs, of_part))

    def pullback(gradient):
        for head, inputs, outputs, of_part in pullbacks:
            *parts, of_scores = of_part(gradient[outputs])
            np.add.at(of_biases[:, head], apart, of_scores)
            of_x[inputs] = np.concatenate(parts, axis=1)
        return (of_x,), {"attention_biases": of_biases}

    return Applied(output, pullback)


def crop(x, *, height, width) -> Applied:
    """The first rows and columns of [N, H, W, C]."""
    after = (0, x.shape[1] - height), (0, x.shape[2] - width)
    edges = (0, 0), *after, (0, 0)
    output = x[:, :height, :width]
    return Applied(output, lambda gradient: ((np.pad(gradient, edges),), {}))


def tokens(x, class_token=None, positions=None, *, has_positions=True) -> Applied:
    """[N, H, W, C] to [N, tokens, C], the class token first, and positions added.

    Without positions to learn each is (sin, cos) of column / w and row / w, for C / 4
    wavelengths w in a geometric row from 1 to 10,000 (Chen et al., 2021); zero for the
    class token, or for all without `has_positions`.
    """
    n, height, width, channels = x.shape
    output = x.reshape(n, height * width, channels)
    if not has_positions:
        positions, is_learned = np.zeros(output.shape[1:]), False
    elif positions is None:
        quarter = channels // 4
        positions = np.zeros((height, width, channels))
        for row in range(height):
            for column in range(width):
                for i in range(quarter):
                    wavelength = 10_000 ** (i / (quarter - 1))
                    positions[row, column, i::quarter] = (
                        math.sin(column / wavelength),
                        math.cos(column / wavelength),
                        math.sin(row / wavelength),
                        math.cos(row / wavelength),
                    )
        positions, is_learned = positions.reshape(-1, channels), False
    else:
        is_learned = True
    first = 0 if class_token is None else 1
    output = np.pad(output, [(0, 0), (first, 0), (0, 0)])
    if first:
        output[:, 0] = class_token[0]
    if len(positions) < output.shape[1]:
        positions = np.pad(positions, [(1, 0), (0, 0)])

    def pullback(gradient):
        variables = {"class_token": gradient[:, :1].sum(axis=0)} if first else {}
        if is_learned:
            variables["positions"] = gradient.sum(axis=0)
        return (gradient[:, first:].reshape(x.shape),), variables

    return Applied(output + positions, pullback)


def prefix(x, token) -> Applied:
    """Tokens [count, C] before those of each image."""
    output = np.concatenate([np.broadcast_to(token, (len(x), *token.shape)), x], 1)

    def pullback(gradient):
        of_token = gradient[:, : len(token)].sum(axis=0)
        return (gradient[:, len(token) :],), {"token": of_token}

    return Applied(output, pullback)


def last_tokens(x, *, first) -> Applied:
    """[N, tokens, C] without the `first` tokens."""
    edges = (0, 0), (first, 0), (0, 0)
    return Applied(x[:, first:], lambda gradient: ((np.pad(gradient, edges),), {}))


def first_token(x) -> Applied:
    """[N, tokens, C] to [N, C]."""
    edges = (0, 0), (0, x.shape[1] - 1), (0, 0)
    return Applied(x[:, 0], lambda gradient: ((np.pad(gradient[:, None], edges),), {}))


def dropout(x, *, noise, training, rate) -> Applied:
    """Keeps x / (1 - rate) where the given noise, uniform in [0, 1), is >= rate."""
    if not training:
        return Applied(x, None)
    assert noise.shape == x.shape
    mask = (noise >= rate) / (1.0 - rate)
    return _each(x * mask, mask)


def stochastic_depth(x, *, noise, training, rate) -> Applied:
    """Dropout of whole images (Huang et al., 2016), one number of noise for each."""
    if training:
        assert noise.shape == (len(x), *(1 for _ in x.shape[1:]))
        noise = np.broadcast_to(noise, x.shape)
    return dropout(x, noise=noise, training=training, rate=rate)


def concatenate(*xs) -> Applied:
    """Channels one after the other."""
    cuts = np.cumsum([x.shape[-1] for x in xs])[:-1]
    output = np.concatenate(xs, axis=-1)
    return Applied(output, lambda gradient: (tuple(np.split(gradient, cuts, -1)), {}))
