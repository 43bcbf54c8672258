"""From the mean gradient to the next parameters: pure functions, no variables.

An optimizer treats one parameter at a time, so that a strategy may call it wherever the
parameter lives. The learning rate stays outside the velocity (velocity is
momentum * velocity + direction), hence a change of the rate acts at once on the whole
velocity. The names of the slots are those in a checkpoint: `slots/<param>/<slot>`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

Slots = dict[str, tf.Tensor]


class Now(NamedTuple):
    """What holds for one parameter in one step.

    Attributes:
        rate: the learning rate, a scalar of the parameter's dtype.
        step: int64, the steps taken before this one.
        decay: coefficient of the parameter's weight decay, where the optimizer takes
            it; else 0.
        param_norm, gradient_norm: Euclidean norms of the whole parameter and of its
            (clipped) gradient, where the optimizer needs norms; else None.
    """

    rate: tf.Tensor
    step: tf.Tensor
    decay: float = 0.0
    param_norm: tf.Tensor | None = None
    gradient_norm: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """How one parameter is updated.

    Attributes:
        slots: names of the tensors, of the parameter's shape and zero at first, that it
            keeps per parameter.
        update: (param, slots, gradient, now) -> (param, slots).
        elementwise: whether an element's update needs the other elements at most
            through the norms, so that it may be applied to a slice of the parameter.
        needs_norms: whether it reads `Now.param_norm` and `Now.gradient_norm`.
        takes_decay: whether it applies the weight decay itself, which then must not be
            part of the loss.
    """

    slots: tuple[str, ...]
    update: Callable[[tf.Tensor, Slots, tf.Tensor, Now], tuple[tf.Tensor, Slots]]
    elementwise: bool = True
    needs_norms: bool = False
    takes_decay: bool = False


def sgd(*, momentum: float = 0.0, **_) -> Optimizer:
    """Gradient descent; with a momentum the heavy ball of Polyak (1964)."""

    def update(param, slots, gradient, now):
        return _move(param, slots, gradient, now.rate, momentum)

    return Optimizer(_velocity_slot(momentum), update)


def nesterov(*, momentum: float, **_) -> Optimizer:
    """Nesterov's momentum in the form of Sutskever et al. (2013)."""

    def update(param, slots, gradient, now):
        velocity = momentum * slots["velocity"] + gradient
        ahead = gradient + momentum * velocity
        return param - now.rate * ahead, {"velocity": velocity}

    return Optimizer(("velocity",), update)


def rmsprop(
    *, rho: float = 0.9, epsilon: float = 1e-7, momentum: float = 0.0, **_
) -> Optimizer:
    """Gradients over the root of their mean square (Tieleman and Hinton 2012), with a
    momentum behind that; the square root is that of mean square + epsilon."""

    def update(param, slots, gradient, now):
        second = rho * slots["second_moment"] + (1 - rho) * tf.square(gradient)
        direction = gradient / tf.sqrt(second + epsilon)
        param, moved = _move(param, slots, direction, now.rate, momentum)
        return param, {"second_moment": second} | moved

    return Optimizer(("second_moment", *_velocity_slot(momentum)), update)


def adamw(
    *, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-7, **_
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019): what is subtracted
    includes rate * decay * param.

    Adam is that of Kingma and Ba (2015) in the form at the end of their section 2,
    where epsilon stands beside the root of the uncorrected moment.
    """

    def update(param, slots, gradient, now):
        first = slots["first_moment"]
        first += (1 - beta1) * (gradient - first)
        second = slots["second_moment"]
        second += (1 - beta2) * (tf.square(gradient) - second)
        count = tf.cast(now.step + 1, tf.float64)
        unbiased = tf.sqrt(1 - tf.constant(beta2, tf.float64) ** count)
        unbiased /= 1 - tf.constant(beta1, tf.float64) ** count
        direction = tf.cast(unbiased, param.dtype) * first
        direction /= tf.sqrt(second) + epsilon
        if now.decay:
            direction += now.decay * param
        moments = {"first_moment": first, "second_moment": second}
        return param - now.rate * direction, moments

    return Optimizer(("first_moment", "second_moment"), update, takes_decay=True)


def lars(*, momentum: float = 0.0, trust_coefficient: float = 0.001, **_) -> Optimizer:
    """Layer-wise adaptive rates (You et al. 2017, arXiv:1708.03888, algorithm 1).

    Gradient and weight decay of a kernel are scaled by
    trust_coefficient * |param| / (|gradient| + decay * |param|), or by 1 where a norm
    is 0. Vectors (biases, scales and offsets of normalisations) are not scaled.
    """

    def update(param, slots, gradient, now):
        direction = gradient + now.decay * param if now.decay else gradient
        if param.shape.rank > 1:
            direction *= _trust(now, trust_coefficient)
        return _move(param, slots, direction, now.rate, momentum)

    return Optimizer(
        _velocity_slot(momentum), update, needs_norms=True, takes_decay=True
    )


def _trust(now, trust_coefficient):
    both = (now.param_norm > 0) & (now.gradient_norm > 0)
    length = now.gradient_norm + now.decay * now.param_norm
    one = tf.ones_like(length)
    ratio = trust_coefficient * now.param_norm / tf.where(both, length, one)
    return tf.where(both, ratio, one)


def _velocity_slot(momentum):
    return ("velocity",) if momentum else ()


def _move(param, slots, direction, rate, momentum):
    """A step along the direction, or with a momentum along the velocity."""
    if momentum == 0:
        return param - rate * direction, {}
    velocity = momentum * slots["velocity"] + direction
    return param - rate * velocity, {"velocity": velocity}


OPTIMIZERS = {
    "sgd": sgd,
    "nesterov": nesterov,
    "rmsprop": rmsprop,
    "adamw": adamw,
    "lars": lars,
}


def create_optimizer(name: str, **hyperparameters: float) -> Optimizer:
    """The named optimizer.

    Args:
        name: a key of OPTIMIZERS.
        **hyperparameters: momentum, rho, beta1, beta2, epsilon, trust_coefficient; each
            optimizer takes its own.
    """
    return OPTIMIZERS[name](**hyperparameters)


def clip_scale(norm: tf.Tensor, clip_norm: float) -> tf.Tensor:
    """clip_norm / max(norm, clip_norm), a scalar of the norm's dtype."""
    return tf.constant(clip_norm, norm.dtype) / tf.maximum(norm, clip_norm)


