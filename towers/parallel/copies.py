"""The copies of a run's variables: vectors on a device, and their canonical names."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.errors import NumericError
from towers.models.layers import Moment
from towers.models.variables import variable_names
from towers.optim.update import Update
from towers.optim.vector import Layout

Arrays = dict[str, np.ndarray]


class Initial(NamedTuple):
    """Initial values, name -> value, in the order of the model."""

    params: dict[str, tf.Tensor]
    state: dict[str, tf.Tensor]

    @classmethod
    def of(cls, model: keras.Model) -> "Initial":
        """Those of a model."""
        return cls(
            *(
                dict(zip(variable_names(v), (x.value for x in v), strict=True))
                for v in (model.trainable_variables, model.non_trainable_variables)
            )
        )

    def map(self, function: Callable[[tf.Tensor], tf.Tensor]) -> "Initial":
        """The values of a function of each."""
        return Initial(*({k: function(v) for k, v in part.items()} for part in self))


class Values(NamedTuple):
    """Parameters and model state on one device.

    Attributes:
        params: vectors.
        state: vectors of the float entries.
        counts: the other entries.
    """

    params: list[tf.Tensor]
    state: list[tf.Tensor]
    counts: list[tf.Tensor]

    def copied_to(self, device: str) -> "Values":
        """The same values on another device."""
        with tf.device(device):
            return Values(*([tf.identity(x) for x in part] for part in self))


class NetworkLayout:
    """The vectors of a network's parameters and model state.

    Args:
        initial: names, shapes and types.

    Attributes:
        params, state: their layouts.
        counts: names of the entries of the state that are not floats.
    """

    def __init__(self, initial: Initial):
        self._is_float = {k: v.dtype.is_floating for k, v in initial.state.items()}
        self.params = Layout(initial.params)
        floats = {k: v for k, v in initial.state.items() if self._is_float[k]}
        self.state = Layout(floats)
        self.counts = [k for k, is_float in self._is_float.items() if not is_float]

    def state_views(self, values: Values) -> list[tf.Tensor]:
        """The model state in the order of the model."""
        floats, counts = iter(self.state.views(values.state)), iter(values.counts)
        return [next(floats if x else counts) for x in self._is_float.values()]

    def pack_state(
        self, state: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The vectors of a model state in the order of the model, and the counts."""
        pairs = list(zip(state, self._is_float.values(), strict=True))
        floats = self.state.pack([x for x, is_float in pairs if is_float])
        return floats, [x for x, is_float in pairs if not is_float]

    def move(
        self,
        old: Sequence[tf.Tensor],
        new: Sequence[tf.Tensor],
        moments: Mapping[str, Moment],
    ) -> list[tf.Tensor]:
        """The new vectors of the state, where entries that are in `moments` are moments
        of a batch, and move what was there before."""
        if not moments:
            return list(new)
        found = [moments.get(name, Moment(0.0, 1.0)) for name in self.state.places]
        columns = [
            self.state.columns([value(moment) for moment in found])
            for value in (
                lambda moment: moment.momentum,
                lambda moment: moment.factor,
                lambda moment: 1.0 - moment.momentum,
            )
        ]
        moved = []
        for before, moment, *constants in zip(old, new, *columns, strict=True):
            stays, factor, rest = (tf.constant(x, moment.dtype) for x in constants)
            moved.append(before * stays + moment * factor * rest)
        return moved

    @property
    def state_names(self) -> list[str]:
        """All entries of the state, in the order of the model."""
        return list(self._is_float)


