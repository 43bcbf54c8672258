"""Several processes on one machine, by the formulas of `paper`, and their error."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence

from benchmarks import measure, paper

COLUMNS = {
    "network, processes": "p, on c cores",
    "compute, ms": (
        "max(E[max of p], p u / c), of a process alone with its part of the batch on "
        "its cores; u is its processor time a step"
    ),
    "all-reduce, ms": (
        "(2 (p-1) K hops + 2 (p-1)/p B / bandwidth) max(1, p/c); hop and bandwidth are "
        "those of all-reduces of two processes, so that for two it is a measured one"
    ),
    "measured alone, error": "without the step, and predicted / that - 1",
    "step, ms": "the sum of the two",
    "measured, error": "the step of the processes, and predicted / that - 1",
    "processes / towers": "predicted, and measured, over the step of p towers",
}


@dataclasses.dataclass(frozen=True)
class Alone:
    """What one process measures by itself, with its part of the batch on its cores.

    Attributes:
        step_secs: times of single steps.
        processor_secs: mean processor time of a step.
        num_bytes: added up in a step of all processes.
        num_buffers: in which they travel.
    """

    step_secs: Sequence[float]
    processor_secs: float
    num_bytes: int
    num_buffers: int


def fitted(
    number_secs: float, all_reduce_secs: float, num_bytes: int, num_buffers: int
) -> paper.Network:
    """A network of processes, from all-reduces of two of them.

    Args:
        number_secs: of a single number.
        all_reduce_secs: of `num_bytes` in `num_buffers`.
    """
    hop_secs = number_secs / 2
    transfer_secs = max(all_reduce_secs - 2 * num_buffers * hop_secs, 1e-9)
    bytes_per_sec = num_bytes / transfer_secs
    return paper.Network(1, math.inf, bytes_per_sec, 0.0, hop_secs)


def predicted(
    num_processes: int, alone: Alone, network: paper.Network, num_cores: int
) -> tuple[float, float]:
    """Seconds of computing and of the all-reduce of a step of several processes.

    Where they are more than the cores, these are shared: computing takes at least all
    processor time over the number of cores, and moving bytes, which takes a core in
    each process, so many times longer.
    """
    n = num_processes
    compute_secs = max(
        paper.expected_max(alone.step_secs, n), n * alone.processor_secs / num_cores
    )
    reduced = paper.ring(n, alone.num_bytes, network)
    reduce_secs = paper.secs_of_ring(reduced, network, alone.num_buffers)
    return compute_secs, reduce_secs * max(1.0, n / num_cores)


def network_of(rows: Sequence[dict], model: str) -> paper.Network | None:
    """The network that two processes have measured; None where there were none."""
    for row in rows:
        if row["model"] == model and row["workers"] == 2:
            return fitted(
                statistics.median(row["number_secs"]),
                statistics.median(row["all_reduce_secs"]),
                row["bytes"],
                row["buffers"],
            )
    return None


def check_row(row: dict, network: paper.Network) -> str:
    """A prediction beside what was measured."""
    median = functools.cache(lambda name: statistics.median(row[f"{name}_secs"]))
    alone = Alone(
        row["alone_secs"],
        row["alone_processor_secs"],
        row["bytes"],
        row["buffers"],
    )
    compute, reduced = predicted(row["workers"], alone, network, row["machine_cores"])

    def with_error(predicted, measured):
        return f"{1e3 * measured:.2f}, {predicted / measured - 1:+.1%}"

    step = compute + reduced
    return measure.table_row(
        f"{row['model']}, {row['workers']}",
        f"{1e3 * compute:.2f}",
        f"{1e3 * reduced:.2f}",
        with_error(reduced, median("all_reduce")) if row["workers"] > 1 else "",
        f"{1e3 * step:.2f}",
        with_error(step, median("processes")),
        f"{step / median('towers'):.3f}, {median('processes') / median('towers'):.3f}",
    )


def check_table(measured: dict) -> str:
    """The predictions of what `benchmarks.workers` has measured."""
    rows = measured["rows"]
    lines = [
        "\n## The same formulas on one machine, and their error\n",
        f"Processes on loopback, measured on {measured['date']}: "
        f"{measured['machine']}, batch {rows[0]['batch_size']} over all; load average "
        f"{measured['load']:.2f} before.\n",
        measure.table_head(" | ".join(COLUMNS)),
    ]
    for row in rows:
        if network := network_of(rows, row["model"]):
            lines.append(check_row(row, network))
    return "\n".join(lines)
