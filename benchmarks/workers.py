"""Several processes on loopback against as many towers in one process; on CPUs.

    python -m benchmarks.workers --models=cnn,resnet20 --workers=1,2,3,4

In turn, at the same global batch, which lies ready: `multi_worker` in N processes of
one tower each, and `replicated` in one process of N towers. Processes are started as
`python -m towers.launch` does: where there are as many cores as processes each has its
own; the towers of one process share them all. Where the time goes is measured in the
same rounds:
- `alone`: the first process by itself, with its part of the batch, step by step, while
  the others wait;
- `at once`: all of them so, without an all-reduce;
- the all-reduce of a step without the step, and that of a single number: the latency.

Every pair is measured in two halves with new processes, because of processes built
alike one may be slower than the next. The report is written to a file, with the numbers
beside it, from which `python -m benchmarks.scaling --paper` predicts them.
"""

import argparse
import collections
import functools
import json
import os
import pathlib
import statistics
import time
from collections.abc import Sequence

import numpy as np

from benchmarks import loopback, measure, trainers
from benchmarks.processes import Processes, loopback_bytes
from towers.parallel.devices import num_cores

FOLDER = pathlib.Path(__file__).resolve().parent

COLUMNS = (
    "network | processes, towers | ms a step, processes | ms, towers | processes / "
    "towers, median (quartiles) | alone, ms | at once, ms | all-reduce, ms | of one "
    "number, us | bytes added up | bytes on loopback / 2 (n - 1) bytes"
)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = measure.create_parser(__doc__, device="cpu", rounds=20)
    parser.add_argument("--models", type=measure.names, default="cnn,resnet20")
    parser.add_argument("--workers", type=measure.numbers, default="1,2,3,4")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=FOLDER / time.strftime("%Y-%m-%d-workers.md"),
        help="file of the report; the numbers have the suffix .json",
    )
    options = parser.parse_args(argv)
    if options.device != "cpu":
        parser.error(f"--device={options.device}: the processes compute on CPUs")
    return options


