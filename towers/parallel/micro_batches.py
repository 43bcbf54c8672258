"""Accumulation: the gradients of a step over several micro-batches."""

import tensorflow as tf

from towers.parallel.loop import around_loop, inside_of_loop
from towers.parallel.sharding.network import SplitTowers
from towers.parallel.towers import TowerResult, Towers


class MicroBatches:
    """Computes gradients like `Towers`, of one micro-batch after the other.

    Only the activations of one micro-batch are in memory. Gradients and losses are
    means over all of them; the model state of each device goes from one to the next.
    """

    def __init__(self, towers: Towers | SplitTowers, accumulate_steps: int):
        self._towers, self._accumulate_steps = towers, accumulate_steps

    def gradients(self, phase, fetched, batches, loss_scale=None) -> list[TowerResult]:
        """Return the results over all micro-batches, see `Towers.gradients`."""
        count = self._accumulate_steps
        cut = [
            {name: _in_micro_batches(x, count) for name, x in batch.items()}
            for batch in batches
        ]

        def compute(values, micro_batch):
            shares = [
                {
                    name: _next_to(x, lambda x=x: x[micro_batch])
                    for name, x in batch.items()
                }
                for batch in cut
            ]
            return self._towers.gradients(phase, values, shares, loss_scale)

        # Results and variables of a loop have no device. Operations on them alone would
        # be placed on the first GPU, so they are put next to the results of the first
        # micro-batch.
        def add(micro_batch, totals):
            current = [
                values._replace(state=total.state, integers=total.integers)
                for values, total in zip(fetched, totals, strict=True)
            ]
            with inside_of_loop():
                results = compute(current, micro_batch)
                return micro_batch + 1, [
                    TowerResult(
                        gradients=_each(
                            tf.add, one.gradients, a.gradients, b.gradients
                        ),
                        # An unchanged entry is a read variable, which has no device.
                        state=_each(tf.identity, one.state, b.state),
                        integers=[
                            _next_to(one.loss, tf.identity, x) for x in b.integers
                        ],
                        loss=_next_to(one.loss, tf.add, a.loss, b.loss),
                        correct=_next_to(one.loss, tf.add, a.correct, b.correct),
                    )
                    for one, a, b in zip(first, totals, results, strict=True)
                ]

        def should_continue(micro_batch, _):
            return micro_batch < count

        def divide(total):
            return total / count

        first = compute(list(fetched), 0)
        begin = tf.constant(1), first
        with around_loop():
            _, totals = tf.while_loop(
                should_continue, add, begin, parallel_iterations=1
            )
        return [
            total._replace(
                gradients=_each(divide, one.gradients, total.gradients),
                loss=_next_to(one.loss, divide, total.loss),
            )
            for one, total in zip(first, totals, strict=True)
        ]


def _in_micro_batches(x, count):
    size = x.shape[0] // count
    return _next_to(x, tf.reshape, x, [count, size, *x.shape[1:]])


def _each(function, neighbors, *lists):
    """Call a function of elements of lists, each on the device of its neighbor."""
    return [
        _next_to(neighbor, function, *values)
        for neighbor, *values in zip(neighbors, *lists, strict=True)
    ]


def _next_to(neighbor, function, *values):
    """Call a function on the device of the tensor `neighbor`."""
    with tf.device(neighbor.device):
        return function(*values)
