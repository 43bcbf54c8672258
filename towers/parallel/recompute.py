"""Recomputation of activations in the backward pass (Chen et al. 2016).

A network is cut into segments at tensors that are the only input of later layers from
earlier ones, as between residual blocks. The forward pass keeps the inputs of the
segments, and the activations of the last one. The backward pass computes those of each
other segment again. See arXiv:1604.06174.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers import tf_internals
from towers.errors import ConfigError
from towers.keras_internals import calls_of, has_mask, run_calls
from towers.models.layers.normalization import taking_moments

ACCURACY = 2**-10  # Relative accuracy of the search for minimum memory.


class Segment(NamedTuple):
    """Consecutive calls of layers, see `keras_internals.calls_of`."""

    calls: Sequence[Any]
    inputs: list[keras.KerasTensor]  # Network inputs, and at most one segment output.
    output: keras.KerasTensor  # Read by the next segment, or the logits.

    def __call__(self, inputs: Sequence[Any], replace=lambda operation: operation):
        """Return the output; `replace` returns what is called for an operation."""
        values = dict(zip(map(id, self.inputs), inputs, strict=True))
        run_calls(self.calls, values, replace)
        return values[id(self.output)]


def segments(model: keras.Model) -> list[Segment]:
    """Return segments that need the least memory; ConfigError if there is only one."""
    calls = calls_of(model)
    last_read = {id(x): at for at, call in enumerate(calls) for x in call.input_tensors}
    last_read |= {id(x): len(calls) for x in model.outputs}
    sizes, cuts = [0], [(0, None)]
    alive: dict[int, keras.KerasTensor] = {}
    for at, call in enumerate(calls):
        alive |= {id(x): x for x in call.outputs}
        alive = {key: x for key, x in alive.items() if last_read.get(key, -1) > at}
        sizes.append(sizes[-1] + sum(map(_size, call.outputs)))
        if len(alive) == 1 and at < len(calls) - 1:
            [x] = alive.values()
            if tf.as_dtype(x.dtype).is_floating and not has_mask(x):
                cuts.append((at + 1, x))
    low, high, chosen = 0.0, float(sizes[-1]), []
    while high - low > ACCURACY * sizes[-1]:
        limit = (low + high) / 2
        if (ends := _within(limit, cuts, sizes)) is None:
            low = limit
        else:
            high, chosen = limit, ends
    if not chosen:
        why = "no single tensor divides the network into parts; set --norecompute"
        raise ConfigError(f"recompute=True: {why}")
    results, ends = [], [*chosen, (len(calls), model.outputs[0])]
    for (begin, source), (end, output) in zip([cuts[0], *ends], ends, strict=False):
        read = {id(x) for call in calls[begin:end] for x in call.input_tensors}
        given = [x for x in (source, *model.inputs) if id(x) in read]
        results.append(Segment(calls[begin:end], given, output))
    return results


def single_segment(model: keras.Model) -> list[Segment]:
    """Return the network as a single segment."""
    return [Segment(calls_of(model), model.inputs, model.outputs[0])]


def _size(x):
    return math.prod(n or 1 for n in x.shape[1:]) * tf.as_dtype(x.dtype).size


def _within(limit, cuts, sizes):
    """Return cuts so that the backward pass never needs more memory than the limit.

    It needs the kept tensors before a segment, and all within it. Among possible cuts
    (number of calls before, tensor), the ones with the longest last segment are chosen;
    None if there are none. `sizes` are cumulative bytes of the outputs of the calls.
    """
    best = [(0.0, [])]  # Per cut: minimum memory of the kept tensors, and their cuts.
    for index, (at, x) in enumerate(cuts):
        if index:
            fitting = [
                (best[i][0], i)
                for i, (begin, _) in enumerate(cuts[:index])
                if best[i][0] + sizes[at] - sizes[begin] <= limit
            ]
            kept, last = min(fitting, default=(math.inf, 0))
            best.append((kept + _size(x), [*best[last][1], cuts[index]]))
        kept, chosen = best[index]
        if kept + sizes[-1] - sizes[at] <= limit:
            return chosen
    return None


class RecomputedNetwork:
    """A network whose segments are recomputed; a tower uses it as a `keras.Model`."""

    def __init__(self, model: keras.Model, xla: bool = False):
        self._model, self._segments, self._xla = model, segments(model), xla
        self.inputs = model.inputs

    def stateless_call(
        self,
        params: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor],
        inputs: Sequence[tf.Tensor] | tf.Tensor,
        training: bool,
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return the logits and the new state, like `keras.Model`."""

        def replace(operation):
            is_layer = isinstance(operation, keras.layers.Layer)
            takes = {"training": training} if is_layer else {}
            return functools.partial(operation, **takes)

        variables = [*self._model.trainable_variables]
        variables += self._model.non_trainable_variables
        pairs = zip(variables, (*params, *state), strict=True)
        values = {
            id(x): tf.cast(value, x.dtype)
            for x, value in zip(self.inputs, tf.nest.flatten(inputs), strict=True)
        }
        *first, last = self._segments
        with keras.StatelessScope(list(pairs)) as scope:
            for segment in first:
                given = [values[id(x)] for x in segment.inputs]
                y = self._call(segment, given, scope, replace)
                values[id(segment.output)] = y
            logits = last([values[id(x)] for x in last.inputs], replace)
            moved = map(scope.get_current_value, self._model.non_trainable_variables)
            return logits, list(moved)

    def _call(self, segment, inputs, scope, replace):
        """Return the output of a segment without keeping its activations."""
        own = {
            id(variable)
            for call in segment.calls
            for variable in getattr(call.operation, "variables", ())
        }
        params = [x for x in self._model.trainable_variables if id(x) in own]
        state = [x for x in self._model.non_trainable_variables if id(x) in own]
        before = [(x, scope.get_current_value(x)) for x in state]

        @tf.custom_gradient
        def call(*given):
            def gradient(upstream):
                count = len(inputs)
                again = [*barrier(upstream, given[:count], self._xla), *given[count:]]
                pairs = [*zip(params, again[count:], strict=True), *before]
                with tf.GradientTape(watch_accessed_variables=False) as tape:
                    tape.watch(again)
                    # The forward pass has moved the state already.
                    with keras.StatelessScope(pairs), taking_moments():
                        y = segment(again[:count], replace)
                return tape.gradient(y, again, upstream)

            return segment(given[: len(inputs)], replace), gradient

        return call(*inputs, *map(scope.get_current_value, params))


def barrier(
    upstream: tf.Tensor, tensors: Sequence[tf.Tensor], xla: bool = False
) -> list[tf.Tensor]:
    """Return the tensors once `upstream` is computed.

    Grappler then does not merge operations on them with earlier equal ones.
    """
    if xla:
        return tf_internals.optimization_barrier(upstream, *tensors)[1:]
    with tf.control_dependencies([upstream]):
        return [tf.identity(x) for x in tensors]