def clip_by_global_norm(
    gradients: Sequence[tf.Tensor], norm: tf.Tensor, clip_norm: float
) -> list[tf.Tensor]:
    """Scales all gradients by `clip_scale`; a clip_norm of 0 leaves them alone.

    `norm` is the global norm of the gradients: given, not computed here, because the
    shards of a split network have to add theirs up first.
    """
    if clip_norm == 0:
        return list(gradients)
    scale = clip_scale(norm, clip_norm)
    return [gradient * tf.cast(scale, gradient.dtype) for gradient in gradients]


def moving_average(
    average: tf.Tensor, param: tf.Tensor, step: tf.Tensor, ema_decay: float
) -> tf.Tensor:
    """The average after step number `step` (int64, 0 for the first one).

    The decay is ramped as the tutorial's is: min(ema_decay, (1 + step) / (10 + step)).
    """
    step = tf.cast(step, tf.float64)
    decay = tf.minimum(tf.constant(ema_decay, tf.float64), (1 + step) / (10 + step))
    return average - tf.cast(1 - decay, average.dtype) * (average - param)


@dataclasses.dataclass(frozen=True)
class Update:
    """Everything that happens between the mean gradient and the next parameters.

    Attributes:
        optimizer: the update of one parameter.
        learning_rate_fn: int64 step -> rate, float64.
        clip_norm: largest global norm of the mean gradient; 0 does not clip.
        ema_decay: decay of the moving averages; 0 keeps none.
        decays: per parameter the coefficient of its weight decay, in the model's order,
            where the optimizer takes it; empty for none.
    """

    optimizer: Optimizer
    learning_rate_fn: Callable[[tf.Tensor], tf.Tensor]
    clip_norm: float = 0.0
    ema_decay: float = 0.0
    decays: tuple[float, ...] = ()

    def squares(
        self, params: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor]
    ) -> tf.Tensor | None:
        """Sums of squares of each parameter and of its gradient, [len(params), 2]; None
        where the optimizer needs no norms. Those of a parameter's shards add up."""
        if not self.optimizer.needs_norms:
            return None
        pairs = zip(params, gradients, strict=True)
        return 2 * tf.stack([[tf.nn.l2_loss(p), tf.nn.l2_loss(g)] for p, g in pairs])

    def __call__(
        self,
        step: tf.Tensor,
        norm: tf.Tensor,
        params: Sequence[tf.Tensor],
        slots: Sequence[Slots],
        averages: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
        squares: tf.Tensor | None = None,
    ) -> tuple[list[tf.Tensor], list[Slots], list[tf.Tensor]]:
        """One step.

        Args:
            step: int64, the steps taken before this one.
            norm: the global norm of the gradients.
            params: the parameters, or the shards of them that live here.
            slots: per parameter its slots.
            averages: the moving averages, or empty where none are kept.
            gradients: the gradient of the mean loss over the whole batch.
            squares: what the method of that name gives for the whole parameters; needed
                where `params` are shards.

        Returns:
            The new parameters, slots and averages, in the order they came.
        """
        rate = self.learning_rate_fn(step)
        norms = self._norms(norm, params, gradients, squares)
        gradients = clip_by_global_norm(gradients, norm, self.clip_norm)
        decays = self.decays or [0.0] * len(params)
        new_params, new_slots = [], []
        for param, slot, gradient, decay, norms_of_param in zip(
            params, slots, gradients, decays, norms, strict=True
        ):
            now = Now(tf.cast(rate, param.dtype), step, decay, *norms_of_param)
            param, slot = self.optimizer.update(param, slot, gradient, now)
            new_params.append(param)
            new_slots.append(slot)
        new_averages = [
            moving_average(average, param, step, self.ema_decay)
            for average, param in zip(averages, new_params, strict=bool(averages))
        ]
        return new_params, new_slots, new_averages

    def _norms(self, norm, params, gradients, squares):
        """Per parameter its norm and that of its clipped gradient, or nothing."""
        if not self.optimizer.needs_norms:
            return [()] * len(params)
        if squares is None:
            squares = self.squares(params, gradients)
        norms = tf.sqrt(squares)
        if self.clip_norm:
            scale = tf.cast(clip_scale(norm, self.clip_norm), norms.dtype)
            norms *= tf.stack([tf.ones_like(scale), scale])
        return [tf.unstack(of_param) for of_param in tf.unstack(norms)]
