"""Strategy `replicated`: every device keeps a full copy of everything.

In each step every device computes the gradients of its share of the batch with its own
copy of the parameters, the gradients are all-reduced, and every copy updates itself. As
all copies see the same sums, bit for bit, they stay the same. (Where an update itself
adds up, as Muon's does, the first copy makes it and hands it on.)

Elsewhere: the from-scratch multi-GPU chapter of Dive into Deep Learning (its
`get_params`, `split_and_load`, `allreduce`, `train_batch` are here), MirroredStrategy,
tf_cnn_benchmarks' `replicated`, tensorpack's SyncMultiGPUTrainerReplicated.
"""

import numpy as np
import tensorflow as tf

from towers.errors import NumericError
from towers.parallel.all_reduce import all_average_states, all_reduce, check_algorithm
from towers.parallel.gradients import squared_norm
from towers.parallel.synchronous import Met, Synchronous
from towers.parallel.variables import Variables


class Replicated(Synchronous):
    """Synchronous towers, each with its own copy of the variables.

    Args:
        algorithm: of the all-reduce, a key of `all_reduce.ALGORITHMS`.
        pack_mb: size of the buffers in which gradients travel, in megabytes.
        reduce_dtype: what travels, such as tf.bfloat16; None for the gradients' type.
            The other arguments are those of `Synchronous`.
    """

    def __init__(
        self,
        *args,
        algorithm: str = "star",
        pack_mb: float = 0.0,
        reduce_dtype: tf.DType | None = None,
        **kwargs,
    ):
        check_algorithm(algorithm, len(tf.config.list_physical_devices("GPU")))
        self._reduction = {
            "algorithm": algorithm,
            "pack_mb": pack_mb,
            "dtype": reduce_dtype,
        }
        super().__init__(*args, **kwargs)

    def _create_variables(self):
        self._replicas = [self._get_params(device) for device in self._devices]

    def _get_params(self, device):
        """A copy of the variables on a device. The moving averages, which no step
        reads, are on the first device alone."""
        with tf.device(device):
            return Variables(
                *self._initial_values(),
                self._update,
                keeps_averages=device == self._devices[0],
            )

    def describe(self):
        algorithm = self._reduction["algorithm"]
        return [f"a copy on every device, all-reduce {algorithm}", *super().describe()]

    def _named_variables(self):
        return self._replicas[0].named()

    def _variable_sets(self):
        return self._replicas

    def _logits(self, batches, use_averages):
        return self._logits_of_whole(
            batches,
            lambda tower: self._replicas[0 if use_averages else tower].fetch(
                use_averages
            ),
        )

    def _all_reduce(self, tensors, **reduction):
        """The image-weighted mean over the devices, on every device."""
        return all_reduce(tensors, self._devices, weights=self._weights, **reduction)

    def _meet(self, stage, batch):
        # Every device computes the gradients of its share with its own copy.
        fetched = []
        for replica, device in zip(self._replicas, self._devices, strict=True):
            with tf.device(device):
                fetched.append(replica.fetch())
        results = self._results(stage, fetched, batch)

        # Weight decay does not depend on the images: the first device adds it for all.
        gradients = [r.gradients for r in results]
        with tf.device(self._devices[0]):
            decay, gradients[0] = self._add_weight_decay(
                stage, fetched[0][0], gradients[0], self._weights[0]
            )

        # The gradients meet on every device.
        gradients = self._all_reduce(gradients, **self._reduction)
        states = all_average_states(
            [r.state for r in results], self._devices, self._weights
        )
        with tf.device(self._devices[0]):
            # Once for all: a sum may round differently on another device.
            norm = tf.sqrt(squared_norm(gradients[0]))
        results = [[r] for r in results]
        return Met(results, decay, norm, gradients, states, gradients[:1])

    def _apply(self, step, met):
        # Every copy updates itself.
        with tf.device(self._devices[0]):
            # Once for all, as the norm.
            squares = self._update.squares(self._replicas[0].params, met.gradients[0])
        assignments, updated = [], None
        for tower, replica in enumerate(self._replicas):
            with tf.device(self._devices[tower]):
                if updated is None or self._update.optimizer.elementwise:
                    updated = self._update(
                        step, met.norm, *replica.read(), met.gradients[tower], squares
                    )
                else:  # sums again: the first copy's are handed on
                    params, slots, _ = updated
                    updated = params, slots, []
                assignments += replica.assign(*updated, met.states[tower])
        return assignments

    def load(self, state):
        super().load(state)
        for replica in self._replicas[1:]:
            for name, variable in replica.named().items():
                variable.assign(state[name])

    def state(self):
        self.check_copies()
        return super().state()

    def check_copies(self) -> None:
        """Compares all copies bit for bit.

        Raises:
            NumericError: one differs; names the tower and the variable.
        """
        first = {name: v.numpy() for name, v in self._replicas[0].named().items()}
        for tower, replica in enumerate(self._replicas[1:], start=1):
            for name, variable in replica.named().items():
                if not np.array_equal(variable.numpy(), first[name], equal_nan=True):
                    raise NumericError(
                        f"{name} of tower {tower} on {self._devices[tower]} differs "
                        f"from that of tower 0 on {self._devices[0]}"
                    )
