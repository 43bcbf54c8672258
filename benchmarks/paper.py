"""What a training step costs on many GPUs, on paper: the formulas of `scaling --paper`.

Times are in seconds, sizes in bytes. Nothing here measures or imports TensorFlow.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Network:
    """Machines with some GPUs each, of which only the links are known.

    Attributes:
        gpus_per_machine: number of them.
        inner_bytes_per_sec: what a GPU sends to others of its machine.
        outer_bytes_per_sec: what a machine sends to others.
        inner_hop_secs, outer_hop_secs: latency of one message.
    """

    gpus_per_machine: int
    inner_bytes_per_sec: float
    outer_bytes_per_sec: float
    inner_hop_secs: float
    outer_hop_secs: float

    def machines(self, num_gpus: int) -> int:
        return math.ceil(num_gpus / self.gpus_per_machine)


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """One all-reduce.

    Attributes:
        inner_bytes: sent by a GPU to others of its machine.
        outer_bytes: sent by a machine to others.
        inner_hops, outer_hops: messages that wait for each other.
    """

    inner_bytes: float
    outer_bytes: float
    inner_hops: int
    outer_hops: int


def ring(num_gpus: int, num_bytes: float, network: Network) -> AllReduce:
    """One ring through all GPUs, machine by machine (Patarasuk and Yuan 2009).

    Each GPU sends 2 (n - 1) messages of 1/n of the bytes. A link between machines
    carries as much as one within. A message waits for 2 (n - 1) hops, of which two
    cross from each machine to the next, as in NCCL's model of itself (its
    src/graph/tuning.cc).
    """
    n, m = num_gpus, network.machines(num_gpus)
    sent = 2 * (n - 1) / n * num_bytes
    hops = 2 * (n - 1)
    outer_hops = min(2 * m, hops) if m > 1 else 0
    return AllReduce(
        inner_bytes=sent if n > m else 0.0,
        outer_bytes=sent if m > 1 else 0.0,
        inner_hops=hops - outer_hops,
        outer_hops=outer_hops,
    )


def hierarchical(num_gpus: int, num_bytes: float, network: Network) -> AllReduce:
    """Rings within the machines, then between them.

    The g GPUs of a machine reduce-scatter, each then has 1/g of the sums; those with
    the same part all-reduce it over the m machines, all parts at once; the GPUs of a
    machine all-gather.

    Raises:
        ValueError: the machines would not have the same number.
    """
    m = network.machines(num_gpus)
    if num_gpus % m:
        raise ValueError(f"{num_gpus} GPUs do not fill {m} machines alike")
    g = num_gpus // m
    return AllReduce(
        inner_bytes=2 * (g - 1) / g * num_bytes,
        outer_bytes=2 * (m - 1) / m * num_bytes,
        inner_hops=2 * (g - 1),
        outer_hops=2 * (m - 1),
    )


def secs_of_ring(reduced: AllReduce, network: Network, num_buffers: int = 1) -> float:
    """The time of `ring`: its links work at once, so the slowest one decides."""
    return num_buffers * _latency(reduced, network) + max(_transfers(reduced, network))


def secs_of_hierarchical(
    reduced: AllReduce, network: Network, num_buffers: int = 1
) -> float:
    """The time of `hierarchical`, whose three parts follow each other."""
    return num_buffers * _latency(reduced, network) + sum(_transfers(reduced, network))


def _latency(reduced, network):
    return (
        reduced.inner_hops * network.inner_hop_secs
        + reduced.outer_hops * network.outer_hop_secs
    )


def _transfers(reduced, network):
    return (
        reduced.inner_bytes / network.inner_bytes_per_sec,
        reduced.outer_bytes / network.outer_bytes_per_sec,
    )


def expected_max(secs: Sequence[float], num_gpus: int) -> float:
    """The mean time of the slowest of so many, each drawn from the measured times.

    Exact, as if it was drawn for ever: the slowest is at most the i-th of m sorted
    times with probability (i/m)^n. It cannot pass the slowest one that was measured.
    """
    places = np.arange(len(secs) + 1) / len(secs)
    return float(np.sort(secs) @ np.diff(places**num_gpus))


# Failures.


def young_interval(save_secs: float, mtbf_secs: float) -> float:
    """The first-order optimum of the computing time between two checkpoints
    (Young 1974)."""
    return math.sqrt(2 * save_secs * mtbf_secs)


def daly_interval(save_secs: float, mtbf_secs: float) -> float:
    """The optimum of higher order (Daly 2006, equation 37)."""
    if save_secs >= 2 * mtbf_secs:
        return mtbf_secs
    ratio = save_secs / (2 * mtbf_secs)
    correction = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return young_interval(save_secs, mtbf_secs) * correction - save_secs


def time_factor(
    interval_secs: float, save_secs: float, restart_secs: float, mtbf_secs: float
) -> float:
    """The time with checkpoints and failures over the time without (Daly 2006, equation
    20).

    Failures come at random, at a constant rate, also while a checkpoint is written or
    the training restarts; what was computed since the last checkpoint is lost.
    """
    m = mtbf_secs
    again = math.expm1((interval_secs + save_secs) / m)
    return m * math.exp(restart_secs / m) * again / interval_secs


# A step.


@dataclasses.dataclass(frozen=True)
class Compute:
    """What was measured of one GPU and its machine.

    Attributes:
        step_secs: times of single steps of one GPU.
        images: of such a step.
        num_bytes: of gradients and model state, added up in a step.
        num_buffers: in which they travel, one after the other.
        input_images_per_sec: what a machine reads and augments; infinite where the
            images are on the GPUs.
        save_secs: of a checkpoint.
        restart_secs: from a failure to the next step.
    """

    step_secs: Sequence[float]
    images: int
    num_bytes: int
    num_buffers: int
    input_images_per_sec: float
    save_secs: float
    restart_secs: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a step costs on some GPUs.

    Attributes:
        compute_secs: of the mean GPU.
        straggler_secs: for which it waits for the slowest one.
        ring, hierarchical: the all-reduce in two ways, and `_secs` their times.
        input_secs: that a machine needs for the images of a step.
        step_secs: without failures.
        mtbf_secs: between two failures of any GPU.
        interval_secs: of computing between two checkpoints.
        factor: of checkpoints and failures on the time.
    """

    num_gpus: int
    compute_secs: float
    straggler_secs: float
    ring: AllReduce
    ring_secs: float
    hierarchical: AllReduce
    hierarchical_secs: float
    input_secs: float
    step_secs: float
    mtbf_secs: float
    interval_secs: float
    factor: float

    @property
    def total_secs(self) -> float:
        """Of a step, with its part of checkpoints and failures."""
        return self.step_secs * self.factor


