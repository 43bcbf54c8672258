"""One set of a run's variables on one device, and its canonical names."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.errors import NumericError
from towers.models.variables import variable_names
from towers.optim.optimizers import Slots
from towers.optim.update import Update


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


class Fetched(NamedTuple):
    """Parameters and model state on one device, in the order of the model."""

    params: list[tf.Tensor]
    state: list[tf.Tensor]

    def copied_to(self, device: str) -> "Fetched":
        """The same values on another device."""
        with tf.device(device):
            return Fetched(*([tf.identity(x) for x in part] for part in self))


class Variables:
    """Parameters, slots, moving averages and model state on one device.

    Args:
        initial: their values.
        update_fn: determines the slots, and whether averages are kept.
        device: where they live.
        keeps_averages: whether the averages, if any, are kept here.

    Attributes:
        params, averages, state: variables in the order of the model.
        slots: per parameter its slots by name.
    """

    def __init__(
        self,
        initial: Initial,
        update_fn: Update,
        device: str,
        keeps_averages: bool = True,
    ):
        self.device = device
        self._param_names, self._state_names = map(list, initial)
        with tf.device(device):
            with tf.name_scope("params"):
                self.params = [
                    tf.Variable(v, name=name) for name, v in initial.params.items()
                ]
            with tf.name_scope("state"):
                self.state = [
                    tf.Variable(v, trainable=False, name=name)
                    for name, v in initial.state.items()
                ]
            self.slots = [
                {
                    slot: tf.Variable(tf.zeros_like(param), trainable=False, name=slot)
                    for slot in update_fn.optimizer.slots
                }
                for param in self.params
            ]
            self.averages = []
            if update_fn.ema_decay and keeps_averages:
                self.averages = [tf.Variable(p, trainable=False) for p in self.params]

    def fetch(self, use_averages: bool = False) -> Fetched:
        """Parameters (or averages) and model state, on this device."""
        params = self.averages if use_averages else self.params
        return Fetched(self._values(params), self._values(self.state))

    def read(self) -> tuple[list[tf.Tensor], list[Slots], list[tf.Tensor]]:
        """Parameters, slots and averages as `Update` takes them."""
        slots = [
            dict(zip(slot, self._values(slot.values()), strict=True))
            for slot in self.slots
        ]
        return self._values(self.params), slots, self._values(self.averages)

    def _values(self, variables):
        # `read_value` would add a copy that may be on another device.
        with tf.device(self.device):
            return [variable.value() for variable in variables]

    def assign(
        self,
        params: list[tf.Tensor],
        slots: list[Slots],
        averages: list[tf.Tensor],
        state: list[tf.Tensor],
    ) -> list[tf.Operation]:
        """Assigns the results of `Update`, and the new model state."""
        pairs = [*zip(self.params, params, strict=True)]
        pairs += zip(self.averages, averages, strict=True)
        pairs += zip(self.state, state, strict=True)
        for variables, values in zip(self.slots, slots, strict=True):
            pairs += [(variables[name], values[name]) for name in variables]
        return [variable.assign(value, read_value=False) for variable, value in pairs]

    def named(self) -> dict[str, tf.Variable]:
        """Canonical name -> variable, in the order of the canonical state."""
        named = {}
        for name, variable in zip(self._param_names, self.params, strict=True):
            named[f"params/{name}"] = variable
        for name, variable in zip(self._state_names, self.state, strict=True):
            named[f"state/{name}"] = variable
        for name, slots in zip(self._param_names, self.slots, strict=True):
            named |= {f"slots/{name}/{slot}": v for slot, v in slots.items()}
        for name, variable in zip(self._param_names, self.averages, strict=False):
            named[f"averages/{name}"] = variable
        return named

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Assigns the values of a canonical state."""
        for name, variable in self.named().items():
            variable.assign(state[name])


def named_shards(shards: Sequence[Variables]) -> dict[str, list[tf.Variable]]:
    """Canonical name -> its variable in each shard of one copy."""
    named = [variables.named() for variables in shards]
    return {name: [variables[name] for variables in named] for name in named[0]}


def check_copies(variables: Sequence[Variables], num_shards: int) -> None:
    """Compares all copies of the variables bit for bit.

    Args:
        variables: copy after copy.
        num_shards: entries of one copy.

    Raises:
        NumericError: one differs; names the tower and the variable.
    """
    for shard in range(num_shards):
        first, *others = variables[shard::num_shards]
        if not others:
            continue
        expected = {name: v.numpy() for name, v in first.named().items()}
        for tower, copy in enumerate(others, start=1):
            for name, variable in copy.named().items():
                if not np.array_equal(variable.numpy(), expected[name], equal_nan=True):
                    raise NumericError(
                        f"{name} of tower {tower} on {copy.device} differs "
                        f"from that of tower 0 on {first.device}"
                    )
