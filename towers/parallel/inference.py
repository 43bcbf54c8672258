"""A trained network on several devices, without a trainer."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from towers.data.tta import TestTimeAugmentation
from towers.optim import losses
from towers.optim.phases import phases_of
from towers.parallel.eval_step import Evaluator
from towers.parallel.network import WholeNetwork
from towers.parallel.variables import Fetched


class Copies:
    """The variables of a network, a copy on every device: all that an `Evaluator` needs
    of a strategy.

    Args:
        model: gives the values.
        devices: device names.
    """

    num_shards = 1

    def __init__(self, model: keras.Model, devices: Sequence[str]):
        self._copies = [_copy(model, device) for device in devices]

    def fetch(self, use_averages: bool = False) -> list[Fetched]:
        """Per device parameters and model state, there."""
        return [
            Fetched(*([x.read_value() for x in part] for part in copy))
            for copy in self._copies
        ]


def create_predictor(
    model: keras.Model, devices: Sequence[str], tta: TestTimeAugmentation
) -> Evaluator:
    """Computes a whole network on every device, each for its share of a batch.

    Args:
        model: with its trained values; its output need not be logits where there is no
            test-time augmentation.
        devices: device names, one tower each.
        tta: test-time augmentation.
    """
    network = WholeNetwork(phases_of((), model), losses.cross_entropy, devices)
    return Evaluator(
        Copies(model, devices), network, losses.cross_entropy, devices, tta
    )


def _copy(model, device):
    with tf.device(device):
        return tuple(
            [tf.Variable(x.value, trainable=False) for x in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables)
        )
