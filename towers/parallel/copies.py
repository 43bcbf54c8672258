"""The copies of a run's variables: vectors on a device, and their canonical names."""

import enum
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """Create a variable that no tape watches, on the current device."""
    return tf.Variable(value, trainable=False, name=name)


def num_bytes(variables: Iterable[tf.Variable]) -> int:
    """Return the size of variables, or tensors, in bytes."""
    return sum(x.shape.num_elements() * x.dtype.size for x in variables)


class Weights(enum.Enum):
    """Parameters and model state that an evaluation uses."""

    RAW = "raw"
    EMA = "ema"  # Exponential moving averages.


class Initial(NamedTuple):
    """Initial values, name -> value, in the order of the model."""

    params: dict[str, tf.Tensor]
    state: dict[str, tf.Tensor]

    @classmethod
    def of(cls, model: keras.Model) -> "Initial":
        """Return the initial values of a model."""
        values = (
            dict(zip(variable_names(part), (v.value for v in part), strict=True))
            for part in (model.trainable_variables, model.non_trainable_variables)
        )
        return cls(*values)

    def map(self, function: Callable[[tf.Tensor], tf.Tensor]) -> "Initial":
        """Apply a function to each value."""
        return Initial(*({k: function(v) for k, v in part.items()} for part in self))


class Values(NamedTuple):
    """Parameters, model state and the number of steps on one device."""

    params: list[tf.Tensor]  # Vectors.
    state: list[tf.Tensor]  # Vectors of the float entries of the model state.
    integers: list[tf.Tensor]  # Its other entries.
    step: Sequence[tf.Tensor] = ()  # [steps taken, int64]; empty for inference.

    def copied_to(self, device: str) -> "Values":
        """Copy the values to another device."""
        with tf.device(device):
            return Values(*([tf.identity(x) for x in part] for part in self))

    def ramp(self) -> tf.Tensor | None:
        """Return the ramp of the step, see `optim.update.ramp`; None in inference."""
        return ramp(*self.step) if self.step else None

    def read(self) -> "Values":
        """Read the values of variables."""
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
        """Return the model state in the order of the model."""
        floats, integers = iter(self.state.views(values.state)), iter(values.integers)
        return [next(floats if x else integers) for x in self._is_float]

    def pack_state(
        self, state: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return the vectors and integers of a state in the order of the model."""
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
        """Return the new state, in which `moments` of a batch move the old values.

        Entries without moments are replaced by new ones; for the ramp see `ramped`.
        """
        if not moments:
            return list(new)
        entries = [moments.get(name, Moment()) for name in self.state.places]
        numbers = zip(*((x.momentum, x.factor) for x in entries), strict=True)
        columns = map(self.state.columns, numbers)
        moved = []
        for before, moment, momentum, factor in zip(old, new, *columns, strict=True):
            stays, rest = ramped(momentum, ramp, before.dtype)
            added = scaled(scaled(moment, factor), rest)
            moved.append(scaled(before, stays) + added)
        return moved


def copies_on(
    model: keras.Model, devices: Sequence[str]
) -> tuple[NetworkLayout, list[Values]]:
    """Return the layout of a network, and its variables on each device."""
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
    """The variables on one device, or its shard of them.

    `params`, `state` and `slots` (name -> as `params`) are vectors, `integers` the
    other entries of the model state, and `averages` those of `params`, then of `state`.
    The update determines the slots, and whether averages are kept.
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
                both = itertools.chain(*values)
                self.averages = [variable(x, "averages") for x in both]
            self.step = variable(np.int64(0), "step")

    def read(self, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """Read variables of this copy."""
        # `read_value` would add a copy, perhaps on another device.
        with tf.device(self.device):
            return [variable.value() for variable in variables]

    def fetch(self, weights: Weights = Weights.RAW) -> Values:
        """Read parameters, model state and the number of steps."""
        params, state = self.params, self.state
        if weights is Weights.EMA:
            count = len(self.params)
            params, state = self.averages[:count], self.averages[count:]
        return Values(*map(self.read, (params, state, self.integers, [self.step])))

    def update_arguments(self) -> tuple:
        """Return layout, step, parameters and slots, as `Update` takes them."""
        slots = {name: self.read(own) for name, own in self.slots.items()}
        [step] = self.read([self.step])
        return self.layout.params, step, self.read(self.params), slots

    def moved_averages(
        self, values: Sequence[tf.Tensor], ema_decay: float
    ) -> list[tf.Tensor]:
        """Return the moving averages after a step with new values, if they are kept."""
        if not self.averages:
            return []
        [step] = self.read([self.step])
        return moving_averages(self.read(self.averages), values, step, ema_decay)

    def variables(self) -> list[tf.Variable]:
        """Return all variables; the last one is the number of steps."""
        parts = self.params, self.state, self.integers, *self.slots.values()
        return [*itertools.chain(*parts, self.averages), self.step]

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes of the variables, by purpose."""
        kinds = {
            "parameters": self.params,
            "slots": itertools.chain(*self.slots.values()),
            "averages": self.averages,
            "model state": [*self.state, *self.integers, self.step],
        }
        return {kind: num_bytes(variables) for kind, variables in kinds.items()}

    def numpy(self) -> Arrays:
        """Return canonical name -> array, in the order of the canonical state."""
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
        """Assign a canonical state, without "step"."""
        for name, layout, variables in self._named_vectors():
            values = layout.write({k: named[name.format(k)] for k in layout.places})
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
        for name, variable in self._named_integers():
            variable.assign(named[f"state/{name}"])

    def _named_integers(self):
        return zip(self.layout.integers, self.integers, strict=True)

    def _named_vectors(self):
        """Yield name with {} for the variable's, layout, variables."""
        params, state = self.layout.params, self.layout.state
        yield "params/{}", params, self.params
        yield "state/{}", state, self.state
        for slot, variables in self.slots.items():
            yield f"slots/{{}}/{slot}", params, variables
        if self.averages:
            yield "averages/{}", params, self.averages[: len(self.params)]
            yield "averages/{}", state, self.averages[len(self.params) :]


def join_shards(shards: Sequence[Arrays]) -> Arrays:
    """Join the shards of one copy along the last axis; canonical name -> array."""
    if len(shards) == 1:
        return shards[0]
    return {
        name: np.concatenate([shard[name] for shard in shards], axis=-1)
        for name in shards[0]
    }


def check_equal(copies: Sequence[Copy], num_shards: int) -> None:
    """Raise NumericError if copies of `num_shards` entries each differ in any bit."""
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
