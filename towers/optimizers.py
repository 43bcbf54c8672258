"""From the mean gradient to the next parameters: pure functions, no variables.

An optimizer treats one parameter at a time, so that a strategy may call it wherever the
parameter lives. The learning rate stays outside the velocity (velocity is
momentum * velocity + gradient), hence a change of the rate acts at once on the whole
velocity.
"""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

Slots = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """How one parameter is updated.

    Attributes:
        slots: names of the tensors, of the parameter's shape and zero at first, that it
            keeps per parameter.
        update: (param, slots, gradient, learning_rate) -> (param, slots).
        elementwise: whether an element's update needs no other element, so that it may
            be applied to a slice of the parameter.
    """

    slots: tuple[str, ...]
    update: Callable[[tf.Tensor, Slots, tf.Tensor, tf.Tensor], tuple[tf.Tensor, Slots]]
    elementwise: bool = True


def sgd(momentum: float = 0.0) -> Optimizer:
    """Gradient descent; with a momentum the heavy ball of Polyak (1964)."""
    if momentum == 0:
        return Optimizer((), lambda p, slots, g, rate: (p - rate * g, slots))

    def update(param, slots, gradient, rate):
        velocity = momentum * slots["velocity"] + gradient
        return param - rate * velocity, {"velocity": velocity}

    return Optimizer(("velocity",), update)


def nesterov(momentum: float) -> Optimizer:
    """Nesterov's momentum in the form of Sutskever et al. (2013)."""

    def update(param, slots, gradient, rate):
        velocity = momentum * slots["velocity"] + gradient
        return param - rate * (gradient + momentum * velocity), {"velocity": velocity}

    return Optimizer(("velocity",), update)


OPTIMIZERS = {"sgd": sgd, "nesterov": nesterov}


def create_optimizer(name: str, *, momentum: float) -> Optimizer:
    return OPTIMIZERS[name](momentum)


def clip_by_global_norm(
    gradients: Sequence[tf.Tensor], norm: tf.Tensor, clip_norm: float
) -> list[tf.Tensor]:
    """Scales all gradients by clip_norm / max(norm, clip_norm); 0 leaves them alone.

    `norm` is the global norm of the gradients: given, not computed here, because the
    shards of a split network have to add theirs up first.
    """
    if clip_norm == 0:
        return list(gradients)
    scale = tf.constant(clip_norm, norm.dtype) / tf.maximum(norm, clip_norm)
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
    """

    optimizer: Optimizer
    learning_rate_fn: Callable[[tf.Tensor], tf.Tensor]
    clip_norm: float = 0.0
    ema_decay: float = 0.0

    def __call__(
        self,
        step: tf.Tensor,
        norm: tf.Tensor,
        params: Sequence[tf.Tensor],
        slots: Sequence[Slots],
        averages: Sequence[tf.Tensor],
        gradients: Sequence[tf.Tensor],
    ) -> tuple[list[tf.Tensor], list[Slots], list[tf.Tensor]]:
        """One step.

        Args:
            step: int64, the steps taken before this one.
            norm: the global norm of the gradients.
            params: the parameters, or the shards of them that live here.
            slots: per parameter its slots.
            averages: the moving averages, or empty where none are kept.
            gradients: the gradient of the mean loss over the whole batch.

        Returns:
            The new parameters, slots and averages, in the order they came.
        """
        gradients = clip_by_global_norm(gradients, norm, self.clip_norm)
        rate = self.learning_rate_fn(step)
        new_params, new_slots = [], []
        for param, slot, gradient in zip(params, slots, gradients, strict=True):
            rate_of_dtype = tf.cast(rate, param.dtype)
            param, slot = self.optimizer.update(param, slot, gradient, rate_of_dtype)
            new_params.append(param)
            new_slots.append(slot)
        new_averages = [
            moving_average(average, param, step, self.ema_decay)
            for average, param in zip(averages, new_params, strict=bool(averages))
        ]
        return new_params, new_slots, new_averages
