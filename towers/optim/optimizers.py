"""Optimizers: pure functions from the mean gradient to the next parameters.

The learning rate stays outside the velocity, which is momentum * velocity + direction,
so a change of the rate acts at once on the whole velocity. Checkpoints name slots
`slots/<param>/<slot>`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers.config import factories
from towers.errors import ConfigError, did_you_mean

Slots = dict[str, tf.Tensor]


class UpdateContext(NamedTuple):
    """Arguments of an update besides the parameters and their gradients.

    For a vector of many parameters, all but the step and the constants is one number
    for all of them, or an array [rows, 1] with the number of each row's parameter.
    Norms are Euclidean, of the whole parameter and of its clipped gradient or
    `Optimizer.direction`; None if the optimizer needs no norms.
    """

    rate: tf.Tensor  # learning rate, of the parameters' dtype
    step: tf.Tensor  # int64 scalar, the steps taken before this one
    decay: float | tf.Tensor = 0.0  # weight decay, if the optimizer applies it
    rank: int | tf.Tensor = 1  # number of axes of the parameter
    param_norm: tf.Tensor | None = None
    gradient_norm: tf.Tensor | None = None
    constants: Any = None  # result of `Optimizer.constants` for the step


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The update of parameters.

    Attributes:
        slots: names of its tensors, initially zero, in the shape of the parameter.
        update: (param, slots, gradient, context) -> (param, slots).
        elementwise: whether an element's update depends on other elements only through
            the norms. It then gets vectors [rows, 16] of many parameters, or of slices
            of them, each padded with zeros to whole rows, and must stay finite for
            zeros. Else it gets one parameter at a time, in its own shape.
        needs_norms: whether it reads `param_norm` and `gradient_norm` of the context.
        direction: (param, slots, gradient, context without norms) -> the tensor whose
            norm is `gradient_norm`; None for the gradient.
        takes_decay: whether it applies weight decay, which is then not in the loss.
        stackable: whether an update without norms also takes parameters of one shape,
            stacked along a new first axis, with the context of one of them.
        constants: step -> values that all parameters share.
    """

    slots: tuple[str, ...]
    update: Callable[
        [tf.Tensor, Slots, tf.Tensor, UpdateContext], tuple[tf.Tensor, Slots]
    ]
    elementwise: bool = True
    needs_norms: bool = False
    direction: Callable[..., tf.Tensor] | None = None
    takes_decay: bool = False
    stackable: bool = False
    constants: Callable[[tf.Tensor], Any] | None = None


def sgd(*, momentum: float = 0.0) -> Optimizer:
    """Create gradient descent, with a momentum Polyak's heavy ball (1964)."""

    def update(param, slots, gradient, context):
        return _move(param, slots, gradient, context.rate, momentum)

    return Optimizer(_velocity_slot(momentum), update)


def nesterov(*, momentum: float) -> Optimizer:
    """Create Nesterov's momentum in the form of Sutskever et al. (2013)."""

    def update(param, slots, gradient, context):
        ahead, moved = _look_ahead(slots, gradient, momentum)
        return param - context.rate * ahead, moved

    return Optimizer(("velocity",), update)


def rmsprop(
    *, rho: float = 0.9, epsilon: float = 1e-7, momentum: float = 0.0
) -> Optimizer:
    """Create RMSProp (Tieleman and Hinton 2012), epsilon in the root, and momentum."""

    def update(param, slots, gradient, context):
        second = rho * slots["second_moment"] + (1 - rho) * tf.square(gradient)
        direction = gradient / tf.sqrt(second + epsilon)
        param, moved = _move(param, slots, direction, context.rate, momentum)
        return param, {"second_moment": second} | moved

    return Optimizer(("second_moment", *_velocity_slot(momentum)), update)


