"""Recomputation of activations in the backward pass (Chen et al. 2016,
arXiv:1604.06174).

A network is cut into segments where one tensor is all that later layers read of earlier
ones, as between residual blocks. The forward pass keeps the inputs of the segments, and
the activations of the last one. The backward pass computes those of each other segment
again, when it gets there.
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

ACCURACY = 2**-10  # of the memory that the cuts minimize, as a fraction


class Segment(NamedTuple):
    """Consecutive calls of layers.

    Attributes:
        calls: in order, see `keras_internals.calls_of`.
        inputs: tensors that they read; the inputs of the network, and of another
            segment at most one.
        output: the tensor that the next segment reads, or the logits.
    """

    calls: Sequence[Any]
    inputs: list[keras.KerasTensor]
    output: keras.KerasTensor

    def __call__(self, inputs: Sequence[Any], replace=lambda operation: operation):
        """The output; `replace` gives what is called in place of an operation."""
        values = dict(zip(map(id, self.inputs), inputs, strict=True))
        run_calls(self.calls, values, replace)
        return values[id(self.output)]


def segments(model: keras.Model) -> list[Segment]:
    """The segments of a Functional model that need the least memory.

    Raises:
        ConfigError: no tensor divides the network.
    """
    calls = calls_of(model)
    last_read = {id(x): at for at, call in enumerate(calls) for x in call.input_tensors}
    last_read |= {id(x): len(calls) for x in model.outputs}
    sizes, cuts, alive = [0], [(0, None)], {}
    for at, call in enumerate(calls):
        alive |= {id(x): x for x in call.outputs}
        alive = {key: x for key, x in alive.items() if last_read.get(key, -1) > at}
        sizes.append(sizes[-1] + sum(map(_size, call.outputs)))
        if len(alive) == 1 and at < len(calls) - 1:
            [x] = alive.values()
            if tf.as_dtype(x.dtype).is_floating and not has_mask(x):
                cuts.append((at + 1, x))
    total, low, high, chosen = sizes[-1], 0, sizes[-1], []
    while high - low > ACCURACY * total:
        limit = (low + high) / 2
        if (found := _within(limit, cuts, sizes)) is None:
            low = limit
        else:
            high, chosen = limit, found
    if not chosen:
        raise ConfigError(
            "recompute=True: no single tensor divides the network into parts; set "
            "--norecompute"
        )
    results, ends = [], [*chosen, (len(calls), model.outputs[0])]
    for (begin, source), (end, output) in zip([cuts[0], *ends], ends, strict=False):
        read = {id(x) for call in calls[begin:end] for x in call.input_tensors}
        given = [x for x in (source, *model.inputs) if id(x) in read]
        results.append(Segment(calls[begin:end], given, output))
    return results


def whole(model: keras.Model) -> list[Segment]:
    """A single segment."""
    return [Segment(calls_of(model), model.inputs, model.outputs[0])]


def _size(x):
    return math.prod(n or 1 for n in x.shape[1:]) * tf.as_dtype(x.dtype).size


def _within(limit, cuts, sizes):
    """The cuts with which no moment of the backward pass needs more memory than the
    limit: the kept tensors before a segment, and all in it. Of those the ones with the
    longest last segment; None where there are none.

    Args:
        cuts: (number of calls before, tensor) of all that are possible, the first one
            being the beginning.
        sizes: bytes of the outputs of so many calls.
    """
    kept, before = [0], [None]  # the least memory of the tensors up to a cut
    for index, (at, x) in enumerate(cuts):
        if index:
            fitting = [
                (kept[i], i)
                for i, (begin, _) in enumerate(cuts[:index])
                if kept[i] + sizes[at] - sizes[begin] <= limit
            ]
            least, last = min(fitting, default=(math.inf, 0))
            kept.append(least + _size(x))
            before.append(last)
        if kept[index] + sizes[-1] - sizes[at] <= limit:
            path = []
            while index:
                path.insert(0, cuts[index])
                index = before[index]
            return path
    return None


class RecomputedNetwork:
    """A network that keeps the inputs of its segments; a tower uses it as a
    `keras.Model`.

    Args:
        model: a Functional model.
        xla: whether XLA compiles the tower.

    Raises:
        ConfigError: as of `segments`.
    """

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
        """The logits and the new state, as of `keras.Model`."""

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
            state = map(scope.get_current_value, self._model.non_trainable_variables)
            return logits, list(state)

    def _call(self, segment, inputs, scope, replace):
        """The output of a segment whose activations are not kept."""
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
                    # The state has moved in the forward pass.
                    with keras.StatelessScope(pairs), taking_moments():
                        y = segment(again[:count], replace)
                return tape.gradient(y, again, upstream)

            return segment(given[: len(inputs)], replace), gradient

        return call(*inputs, *map(scope.get_current_value, params))


def barrier(
    upstream: tf.Tensor, tensors: Sequence[tf.Tensor], xla: bool = False
) -> list[tf.Tensor]:
    """The tensors, once `upstream` is there: what is computed of them is not what was
    computed of them before, for an optimizer of graphs.
    """
    if xla:
        return tf_internals.optimization_barrier(upstream, *tensors)[1:]
    with tf.control_dependencies([upstream]):
        return [tf.identity(x) for x in tensors]
