"""This checkout against another: trainers in processes of their own take turns."""

import argparse
import functools
import pathlib
import statistics
from collections.abc import Mapping

import numpy as np

from benchmarks import measure
from benchmarks.trainer_process import TrainerProcess

ROOT = pathlib.Path(__file__).resolve().parent.parent


def folders(options: argparse.Namespace) -> dict[str, pathlib.Path]:
    """The two checkouts; `options.against` is the other one."""
    return {"this": ROOT, "other": options.against.resolve()}


def compare_steps(
    options: argparse.Namespace, cases: Mapping[tuple, dict], columns: str
) -> None:
    """The steps of both, of the same trainers in turn.

    Args:
        options: those of `benchmarks.step`.
        cases: first cells of a row -> fields of Config.
        columns: names of these cells.
    """
    print(measure.report_head(f"A training step against {options.against}"))
    print(
        f"Batch {options.batch_size}; {options.rounds} pairs of {options.steps} steps, "
        "half of them with new processes made in the other order, two more to warm up "
        "each\n\n"
        + measure.table_head(
            f"{columns} | ms a step, this | ms, other | this / other, median "
            "(quartiles) | 95 % interval of the median | of processor time | 95 %"
        )
    )
    for cells, fields in cases.items():
        try:
            wall, processor = _pairs(options, fields)
        except RuntimeError as error:
            print(measure.table_row(*cells, error), flush=True)
            continue
        medians = [1e3 * statistics.median(s) / options.steps for s in wall.values()]
        reach = min(50, 98 / options.rounds**0.5)  # of percentiles, by order statistics
        percentiles = (25, 50, 75, 50 - reach, 50 + reach)
        ratios = []
        for seconds in (wall, processor):
            q1, median, q3, low, high = measure.ratios(
                seconds, "this", "other", percentiles
            )
            ratios += [f"{median:.4f} ({q1:.3f}, {q3:.3f})", f"{low:.4f}, {high:.4f}"]
        print(
            measure.table_row(*cells, *(f"{ms:.2f}" for ms in medians), *ratios),
            flush=True,
        )


def _pairs(options, fields):
    """Seconds of every round, by the wall clock and of processor time.

    In two halves with new processes, because the one that is made first is slower than
    the other by two percent, whichever checkout it is of.
    """
    wall, processor = {"this": [], "other": []}, {"this": [], "other": []}
    checkouts = folders(options)
    for names in (list(checkouts), list(reversed(checkouts))):
        workers = {}
        try:
            for name in names:
                workers[name] = TrainerProcess(
                    checkouts[name], fields, options.device, options.steps
                )
                workers[name].wait()
            things = {
                name: functools.partial(worker.train, options.steps)
                for name, worker in workers.items()
            }
            rounds = -(-options.rounds // 2)
            seconds, _ = measure.in_turn(things, rounds, warm_up=2)
        finally:
            for worker in workers.values():
                worker.close()
        for name, worker in workers.items():
            wall[name] += seconds[name]
            processor[name] += worker.processor[-rounds:]
    return wall, processor


def compare_first_steps(
    options: argparse.Namespace, cases: Mapping[tuple, dict], columns: str
) -> None:
    """The first step of both, input and tracing included; arguments as above."""
    print(measure.report_head(f"The first step against {options.against}"))
    print(
        f"Batch {options.batch_size}; {options.rounds} rounds, each trainer in a new "
        "process\n\n"
        + measure.table_head(
            f"{columns} | s, this: median (min, max) | s, other | this / other: "
            "median (min, max) | this / its first row | other / its first row"
        )
    )
    checkouts, firsts = folders(options), {}
    for cells, fields in cases.items():
        secs = {name: [] for name in checkouts}

        def start(name, fields=fields, secs=secs):
            worker = TrainerProcess(
                checkouts[name], fields, options.device, 1, ready=False
            )
            worker.wait()
            secs[name].append(worker.first_step_secs)
            worker.close()

        things = {name: functools.partial(start, name) for name in checkouts}
        measure.in_turn(things, options.rounds, warm_up=0)
        medians = {name: statistics.median(values) for name, values in secs.items()}
        first = firsts.setdefault((fields["model"], fields["strategy"]), medians)
        ratios = np.divide(secs["this"], secs["other"])
        print(
            measure.table_row(
                *cells,
                *(_median(values, 2) for values in secs.values()),
                _median(ratios, 3),
                *(f"{medians[name] / first[name]:.2f}" for name in checkouts),
            ),
            flush=True,
        )


def _median(values, digits):
    numbers = (np.median(values), min(values), max(values))
    return "{} ({}, {})".format(*(f"{x:.{digits}f}" for x in numbers))
