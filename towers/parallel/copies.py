"""The copies of a run's variables: vectors on a device, and their canonical names."""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.errors import NumericError
from towers.models.layers.normalization import Moment, ramped
from towers.models.variables import variable_names
from towers.optim.update import Update, moving_averages, ramp
from towers.optim.vector import Layout
from towers.parallel.reduce import scaled

Arrays = dict[str, np.ndarray]


def variable(value: tf.Tensor | np.ndarray | bool | float, name: str) -> tf.Variable:
    """A variable that no tape watches, on the current device."""
    return tf.Variable(value, trainable=False, name=name)


class Weights(enum.Enum):
    """The parameters, and the model state, that an evaluation uses."""

    RAW = "raw"
    EMA = "ema"  # their exponential moving averages


class Initial(NamedTuple):
    """Initial values, name -> value, in the order of the model."""

    params: dict[str, tf.Tensor]
    state: dict[str, tf.Tensor]

    @classmethod
    def of(cls, model: keras.Model) -> "Initial":
        """The initial values of a model."""
        values = (
            dict(zip(variable_names(part), (v.value for v in part), strict=True))
            for part in (model.trainable_variables, model.non_trainable_variables)
        )
        return cls(*values)

    def map(self, function: Callable[[tf.Tensor], tf.Tensor]) -> "Initial":
        """The results of a function of each value."""
        return Initial(*({k: function(v) for k, v in part.items()} for part in self))


class Values(NamedTuple):
    """Parameters, model state and the number of steps on one device."""

    params: list[tf.Tensor]  # vectors
    state: list[tf.Tensor]  # vectors of the float entries
    integers: list[tf.Tensor]  # its other entries
    step: list[tf.Tensor] = []  # the steps taken, int64; empty for inference alone

    def copied_to(self, device: str) -> "Values":
        """The same values on another device."""
        with tf.device(device):
            return Values(*([tf.identity(x) for x in part] for part in self))

    def ramp(self) -> tf.Tensor | None:
        """The ramp of the step, see `optim.update.ramp`; None in inference."""
        return ramp(*self.step) if self.step else None

    def read(self) -> "Values":
        """The tensors, where these are variables."""
        return Values(*([x.value() for x in part] for part in self))