def adamw(
    *, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-7
) -> Optimizer:
    """Create AdamW (Loshchilov and Hutter 2019); epsilon is next to the raw root."""

    def update(param, slots, gradient, context):
        moments = _moments(slots, gradient, beta1, beta2)
        direction = tf.cast(context.constants, param.dtype) * moments["first_moment"]
        direction /= tf.sqrt(moments["second_moment"]) + epsilon
        direction = _with_decay(param, direction, context)
        return param - context.rate * direction, moments

    def unbiased(step):
        first, second = _corrections(step, beta1, beta2)
        return tf.sqrt(second) / first

    return Optimizer(
        ("first_moment", "second_moment"), update, takes_decay=True, constants=unbiased
    )


def adam(
    *, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-7
) -> Optimizer:
    """Create `adamw` with weight decay added to the gradient (L2 regularization)."""
    update = adamw(beta1=beta1, beta2=beta2, epsilon=epsilon)
    return dataclasses.replace(update, takes_decay=False)


def lamb(
    *, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-7
) -> Optimizer:
    """Create LAMB (arXiv:1904.00962, algorithm 2), which does not scale vectors."""

    def move(param, slots, gradient, context):
        moments = _moments(slots, gradient, beta1, beta2)
        first, second = (
            moment / tf.cast(correction, param.dtype)
            for moment, correction in zip(
                moments.values(), context.constants, strict=True
            )
        )
        direction = first / (tf.sqrt(second) + epsilon)
        return _with_decay(param, direction, context), moments

    def update(param, slots, gradient, context):
        direction, moments = move(param, slots, gradient, context)
        direction *= _over_norm(context, context.param_norm, context.gradient_norm)
        return param - context.rate * direction, moments

    return Optimizer(
        ("first_moment", "second_moment"),
        update,
        needs_norms=True,
        direction=lambda *args: move(*args)[0],
        takes_decay=True,
        constants=lambda step: _corrections(step, beta1, beta2),
    )


def lion(*, beta1: float = 0.9, momentum_decay: float = 0.99) -> Optimizer:
    """Create Lion (arXiv:2302.06675), whose beta2 is `momentum_decay`."""

    def update(param, slots, gradient, context):
        first = slots["first_moment"]
        sign = tf.sign(beta1 * first + (1 - beta1) * gradient)
        direction = _with_decay(param, sign, context)
        first = momentum_decay * first + (1 - momentum_decay) * gradient
        return param - context.rate * direction, {"first_moment": first}

    return Optimizer(("first_moment",), update, takes_decay=True)


def lars(*, momentum: float = 0.0, trust_coefficient: float = 0.001) -> Optimizer:
    """Create LARS (arXiv:1708.03888, algorithm 1), which does not scale vectors."""

    def update(param, slots, gradient, context):
        direction = _with_decay(param, gradient, context)
        length = context.gradient_norm + context.decay * context.param_norm
        trusted = trust_coefficient * context.param_norm
        direction *= _over_norm(context, trusted, length)
        return _move(param, slots, direction, context.rate, momentum)

    return Optimizer(
        _velocity_slot(momentum), update, needs_norms=True, takes_decay=True
    )


def muon(*, momentum: float, muon_momentum: float = 0.6) -> Optimizer:
    """Create Muon (Jordan et al. 2024) for convolutions, `nesterov` for the rest.

    A kernel is scaled to the norm sqrt(filters), and moves along its Nesterov momentum
    with singular values near 1, without weight decay.
    """

    def update(param, slots, gradient, context):
        if context.rank != 4:
            direction = _with_decay(param, gradient, context)
            ahead, moved = _look_ahead(slots, direction, momentum)
            return param - context.rate * ahead, moved
        ahead, moved = _look_ahead(slots, gradient, muon_momentum)
        *stacked, _, _, _, filters = param.shape
        ahead = orthogonalized(tf.reshape(ahead, [*stacked, -1, filters]))
        root = tf.sqrt(tf.cast(filters, param.dtype))
        scale = tf.math.divide_no_nan(root, _norm(param, 4))
        param *= tf.where(context.rate > 0, scale, 1.0)  # unless frozen
        return param - context.rate * tf.reshape(ahead, param.shape), moved

    return Optimizer(
        ("velocity",), update, elementwise=False, takes_decay=True, stackable=True
    )


