"""One set of a run's variables on one device, and its canonical names."""

from collections.abc import Mapping

import tensorflow as tf

from towers.optim.optimizers import Slots
from towers.optim.update import Update


class Variables:
    """Parameters, slots, moving averages and model state on the device in scope.

    Args:
        params, state: name -> initial value, in the model's order.
        update: says which slots and whether averages are kept.
        keeps_averages: whether they are, if any, kept here.

    Attributes:
        params, averages, state: variables in the model's order.
        slots: per parameter its slots by name.
    """

    def __init__(
        self,
        params: Mapping[str, tf.Tensor],
        state: Mapping[str, tf.Tensor],
        update: Update,
        keeps_averages: bool = True,
    ):
        self._names, self._state_names = list(params), list(state)
        with tf.name_scope("params"):
            self.params = [tf.Variable(v, name=name) for name, v in params.items()]
        with tf.name_scope("state"):
            self.state = [
                tf.Variable(v, trainable=False, name=name) for name, v in state.items()
            ]
        self.slots = [
            {
                slot: tf.Variable(tf.zeros_like(param), trainable=False, name=slot)
                for slot in update.optimizer.slots
            }
            for param in self.params
        ]
        self.averages = []
        if update.ema_decay and keeps_averages:
            self.averages = [tf.Variable(p, trainable=False) for p in self.params]

    def fetch(
        self, use_averages: bool = False
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Parameters (or averages) and model state, copied to the device in scope."""
        params = self.averages if use_averages else self.params
        return [tf.identity(p) for p in params], [tf.identity(s) for s in self.state]

    def read(self) -> tuple[list[tf.Tensor], list[Slots], list[tf.Tensor]]:
        """Parameters, slots and averages as `Update` takes them."""
        return (
            [param.read_value() for param in self.params],
            [{k: v.read_value() for k, v in slot.items()} for slot in self.slots],
            [average.read_value() for average in self.averages],
        )

    def assign(
        self,
        params: list[tf.Tensor],
        slots: list[Slots],
        averages: list[tf.Tensor],
        state: list[tf.Tensor],
    ) -> list[tf.Operation]:
        """Assigns what `Update` gave, and the new model state."""
        pairs = [*zip(self.params, params, strict=True)]
        pairs += zip(self.averages, averages, strict=True)
        pairs += zip(self.state, state, strict=True)
        for variables, values in zip(self.slots, slots, strict=True):
            pairs += [(variables[name], values[name]) for name in variables]
        return [variable.assign(value, read_value=False) for variable, value in pairs]

    def named(self) -> dict[str, tf.Variable]:
        """Canonical name -> variable, in the order of the canonical state."""
        named = {}
        for name, variable in zip(self._names, self.params, strict=True):
            named[f"params/{name}"] = variable
        for name, variable in zip(self._state_names, self.state, strict=True):
            named[f"state/{name}"] = variable
        for name, slots in zip(self._names, self.slots, strict=True):
            named |= {f"slots/{name}/{slot}": v for slot, v in slots.items()}
        for name, variable in zip(self._names, self.averages, strict=False):
            named[f"averages/{name}"] = variable
        return named
