"""A single copy of the variables, which every tower reads."""

from collections.abc import Sequence

import tensorflow as tf

from towers.optim.update import Update
from towers.parallel import reduce
from towers.parallel.copies import Copy, Initial
from towers.parallel.devices import HOST
from towers.parallel.strategies.strategy import Reduced, Strategy, complete_mean
from towers.parallel.towers import TowerResult


def towers(
    initial: Initial,
    update_fn: Update,
    devices: Sequence[str],
    micro_batch_size: int,
    *,
    parameter_device: str = "auto",
) -> Strategy:
    """Keep one copy on the parameter device; every tower fetches it in every step.

    The mean goes there. Elsewhere: TensorFlow's CIFAR-10 multi-GPU tutorial,
    CentralStorageStrategy, tf_cnn_benchmarks' `parameter_server`, tensorpack's
    SyncMultiGPUTrainerParameterServer.

    `parameter_device` is "cpu", "gpu" (that of the first tower), the name of a device,
    or "auto": the CPU, but for a single tower its own device.
    """
    automatic = devices[0] if len(devices) == 1 else HOST
    named = {"auto": automatic, "cpu": HOST, "gpu": devices[0]}
    home = named.get(parameter_device, parameter_device)
    sizes = reduce.shares(micro_batch_size, len(devices))
    weights = reduce.tower_weights(sizes)

    def mean(results: Sequence[TowerResult]) -> Reduced:
        """Average the gradients on the parameter device."""
        with tf.device(home):
            per_tower = [x.gradients for x in results]
            gradients = reduce.average_gradients(per_tower, weights)
        return complete_mean(results, [gradients], weights, [home])

    return Strategy(
        devices=devices,
        sizes=sizes,
        copies=[Copy(initial, update_fn, home)],
        readers=[0] * len(devices),
        mean_fn=mean,
        description=[f"variables on {home}"],
    )