def orthogonalized(matrix: tf.Tensor, num_steps: int = 3) -> tf.Tensor:
    """Bring the singular values of matrices [..., m, n] near 1 (Newton and Schulz)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    *_, rows, columns = matrix.shape
    x = matrix / (_norm(matrix, 2) + 1e-7)
    # Steps multiply by polynomials of the smaller product with the transpose. These
    # commute, so x is needed only first and last: half the operations for 3x3 kernels.
    square = tf.matmul(x, x, transpose_a=rows > columns, transpose_b=rows <= columns)
    # A constant: TensorFlow folds no `tf.eye` of this size, and computes it each time.
    total = identity = tf.constant(np.eye(min(rows, columns)), x.dtype)
    for step in range(num_steps):
        polynomial = a * identity + b * square + c * tf.matmul(square, square)
        total = tf.matmul(polynomial, total) if step else polynomial
        if step < num_steps - 1:
            square = tf.matmul(polynomial, tf.matmul(polynomial, square))
    return tf.matmul(x, total) if rows > columns else tf.matmul(total, x)


def _norm(arrays, num_axes):
    axes = list(range(-num_axes, 0))
    return tf.sqrt(tf.reduce_sum(tf.square(arrays), axes, keepdims=True))


def _moments(slots, gradient, beta1, beta2):
    first, second = slots["first_moment"], slots["second_moment"]
    return {
        "first_moment": first + (1 - beta1) * (gradient - first),
        "second_moment": second + (1 - beta2) * (tf.square(gradient) - second),
    }


def _corrections(step, *betas):
    """Return bias corrections of the moments after `step` + 1 updates, float64."""
    count = tf.cast(step + 1, tf.float64)
    return [1 - tf.constant(beta, tf.float64) ** count for beta in betas]


def _over_norm(context, length, norm):
    """Return length / norm for kernels; 1 for vectors and if a norm is 0."""
    both = (context.param_norm > 0) & (context.gradient_norm > 0) & (context.rank > 1)
    one = tf.ones_like(norm)
    return tf.where(both, length / tf.where(both, norm, one), one)


def _velocity_slot(momentum):
    return ("velocity",) if momentum else ()


def _move(param, slots, direction, rate, momentum):
    if momentum == 0:
        return param - rate * direction, {}
    velocity = momentum * slots["velocity"] + direction
    return param - rate * velocity, {"velocity": velocity}


def _look_ahead(slots, direction, momentum):
    velocity = momentum * slots["velocity"] + direction
    return direction + momentum * velocity, {"velocity": velocity}


def _with_decay(param, gradient, context):
    if isinstance(context.decay, float) and context.decay == 0:
        return gradient
    return gradient + context.decay * param


def create_optimizer(
    name: str, options: Mapping[str, float] | None = None, **hyperparameters: float
) -> Optimizer:
    """Create an optimizer of `towers.config.choices.OPTIMIZERS`, or FILE.py:FUNCTION.

    It gets the hyperparameters (momentum, rho, beta1, ...) in its signature, and all
    `options`.

    Raises:
        ConfigError: it does not take an option, or a file does not return an Optimizer.
    """
    create, options = factories.resolve("optimizer", name), options or {}
    names = factories.argument_names(create)
    for option in options:
        if names is not None and option not in names:
            raise ConfigError(
                f"optimizer_options: optimizer={name} takes no {option!r}; "
                f"{did_you_mean(option, names)}it takes {', '.join(names) or 'none'}"
            )
    optimizer = factories.call(create, **hyperparameters, **options)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer={name}: gave {type(optimizer).__name__}; return a "
            "towers.optim.optimizers.Optimizer"
        )
    return optimizer
