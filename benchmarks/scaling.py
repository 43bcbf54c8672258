"""Several processes on one machine against as many towers in one process.

    python -m benchmarks.scaling --models=cnn,resnet20 --workers=1,2,3,4

In turn, on a batch that lies ready: `multi_worker` in N processes of one tower each,
`replicated` in one process of N towers, and one tower. The batch is the same for all;
with `--weak` that of N is N times as large. Processes are started as `python -m
towers.launch` does: GPUs are divided among them, or cores where there are as many; the
towers of one process share them all. On CPUs, which all share, the best ratio to one
tower is 1 at the same batch, and the table shows what the parallel form costs.

Every row is measured in two halves with new processes, because of processes built alike
one may be slower than the next. What many GPUs would do is in `docs/scaling.md`.
"""

import argparse
import contextlib
import functools
import os
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks import measure, trainers
from towers.launch import divide, free_ports

COLUMNS = (
    "network | N | batch | ms a step, processes | ms, towers | ms, one tower | "
    "processes / towers, median (quartiles) | processes / one | towers / one"
)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = measure.create_parser(__doc__, rounds=20)
    parser.add_argument("--models", type=measure.names, default="cnn,resnet20")
    parser.add_argument("--workers", type=measure.numbers, default="1,2,3,4")
    parser.add_argument("--weak", action="store_true", help="the batch grows with N")
    return parser.parse_args(argv)


def measure_row(options: argparse.Namespace, model: str, count: int) -> dict:
    """Seconds of each round of processes, towers and one tower."""
    common = trainers.STEP_ALONE | measure.dataset(options)
    common |= {"model": model, "device": options.device}
    size = options.batch_size * (count if options.weak else 1)
    many, one = common | {"batch_size": size}, common | {"num_towers": 1}
    cases = {
        "processes": many | {"strategy": "multi_worker", "num_towers": 1},
        "towers": many | {"strategy": "replicated", "num_towers": count},
        "one": one | {"batch_size": options.batch_size},
    }
    wall = {name: [] for name in cases}
    for names in (list(cases), list(reversed(cases))):
        with contextlib.ExitStack() as stack:
            things = {
                name: start(
                    stack, cases[name], options, count if name == "processes" else 1
                )
                for name in names
            }
            rounds = -(-options.rounds // 2)
            seconds, _ = measure.in_turn(things, rounds)
        for name, secs in seconds.items():
            wall[name] += secs
    return wall


def start(
    stack: contextlib.ExitStack, fields: dict, options, count: int
) -> Callable[[], None]:
    """Starts a training in `count` processes, which end with the stack; returns a
    function that takes the steps of a round."""
    processes = []
    with free_ports(count) as ports:
        cluster = {"addresses": [f"127.0.0.1:{port}" for port in ports]}
        for index, share in enumerate(divide(count, os.environ, options.device)):
            process = trainers.TrainerProcess(
                fields, options.device, 2, share=share, index=index, **cluster
            )
            stack.callback(process.close)
            processes.append(process)
        for process in processes:
            process.wait()

    return functools.partial(trainers.take_steps, processes, options.steps)


def main() -> None:
    options = parse_options()
    print(measure.report_head("Several processes against as many towers"))
    print(
        f"{options.rounds} rounds of {options.steps} steps in two halves with new "
        "processes, one more each to warm up; load average "
        f"{os.getloadavg()[0]:.2f} before; medians\n\n{measure.table_head(COLUMNS)}"
    )
    for model in options.models:
        for count in options.workers:
            wall = measure_row(options, model, count)
            ratio = functools.partial(measure.ratios, wall)
            q1, median, q3 = ratio("processes", "towers", (25, 50, 75))
            row = measure.table_row(
                model,
                count,
                options.batch_size * (count if options.weak else 1),
                *(
                    f"{1e3 * statistics.median(s) / options.steps:.2f}"
                    for s in wall.values()
                ),
                f"{median:.3f} ({q1:.3f}, {q3:.3f})",
                *(f"{np.median(ratio(x, 'one')):.3f}" for x in ("processes", "towers")),
            )
            print(row, flush=True)


if __name__ == "__main__":
    measure.run(main)