class NetworkLayout:
    """The vectors of a network's parameters and model state."""

    def __init__(self, initial: Initial):
        floats = {k: v for k, v in initial.state.items() if v.dtype.is_floating}
        self.params, self.state = Layout(initial.params), Layout(floats)
        self.state_names = list(initial.state)  # in the order of the model
        self._is_float = [name in floats for name in initial.state]
        self.integers = [name for name in initial.state if name not in floats]

    def state_views(self, values: Values) -> list[tf.Tensor]:
        """The model state in the order of the model."""
        floats, integers = iter(self.state.views(values.state)), iter(values.integers)
        return [next(floats if x else integers) for x in self._is_float]

    def pack_state(
        self, state: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The vectors of a model state in the order of the model, and its integers."""
        pairs = list(zip(state, self._is_float, strict=True))
        floats = self.state.pack([x for x, is_float in pairs if is_float])
        return floats, [x for x, is_float in pairs if not is_float]

    def move(
        self,
        old: Sequence[tf.Tensor],
        new: Sequence[tf.Tensor],
        moments: Mapping[str, Moment],
        ramp: tf.Tensor | None = None,
    ) -> list[tf.Tensor]:
        """The new vectors of the state, where entries that are in `moments` are moments
        of a batch, and move what was there before; for the ramp see `ramped`.
        """
        if not moments:
            return list(new)
        entries = [moments.get(name, Moment()) for name in self.state.places]
        numbers = zip(*((x.momentum, x.factor) for x in entries), strict=True)
        columns = map(self.state.columns, numbers)
        moved = []
        for before, moment, momentum, factor in zip(old, new, *columns, strict=True):
            stays, rest = ramped(momentum, ramp, before.dtype)
            moment = scaled(scaled(moment, factor), rest)
            moved.append(scaled(before, stays) + moment)
        return moved


def copies_on(
    model: keras.Model, devices: Sequence[str]
) -> tuple[NetworkLayout, list[Values]]:
    """The layout of a network's values, and variables with them on each device."""
    initial, copies = Initial.of(model), []
    layout = NetworkLayout(initial)
    for device in devices:
        with tf.device(device):
            params = layout.params.pack(list(initial.params.values()))
            packed = params, *layout.pack_state(list(initial.state.values()))
            copies.append(
                Values(*([tf.Variable(x, trainable=False) for x in p] for p in packed))
            )
    return layout, copies


class Copy:
    """Parameters, slots, moving averages and model state on one device, or the shards
    of them that it owns, and the number of steps taken.

    The update determines the slots, and whether averages are kept. `params`, `state`
    and `slots` (name -> as `params`) are variables, a vector each; `integers` are the
    other entries of the state, `averages` of `params`, then of `state`.
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
                [variable(vector, name) for vector in vectors]
                for vectors, name in zip(values, ("params", "state"), strict=True)
            )
            self.integers = [
                variable(initial.state[k], k) for k in self.layout.integers
            ]
            self.slots = {
                slot: [variable(np.zeros_like(x), slot) for x in values[0]]
                for slot in update_fn.optimizer.slots
            }
            self.averages = []
            if update_fn.ema_decay and keeps_averages:
                self.averages = [variable(x, "averages") for x in sum(values, [])]
            self.step = variable(np.int64(0), "step")

    def read(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """Values of variables of this copy."""
        # `read_value` would add a copy that may be on another device.
        with tf.device(self.device):
            return [variable.value() for variable in variables]

    def fetch(self, weights: Weights = Weights.RAW) -> Values:
        """Parameters and model state, and the number of steps, on this device."""
        params, state = self.params, self.state
        if weights is Weights.EMA:
            count = len(self.params)
            params, state = self.averages[:count], self.averages[count:]
        return Values(*map(self.read, (params, state, self.integers, [self.step])))

    def update_arguments(self) -> tuple:
        """The layout, step, parameters and slots, as `Update` takes them."""
        slots = {name: self.read(own) for name, own in self.slots.items()}
        [step] = self.read([self.step])
        return self.layout.params, step, self.read(self.params), slots

    def moved_averages(
        self, values: Sequence[tf.Tensor], ema_decay: float
    ) -> list[tf.Tensor]:
        """The moving averages after a step with new values; none where none are
        kept.
        """
        if not self.averages:
            return []
        [step] = self.read([self.step])
        return moving_averages(self.read(self.averages), values, step, ema_decay)

    def variables(self) -> list[tf.Variable]:
        """All of them."""
        slots = sum(self.slots.values(), [])
        parts = (self.params, self.state, self.integers, slots, self.averages)
        return [*sum(parts, []), self.step]

    def num_bytes(self) -> dict[str, int]:
        """Bytes of the variables, by purpose."""
        kinds = {
            "parameters": self.params,
            "slots": sum(self.slots.values(), []),
            "averages": self.averages,
            "model state": [*self.state, *self.integers, self.step],
        }
        return {
            kind: sum(v.shape.num_elements() * v.dtype.size for v in variables)
            for kind, variables in kinds.items()
        }

    def numpy(self) -> Arrays:
        """Canonical name -> array, in the order of the canonical state."""
        arrays = {f"state/{k}": v.numpy() for k, v in self._named_integers()}
        for name, layout, variables in self._named_vectors():
            values = layout.read([variable.numpy() for variable in variables])
            arrays |= {name.format(k): v for k, v in values.items()}
        params, state = self.layout.params.places, self.layout.state.places
        names = [f"params/{k}" for k in params]
        names += [f"state/{k}" for k in self.layout.state_names]
        names += [f"slots/{k}/{slot}" for k in params for slot in self.slots]
        names += [f"averages/{k}" for k in [*params, *state] if self.averages]
        return {name: arrays[name] for name in names}

    def load(self, named: Mapping[str, np.ndarray]) -> None:
        """Assigns a canonical state, without "step"."""
        for name, layout, variables in self._named_vectors():
            values = layout.write({k: named[name.format(k)] for k in layout.places})
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
        for name, variable in self._named_integers():
            variable.assign(named[f"state/{name}"])

    def _named_integers(self):
        return zip(self.layout.integers, self.integers, strict=True)

    def _named_vectors(self):
        """(canonical name with {} for the variable's, layout, variables)."""
        params, state = self.layout.params, self.layout.state
        yield "params/{}", params, self.params
        yield "state/{}", state, self.state
        for slot, variables in self.slots.items():
            yield f"slots/{{}}/{slot}", params, variables
        if self.averages:
            yield "averages/{}", params, self.averages[: len(self.params)]
            yield "averages/{}", state, self.averages[len(self.params) :]


def whole(shards: Sequence[Arrays]) -> Arrays:
    """Canonical name -> array, of the shards of one copy along the last axis."""
    if len(shards) == 1:
        return shards[0]
    return {
        name: np.concatenate([shard[name] for shard in shards], axis=-1)
        for name in shards[0]
    }


def check_equal(copies: Sequence[Copy], num_shards: int) -> None:
    """Compares all copies, `num_shards` entries each, bit for bit; a NumericError names
    the tower and the variable that differ.
    """
    for shard in range(num_shards):
        first, *others = copies[shard::num_shards]
        expected = first.numpy() if others else {}
        for tower, copy in enumerate(others, start=1):
            for name, array in copy.numpy().items():
                if not np.array_equal(array, expected[name], equal_nan=True):
                    raise NumericError(
                        f"{name} of tower {tower} on {copy.device} differs "
                        f"from {name} of tower 0 on {first.device}"
                    )