def cost(
    num_gpus: int, compute: Compute, network: Network, gpu_mtbf_secs: float
) -> Cost:
    """A step in which every GPU has as many images as was measured.

    Nothing of the all-reduce is hidden behind computing, all of the input is.
    """
    mean, n = float(np.mean(compute.step_secs)), num_gpus
    slowest = expected_max(compute.step_secs, n)
    # With the loss of every GPU, and the number of correct predictions.
    num_bytes = compute.num_bytes + 4 * (n + 1)
    by_ring = ring(n, num_bytes, network)
    by_machine = hierarchical(n, num_bytes, network)
    ring_secs = secs_of_ring(by_ring, network, compute.num_buffers)
    hierarchical_secs = secs_of_hierarchical(by_machine, network, compute.num_buffers)
    images = compute.images * min(n, network.gpus_per_machine)
    input_secs = images / compute.input_images_per_sec
    mtbf_secs = gpu_mtbf_secs / n
    interval_secs = daly_interval(compute.save_secs, mtbf_secs)
    return Cost(
        num_gpus=n,
        compute_secs=mean,
        straggler_secs=slowest - mean,
        ring=by_ring,
        ring_secs=ring_secs,
        hierarchical=by_machine,
        hierarchical_secs=hierarchical_secs,
        input_secs=input_secs,
        step_secs=max(slowest + min(ring_secs, hierarchical_secs), input_secs),
        mtbf_secs=mtbf_secs,
        interval_secs=interval_secs,
        factor=time_factor(
            interval_secs, compute.save_secs, compute.restart_secs, mtbf_secs
        ),
    )
