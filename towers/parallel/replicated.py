"""Strategy `replicated`: every device keeps a full copy of everything.

In each step every device computes the gradients of its share of the batch with its own
copy of the parameters, the gradients are all-reduced, and every copy updates itself. As
all copies see the same sums, bit for bit, they stay the same. (Where an update itself
adds up, as Muon's does, the first copy computes it and the others receive the result.)

Elsewhere: the from-scratch multi-GPU chapter of Dive into Deep Learning (its
`get_params`, `split_and_load`, `allreduce`, `train_batch`), MirroredStrategy,
tf_cnn_benchmarks' `replicated`, tensorpack's SyncMultiGPUTrainerReplicated.
"""

from collections.abc import Sequence

import tensorflow as tf

from towers.optim.update import Update
from towers.parallel.all_reduce import all_reduce, check_algorithm
from towers.parallel.gradients import all_average_states, shares, tower_weights
from towers.parallel.strategy import Mean
from towers.parallel.traced import TracedOnce
from towers.parallel.variables import Initial, Variables, named_shards

# Few large copies between GPUs are faster than many small ones; the logical devices of
# a CPU share its memory.
PACK_MB_ON_GPUS = 1.0


class Replicated:
    """Implements the protocol `Strategy`.

    Args:
        initial, update_fn, devices, micro_batch_size: as in the protocol.
        all_reduce: a key of `all_reduce.ALGORITHMS`, or auto for star.
        all_reduce_pack_mb: megabytes of the buffers in which gradients travel; 0 packs
            none, -1 is PACK_MB_ON_GPUS on GPUs and 0 on a CPU.
        all_reduce_dtype: what travels, such as bfloat16; empty for the gradients' type.
    """

    num_shards = 1

    def __init__(
        self,
        initial: Initial,
        update_fn: Update,
        devices: Sequence[str],
        micro_batch_size: int,
        *,
        all_reduce: str = "auto",
        all_reduce_pack_mb: float = -1.0,
        all_reduce_dtype: str = "",
    ):
        all_reduce = "star" if all_reduce == "auto" else all_reduce
        dtype = tf.as_dtype(all_reduce_dtype) if all_reduce_dtype else None
        check_algorithm(all_reduce, devices, dtype)
        if all_reduce_pack_mb < 0:
            all_reduce_pack_mb = PACK_MB_ON_GPUS if "GPU" in devices[0] else 0.0
        self._reduction = {
            "algorithm": all_reduce,
            "pack_mb": all_reduce_pack_mb,
            "dtype": dtype,
        }
        self._update_fn, self._devices = update_fn, devices
        self._traced_update = TracedOnce(lambda _, *args: update_fn(*args))
        self.sizes = shares(micro_batch_size, len(devices))
        self._weights = tower_weights(self.sizes)
        # No step reads the averages, so one copy is enough.
        self.variables = [
            Variables(initial, update_fn, device, keeps_averages=device == devices[0])
            for device in devices
        ]
        self.description = [f"a copy on every device, all-reduce {all_reduce}"]

    def fetch(self, use_averages=False):
        if not use_averages:
            return [replica.fetch() for replica in self.variables]
        averages = self.variables[0].fetch(use_averages)
        return [averages, *map(averages.copied_to, self._devices[1:])]

    def average(self, results):
        gradients, states = [r.gradients for r in results], [r.state for r in results]
        return Mean(
            all_reduce(
                gradients, self._devices, weights=self._weights, **self._reduction
            ),
            all_average_states(states, self._devices, self._weights),
        )

    def update(self, step, mean):
        assignments, updated = [], None
        for replica, gradients, state in zip(
            self.variables, mean.gradients, mean.states, strict=True
        ):
            with tf.device(replica.device):
                if updated is None or self._update_fn.optimizer.elementwise:
                    updated = self._traced_update(
                        None,
                        step,
                        mean.norm,
                        *replica.read(),
                        gradients,
                        mean.squares,
                        name="update",
                    )
                else:  # its sums may round differently here
                    params, slots, _ = updated
                    updated = params, slots, []
                assignments += replica.assign(*updated, state)
        return assignments

    def named_variables(self):
        return named_shards(self.variables[:1])

    def load(self, state):
        for replica in self.variables:
            replica.load(state)