class Copy:
    """Parameters, slots, moving averages and model state on one device, or the shards
    of them that it owns, and the number of steps taken.

    Args:
        initial: their values.
        update_fn: determines the slots, and whether averages are kept.
        device: where they live.
        keeps_averages: whether the averages, if any, are kept here.

    Attributes:
        layout: of the vectors.
        params, state: variables, a vector each.
        counts: variables of the other entries of the state.
        slots: name -> variables, as `params`.
        averages: of `params`, then of `state`; empty where none are kept.
        step: int64, the steps taken.
    """

    def __init__(
        self,
        initial: Initial,
        update_fn: Update,
        device: str,
        keeps_averages: bool = True,
    ):
        self.device, self.layout = device, NetworkLayout(initial)
        layouts = self.layout.params, self.layout.state
        values = [
            layout.write({k: v.numpy() for k, v in part.items() if k in layout.places})
            for layout, part in zip(layouts, initial, strict=True)
        ]
        with tf.device(device):
            self.params, self.state = (
                [_variable(vector, name) for vector in vectors]
                for vectors, name in zip(values, ("params", "state"), strict=True)
            )
            self.counts = [_variable(initial.state[k], k) for k in self.layout.counts]
            self.slots = {
                slot: [_variable(np.zeros_like(x), slot) for x in values[0]]
                for slot in update_fn.optimizer.slots
            }
            self.averages = []
            if update_fn.ema_decay and keeps_averages:
                self.averages = [_variable(x, "averages") for x in sum(values, [])]
            self.step = _variable(np.int64(0), "step")

    def read(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """Values of variables of this copy."""
        # `read_value` would add a copy that may be on another device.
        with tf.device(self.device):
            return [variable.value() for variable in variables]

    def fetch(self, use_averages: bool = False) -> Values:
        """Parameters and model state, or the averages of both, on this device."""
        params, state = self.params, self.state
        if use_averages:
            count = len(params)
            params, state = self.averages[:count], self.averages[count:]
        return Values(*map(self.read, (params, state, self.counts)))

    def variables(self) -> list[tf.Variable]:
        """All of them."""
        slots = sum(self.slots.values(), [])
        parts = (self.params, self.state, self.counts, slots, self.averages)
        return [*sum(parts, []), self.step]

    def numpy(self) -> Arrays:
        """Canonical name -> array, in the order of the canonical state."""
        params, state = self.layout.params, self.layout.state

        def read(layout, variables):
            return layout.read([variable.numpy() for variable in variables])

        named = {f"params/{k}": v for k, v in read(params, self.params).items()}
        entries = read(state, self.state)
        entries |= zip(
            self.layout.counts, (x.numpy() for x in self.counts), strict=True
        )
        named |= {f"state/{k}": entries[k] for k in self.layout.state_names}
        slots = {slot: read(params, v) for slot, v in self.slots.items()}
        named |= {
            f"slots/{k}/{slot}": slots[slot][k] for k in params.places for slot in slots
        }
        if self.averages:
            count = len(self.params)
            averages = read(params, self.averages[:count])
            averages |= read(state, self.averages[count:])
            named |= {f"averages/{k}": v for k, v in averages.items()}
        return named

    def load(self, named: Mapping[str, np.ndarray]) -> None:
        """Assigns a canonical state, without "step"."""
        params, state = self.layout.params, self.layout.state

        def write(layout, variables, prefix, suffix=""):
            arrays = {k: named[f"{prefix}/{k}{suffix}"] for k in layout.places}
            for variable, vector in zip(variables, layout.write(arrays), strict=True):
                variable.assign(vector)

        write(params, self.params, "params")
        write(state, self.state, "state")
        for name, variable in zip(self.layout.counts, self.counts, strict=True):
            variable.assign(named[f"state/{name}"])
        for slot, variables in self.slots.items():
            write(params, variables, "slots", f"/{slot}")
        if self.averages:
            count = len(self.params)
            write(params, self.averages[:count], "averages")
            write(state, self.averages[count:], "averages")


def _variable(value, name):
    return tf.Variable(value, trainable=False, name=name)


def whole(shards: Sequence[Arrays]) -> Arrays:
    """Canonical name -> array, of the shards of one copy along the last axis."""
    if len(shards) == 1:
        return shards[0]
    return {
        name: np.concatenate([shard[name] for shard in shards], axis=-1)
        for name in shards[0]
    }


def check_equal(copies: Sequence[Copy], num_shards: int) -> None:
    """Compares all copies bit for bit.

    Args:
        copies: one after the other.
        num_shards: entries of one copy.

    Raises:
        NumericError: one differs; names the tower and the variable.
    """
    for shard in range(num_shards):
        first, *others = copies[shard::num_shards]
        if not others:
            continue
        expected = first.numpy()
        for tower, copy in enumerate(others, start=1):
            for name, array in copy.numpy().items():
                if not np.array_equal(array, expected[name], equal_nan=True):
                    raise NumericError(
                        f"{name} of tower {tower} on {copy.device} differs "
                        f"from that of tower 0 on {first.device}"
                    )