def measure_pair(options: argparse.Namespace, model: str, count: int) -> dict:
    """The numbers of one network and number of processes, see `report_row`."""
    fields = trainers.STEP_ALONE | measure.dataset(options) | {"model": model}
    fields |= {"batch_size": options.batch_size, "device": "cpu"}
    processes = fields | {"strategy": "multi_worker", "num_towers": 1}
    towers = fields | {"strategy": "replicated", "num_towers": count}
    timed, described = collections.defaultdict(list), {}
    rounds = -(-options.rounds // 2)
    for half in range(2):
        made = {}
        try:
            for name in ("processes", "towers")[:: 1 if half else -1]:
                made[name] = Processes(
                    *{"processes": (count, processes), "towers": (1, towers)}[name]
                )
            described = made["processes"].described
            things = _things(made, options.steps, count)
            kept = {name: [] for name in things}

            def note(name, things=things, kept=kept):
                kept[name].append(things[name]())

            measure.in_turn(
                {name: functools.partial(note, name) for name in things}, rounds
            )
        finally:
            for each in made.values():
                each.close()
        for name, values in kept.items():
            timed[name] += values[1:]  # without the warm-up
    numbers = {"model": model, "workers": count, "batch_size": options.batch_size}
    numbers |= described | {"steps": options.steps, "machine_cores": num_cores()}
    for name, values in timed.items():
        calls = [secs for value, _ in values for secs in value.wall]
        numbers[f"{name}_secs"] = [round(x / _steps(name, options), 7) for x in calls]
        used = statistics.mean(value.mean_processor for value, _ in values)
        numbers[f"{name}_processor_secs"] = round(used / options.steps, 7)
    if count > 1:
        sent = [sent for _, sent in timed["all_reduce"]]
        numbers["loopback_bytes"] = round(statistics.median(sent) / options.steps)
    return numbers


def _things(made, steps, count):
    """What runs in turn: each gives what was timed, and the bytes on loopback."""
    calls = {
        "processes": lambda: made["processes"].all("train", 1, steps),
        "towers": lambda: made["towers"].all("train", 1, steps),
        "alone": lambda: made["processes"].first("alone", steps, 1),
    }
    if count > 1:
        calls["at_once"] = lambda: made["processes"].all("alone", 1, steps)
        for name in ("all_reduce", "number"):
            calls[name] = functools.partial(made["processes"].all, name, 1, steps)

    def counted(call):
        before = loopback_bytes()
        return call(), loopback_bytes() - before

    return {name: functools.partial(counted, call) for name, call in calls.items()}


def _steps(name, options):
    """Steps of a call."""
    return 1 if name == "alone" else options.steps


def report_row(numbers: dict) -> str:
    """A row of the table."""

    def ms(name):
        secs = numbers.get(f"{name}_secs")
        if not secs:
            return ""
        low, median, high = 1e3 * np.percentile(secs, (0, 50, 100))
        return f"{median:.2f} ({low:.2f}, {high:.2f})"

    wall = {name: numbers[f"{name}_secs"] for name in ("processes", "towers")}
    q1, median, q3 = measure.ratios(wall, "processes", "towers", (25, 50, 75))
    count, number, sent = numbers["workers"], "", ""
    if count > 1:
        number = f"{1e6 * statistics.median(numbers['number_secs']):.0f}"
        expected = 2 * (count - 1) * numbers["bytes"]
        sent = f"{numbers['loopback_bytes'] / expected:.3f}"
    return measure.table_row(
        numbers["model"],
        count,
        ms("processes"),
        ms("towers"),
        f"{median:.3f} ({q1:.3f}, {q3:.3f})",
        ms("alone"),
        ms("at_once"),
        ms("all_reduce"),
        number,
        f"{numbers['bytes']:,}",
        sent,
    )


def shares_row(numbers: dict) -> str:
    """Where a step of the processes goes, in parts of the step of the towers."""
    median = {
        name: statistics.median(numbers[f"{name}_secs"])
        for name in ("processes", "towers", "alone", "at_once", "all_reduce")
    }
    parts = (
        median["alone"],
        median["at_once"] - median["alone"],
        median["all_reduce"],
        median["processes"] - median["at_once"] - median["all_reduce"],
    )
    used = [numbers[f"{name}_processor_secs"] for name in ("processes", "towers")]
    return measure.table_row(
        numbers["model"],
        numbers["workers"],
        *(f"{part / median['towers']:.3f}" for part in parts),
        f"{median['processes'] / median['towers']:.3f}",
        f"{numbers['workers'] * used[0] / used[1]:.3f}",
    )


def main() -> None:
    options = parse_options()
    load = os.getloadavg()[0]
    lines, rows = [], []

    def write(text):
        print(text, flush=True)
        lines.append(text)

    rates = [measure.matrix_rate()]
    write(measure.report_head("Several processes against as many towers"))
    write(
        f"Batch {options.batch_size} over all, `multi_worker` and `replicated`; "
        f"{options.rounds} rounds of {options.steps} steps in two halves with new "
        f"processes, one more each to warm up; {num_cores()} cores; load average "
        f"{load:.2f} before; medians (lowest, highest)\n\n"
        + measure.table_head(COLUMNS)
    )
    for model in options.models:
        for count in options.workers:
            rows.append(measure_pair(options, model, count))
            write(report_row(rows[-1]))
    rates.append(measure.matrix_rate())
    write(
        "\nWhere a step of the processes goes, as parts of the step of the towers:\n\n"
        + measure.table_head(
            "network | processes | computing alone | more, all at once | all-reduce "
            "alone | the rest: packing, waiting for each other | together | processor "
            "time / towers"
        )
    )
    for row in rows:
        if row["workers"] > 1:
            write(shares_row(row))
    write(f"\n{measure.rates_text(rates)} before and after.")
    for model in options.models:
        network = loopback.network_of(rows, model)
        if network:
            write(
                f"\nBy two processes of {model}: latency of a hop "
                f"{1e6 * network.outer_hop_secs:.0f} us, "
                f"{network.outer_bytes_per_sec / 1e9:.2f} GB/s of each."
            )
    options.output.write_text("\n".join(lines) + "\n")
    numbers = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": measure.machine(),
        "load": load,
        "rows": rows,
    }
    options.output.with_suffix(".json").write_text(json.dumps(numbers) + "\n")


if __name__ == "__main__":
    measure.run(main)
