"""The update: from the mean gradient to the next parameters, slots and averages."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from towers.errors import ConfigError
from towers.optim.optimizers import Optimizer, UpdateContext
from towers.optim.vector import Layout

RateFn = Callable[[tf.Tensor], tf.Tensor]  # int64 step -> learning rate, float64
Vectors = list[tf.Tensor]  # [rows, 16] each, see `vector.Layout`


def clip_by_global_norm(
    gradients: Sequence[tf.Tensor], norm: tf.Tensor, clip_norm: float
) -> list[tf.Tensor]:
    """Scale gradients whose global norm, which is given, exceeds `clip_norm`."""
    if clip_norm == 0:
        return list(gradients)
    scale = tf.constant(clip_norm, norm.dtype) / tf.maximum(norm, clip_norm)
    return [gradient * tf.cast(scale, gradient.dtype) for gradient in gradients]


def ramp(step: tf.Tensor) -> tf.Tensor:
    """Return the largest decay of a moving average, (1 + step) / (10 + step)."""
    step = tf.cast(step, tf.float64)
    return (1 + step) / (10 + step)


def moving_averages(
    averages: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
    step: tf.Tensor,
    ema_decay: float,
) -> Vectors:
    """Move the averages with the tutorial's decay min(ema_decay, ramp(step))."""
    decay = tf.minimum(tf.constant(ema_decay, tf.float64), ramp(step))
    dtypes = dict.fromkeys(average.dtype for average in averages)
    rest = {dtype: tf.cast(1 - decay, dtype) for dtype in dtypes}
    return [
        average - rest[average.dtype] * (average - value)
        for average, value in zip(averages, values, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Update:
    """Everything that happens between the mean gradient and the next parameters."""

    optimizer: Optimizer
    learning_rate_fn: RateFn  # the schedule
    clip_norm: float = 0.0  # largest global norm of the mean gradient; 0 does not clip
    ema_decay: float = 0.0  # decay of the moving averages; 0 keeps none
    # Per parameter, in the model's order. `decays` is empty if the loss has the weight
    # decay, `rate_fns` if all parameters follow the schedule.
    decays: tuple[float, ...] = ()
    rate_fns: tuple[RateFn, ...] = ()

    def squares(
        self,
        layout: Layout,
        step: tf.Tensor,
        params: Sequence[tf.Tensor],
        slots: Mapping[str, Sequence[tf.Tensor]],
        gradients: Sequence[tf.Tensor],
        norm: tf.Tensor,
    ) -> tf.Tensor | None:
        """Return sums of squares of parameters and clipped gradients, [2, parameters].

        Those of shards add up. It may be the optimizer's direction, not the gradient.
        """
        if not self.optimizer.needs_norms:
            return None
        gradients = clip_by_global_norm(gradients, norm, self.clip_norm)
        if direction := self.optimizer.direction:
            contexts = self._contexts(layout, step)
            calls = self._calls(layout, contexts, params, slots, gradients)
            gradients = [direction(*call) for call in calls]
            if not self.optimizer.elementwise:
                gradients = layout.pack(gradients)
        return tf.stack(
            [
                layout.sums([tf.reduce_sum(tf.square(x), 1) for x in vectors])
                for vectors in (params, gradients)
            ]
        )

    def __call__(
        self,
        layout: Layout,
        step: tf.Tensor,
        params: Sequence[tf.Tensor],
        slots: Mapping[str, Sequence[tf.Tensor]],
        gradients: Sequence[tf.Tensor],
        norm: tf.Tensor,
        squares: tf.Tensor | None = None,
        rate_factor: tf.Tensor | None = None,
        on_gpu: bool = False,
    ) -> tuple[Vectors, dict[str, Vectors]]:
        """Return the new parameters and slots of one step, as vectors of `layout`.

        `step` counts the steps taken before, `norm` is the global norm of the
        gradients, `squares` come from `squares` for whole parameters, `rate_factor`
        multiplies all learning rates, and `on_gpu` updates parameters of one shape
        together.
        """
        contexts = self._contexts(layout, step, squares, rate_factor)
        gradients = clip_by_global_norm(gradients, norm, self.clip_norm)
        update = self.optimizer.update
        calls = self._calls(layout, contexts, params, slots, gradients)
        if on_gpu and self.optimizer.stackable:
            updated = _update_stacked(update, list(calls))
        else:
            updated = [update(*call) for call in calls]
        for _, own in updated:
            if own.keys() != slots.keys():
                raise ConfigError(
                    f"the optimizer's update gives the slots {sorted(own)}, and it "
                    f"declares {sorted(slots)}"
                )
        new_params = [param for param, _ in updated]
        new_slots = {name: [own[name] for _, own in updated] for name in slots}
        if not self.optimizer.elementwise:
            new_params = layout.pack(new_params)
            new_slots = {name: layout.pack(x) for name, x in new_slots.items()}
        return new_params, new_slots

    def _calls(self, layout, contexts, params, slots, gradients):
        """Yield the arguments of the optimizer's functions per vector or parameter."""
        arrays = [params, gradients, *slots.values()]
        if not self.optimizer.elementwise:
            arrays = [layout.views(vectors) for vectors in arrays]
        for context, param, gradient, *own in zip(contexts, *arrays, strict=True):
            yield param, dict(zip(slots, own, strict=True)), gradient, context

    def _contexts(self, layout, step, squares=None, rate_factor=None):
        """Return the context of each call of the optimizer."""
        numbers = range(len(layout.places))
        by_vector = self.optimizer.elementwise
        vectors = [place.vector for place in layout.places.values()]
        dtypes = [layout.specs[vector].dtype for vector in vectors]
        dtypes = [spec.dtype for spec in layout.specs] if by_vector else dtypes

        def columns(values):
            return layout.columns(values) if by_vector else values

        rate_fns = self.rate_fns or [self.learning_rate_fn for _ in numbers]
        distinct = list(dict.fromkeys(rate_fns))  # each is computed once
        computed = [rate_fn(step) for rate_fn in distinct]
        if rate_factor is not None:
            computed = [rate * rate_factor for rate in computed]
        indices = columns([distinct.index(rate_fn) for rate_fn in rate_fns])
        casts = {
            dtype: [tf.cast(rate, dtype) for rate in computed]
            for dtype in dict.fromkeys(dtypes)
        }
        rates = [
            casts[dtype][index]
            if isinstance(index, int)
            else tf.gather(tf.stack(casts[dtype]), index)
            for dtype, index in zip(dtypes, indices, strict=True)
        ]
        decays = [
            decay if isinstance(decay, float) else tf.constant(decay, dtype)
            for dtype, decay in zip(
                dtypes, columns(self.decays or [0.0 for _ in numbers]), strict=True
            )
        ]
        ranks = columns([len(place.shape) for place in layout.places.values()])
        norms = [(None, None) for _ in dtypes]
        if squares is not None:
            pairs = [
                layout.spread(x) if by_vector else tf.unstack(x)
                for x in tf.unstack(tf.sqrt(squares))
            ]
            norms = list(zip(*pairs, strict=True))
        constants = self.optimizer.constants and self.optimizer.constants(step)
        return [
            UpdateContext(rate, step, decay, rank, *pair, constants)
            for rate, decay, rank, pair in zip(rates, decays, ranks, norms, strict=True)
        ]


def _update_stacked(update, calls):
    """Update parameters of equal shape, rate and decay by one call."""
    groups, results = {}, {}
    for number, (param, *_, context) in enumerate(calls):
        key = param.shape, param.dtype, context.decay, id(context.rate)
        groups.setdefault(key, []).append(number)
    for numbers in groups.values():
        first, *_ = members = [calls[number] for number in numbers]
        if len(members) == 1:
            results[numbers[0]] = update(*first)
            continue
        arrays = [member[:-1] for member in members]
        stacked = tf.nest.map_structure(lambda *x: tf.stack(x), *arrays)
        param, slots = update(*stacked, first[-1])
        slots = {name: tf.unstack(values) for name, values in slots.items()}
        for place, values in enumerate(tf.unstack(param)):
            results[numbers[place]] = values, {k: x[place] for k, x in slots.items()}
    return [results[number] for number in range(len(calls))]
