"""The update: from the mean gradient to the next parameters, slots and averages."""

import dataclasses
from collections.abc import Callable, Sequence

import tensorflow as tf

from towers.optim.optimizers import Optimizer, Slots, UpdateContext

RateFn = Callable[[tf.Tensor], tf.Tensor]


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
        rate_fns: per parameter its own learning rate, where some have one; empty where
            all have `learning_rate_fn`.
    """

    optimizer: Optimizer
    learning_rate_fn: RateFn
    clip_norm: float = 0.0
    ema_decay: float = 0.0
    decays: tuple[float, ...] = ()
    rate_fns: tuple[RateFn, ...] = ()

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
        rate_fns = self.rate_fns or [self.learning_rate_fn] * len(params)
        # Each once: most parameters share the function.
        rates = {rate_fn: rate_fn(step) for rate_fn in dict.fromkeys(rate_fns)}
        dtypes = [param.dtype for param in params]
        rates = {
            (rate_fn, dtype): tf.cast(rates[rate_fn], dtype)
            for rate_fn, dtype in dict.fromkeys(zip(rate_fns, dtypes, strict=True))
        }
        norms = self._norms(norm, params, gradients, squares)
        gradients = clip_by_global_norm(gradients, norm, self.clip_norm)
        decays = self.decays or [0.0] * len(params)
        new_params, new_slots = [], []
        for param, slot, gradient, rate_fn, decay, param_norms in zip(
            params, slots, gradients, rate_fns, decays, norms, strict=True
        ):
            rate = rates[rate_fn, param.dtype]
            context = UpdateContext(rate, step, decay, *param_norms)
            param, slot = self.optimizer.update(param, slot, gradient, context)
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
        return [tf.unstack(pair) for pair in tf.unstack(norms)]
