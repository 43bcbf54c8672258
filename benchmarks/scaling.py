"""What a step costs on many GPUs, on paper, from what was measured on one.

    python -m benchmarks.scaling --measure=FILE --models=cnn,resnet20 --device=gpu
    python -m benchmarks.scaling --paper --compute=FILE --gpus=8,64,512,4096

With `--measure` the steps of one device are timed one by one, and so are its input, a
checkpoint and a start; the numbers go to FILE. With `--paper` nothing is measured:
tables of what follows from such a file and from a network that the options state. Every
GPU has as many images as were measured (weak scaling). Options replace what is in the
file: `--step_ms=5` takes its spread and the median of 5 ms.

The last table applies the same formulas to several processes on one machine, as
`python -m benchmarks.workers` has measured them, with the error of the prediction.

What is not measured here has a source:
- 450 GB/s of a GPU to others of its machine (NVLink, 900 GB/s in both directions
  together), eight GPUs and 400 GB/s of a machine to others (eight ConnectX-7 of 400
  Gbit/s): NVIDIA DGX H100/H200 User Guide, hardware overview. Peak rates.
- 3.4 us and 14 us for a hop within a machine and between two: the latencies of a ring
  with protocol Simple in NCCL's model of itself (github.com/NVIDIA/nccl,
  src/graph/tuning.cc, hwLat).
- 50,700 hours between failures of a GPU: 419 unexpected interruptions of 16,384 GPUs in
  54 days (Llama Team, The Llama 3 Herd of Models, 2024, arXiv:2407.21783, section
  3.3.4).
- 60 s until the others notice a failure: docs/cluster.md.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from benchmarks import input as input_benchmark
from benchmarks import measure, paper, trainers, workers
from towers import build
from towers.config import Config
from towers.config import flags as config_flags
from towers.errors import ConfigError
from towers.parallel.devices import Devices
from towers.parallel.multi_worker import PACK_MB
from towers.run import checkpoints

FOLDER = pathlib.Path(__file__).resolve().parent
RECIPES = FOLDER.parent / "configs"
COMPUTE = FOLDER / "2026-11-23-one_device.json"
WORKERS = FOLDER / "2026-11-23-workers.json"
HOUR = 3600.0

COLUMNS = {
    "GPUs": "n, on m machines of g",
    "batch": "n b, with b images a GPU",
    "compute, ms": "T, the mean of the measured times of a step",
    "stragglers, ms": (
        "E[max of n] - T, with E[max of n] = the sum of t_i ((i/k)^n - ((i-1)/k)^n) "
        "over the k sorted times: the mean slowest of n that draw from the measured "
        "times, each for itself. It cannot pass the slowest measured time, so it is "
        "too small where n is far above k; too large where GPUs are slow together"
    ),
    "ring: MB, ms": (
        "sent by a GPU: s = 2 (n-1)/n B; s / min(inner, outer bandwidth) + K (2 (n-1) "
        "- 2m) inner hops + K 2m outer hops (on one machine 2 (n-1) inner hops)"
    ),
    "hierarchical: MB, ms": (
        "sent by a machine: s = 2 (m-1)/m B; 2 (g-1)/g B / inner bandwidth + s / outer "
        "bandwidth + K 2 (g-1) inner hops + K 2 (m-1) outer hops"
    ),
    "input, ms": "g b / images per second of a machine; hidden behind the rest",
    "step, ms": "max(E[max of n] + the faster all-reduce, input)",
    "failures": "n / hours between failures of a GPU, a day",
    "checkpoint every": (
        "Daly's optimum with M seconds between failures and d for a checkpoint: "
        "sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d; Young's is sqrt(2 d M)"
    ),
    "time factor (at the default)": (
        "M exp(R/M) (exp((t + d)/M) - 1) / t (Daly), with the interval t and R seconds "
        "from a failure to the next step; and with the default checkpoint_every_secs"
    ),
    "ms a step in all": "step x time factor",
    "images/s": "n b / ms a step in all",
    "efficiency": "T / ms a step in all",
}

CHECK_COLUMNS = {
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


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = measure.create_parser(__doc__, device="auto")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--paper", action="store_true", help="print the tables")
    action.add_argument("--measure", type=pathlib.Path, help="file for the numbers")
    parser.add_argument("--models", type=measure.names, default="cnn,resnet20")
    parser.add_argument(
        "--calls", type=int, default=200, help="steps that are timed, with --measure"
    )
    parser.add_argument("--compute", type=pathlib.Path, default=COMPUTE)
    parser.add_argument("--workers", type=pathlib.Path, default=WORKERS)
    parser.add_argument("--gpus", type=measure.numbers, default="8,64,512,4096")
    for name, default, text in (
        ("gpus_per_machine", 8, ""),
        ("inner_gb_per_sec", 450.0, "of a GPU, within its machine"),
        ("outer_gb_per_sec", 400.0, "of a machine"),
        ("inner_hop_us", 3.4, "latency within a machine"),
        ("outer_hop_us", 14.0, "latency between machines"),
        ("gpu_mtbf_hours", 50_700.0, "between failures of one GPU"),
        ("notice_secs", 60.0, "until a failure is noticed"),
        ("step_ms", 0.0, "median of a step of one GPU, in place of the measured one"),
        ("spread", 1.0, "factor on the deviations of steps from their mean"),
        ("input_images_per_sec", 0.0, "of a machine; inf for resident images"),
        ("num_bytes", 0, "of gradients and model state"),
        ("save_secs", 0.0, "of a checkpoint"),
        ("start_secs", 0.0, "from the start of a process to its first step"),
    ):
        parser.add_argument(
            f"--{name}", type=type(default), default=default, help=text or None
        )
    options = parser.parse_args(argv)
    for num_gpus in options.gpus:
        if num_gpus > options.gpus_per_machine and num_gpus % options.gpus_per_machine:
            parser.error(
                f"--gpus={num_gpus} do not fill machines of {options.gpus_per_machine}"
            )
    return options


# Measuring one device.


def measure_device(options: argparse.Namespace, chosen: Devices, model: str) -> dict:
    """The numbers of one network on one device."""
    recipe = config_flags.load_recipe(f"cifar10_{model}", RECIPES)
    fields = trainers.STEP_ALONE | measure.dataset(options)
    fields |= {"model": model, "batch_size": options.batch_size, "num_towers": 1}
    fields |= {"device": options.device, "augment": recipe.augment}
    started = time.perf_counter()
    process = measure.Worker(FOLDER.parent, fields, options.device, 1, ready=False)
    start_secs = time.perf_counter() - started
    process.close()

    config = Config(**fields)
    parts = build.build(config)
    trainer = trainers.create_trainer(config, trainers.on_still_batch(parts), chosen)
    trainer.train(5)
    step_secs = []
    measure.in_turn(
        {"step": lambda: step_secs.append(_secs(lambda: trainer.train(1)))},
        options.calls,
    )
    stream = iter(parts.train_batches.stream(0))
    input_benchmark.draw(stream, input_benchmark.FILLING_STEPS)
    drawing_secs = _secs(lambda: input_benchmark.draw(stream, options.steps * 10))
    state = trainer.state()
    with tempfile.TemporaryDirectory() as folder:
        save_secs = [
            _secs(lambda step=step: checkpoints.save(folder, step, trainer.state(), {}))
            for step in range(5)
        ]
    summed = [x for name, x in state.items() if name.startswith(("params/", "state/"))]
    return {
        "kind": chosen.kind,
        "images": config.batch_size,
        "step_secs": [round(secs, 7) for secs in step_secs[1:]],
        "num_bytes": sum(x.nbytes for x in summed if x.dtype.kind == "f"),
        "input_images_per_sec": round(
            options.steps * 10 * config.batch_size / drawing_secs
        ),
        "save_secs": round(statistics.median(save_secs), 4),
        "start_secs": round(start_secs, 2),
    }


def _secs(function):
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def measure_devices(options: argparse.Namespace) -> dict:
    load = os.getloadavg()[0]
    chosen = measure.all_devices(options.device, 1)
    rate = measure.matrix_rate(devices=chosen.towers[:1])
    models = {name: measure_device(options, chosen, name) for name in options.models}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": measure.machine(),
        "load": load,
        "matrix_rate": rate,
        "models": models,
    }


# On paper.


def network_of(options: argparse.Namespace) -> paper.Network:
    return paper.Network(
        options.gpus_per_machine,
        1e9 * options.inner_gb_per_sec,
        1e9 * options.outer_gb_per_sec,
        1e-6 * options.inner_hop_us,
        1e-6 * options.outer_hop_us,
    )


def compute_of(options: argparse.Namespace, numbers: dict) -> paper.Compute:
    """What was measured of one device, or what the options say instead."""
    secs = np.array(numbers["step_secs"])
    secs = secs.mean() + options.spread * (secs - secs.mean())
    if options.step_ms:
        secs *= 1e-3 * options.step_ms / np.median(secs)
    if secs.min() <= 0:
        raise ConfigError(
            f"spread={options.spread:g}: a step would take no time; lower it"
        )
    num_bytes = options.num_bytes or numbers["num_bytes"]
    return paper.Compute(
        step_secs=secs,
        images=numbers["images"],
        num_bytes=num_bytes,
        num_buffers=math.ceil(num_bytes / (PACK_MB * 2**20)),
        input_images_per_sec=(
            options.input_images_per_sec or numbers["input_images_per_sec"]
        ),
        save_secs=options.save_secs or numbers["save_secs"],
        restart_secs=(
            options.notice_secs + (options.start_secs or numbers["start_secs"])
        ),
    )


def cost_row(cost: paper.Cost, compute: paper.Compute) -> str:
    images, total = cost.num_gpus * compute.images, cost.total_secs
    usual = paper.time_factor(
        Config().checkpoint_every_secs,
        compute.save_secs,
        compute.restart_secs,
        cost.mtbf_secs,
    )
    return measure.table_row(
        f"{cost.num_gpus:,}",
        f"{images:,}",
        f"{1e3 * cost.compute_secs:.2f}",
        f"{1e3 * cost.straggler_secs:.2f}",
        f"{(cost.ring.inner_bytes or cost.ring.outer_bytes) / 1e6:.2f}, "
        f"{1e3 * cost.ring_secs:.3f}",
        f"{cost.hierarchical.outer_bytes / 1e6:.2f}, "
        f"{1e3 * cost.hierarchical_secs:.3f}",
        f"{1e3 * cost.input_secs:.2f}",
        f"{1e3 * cost.step_secs:.2f}",
        f"{24 * HOUR / cost.mtbf_secs:.3f}",
        f"{cost.interval_secs / 60:.1f} min",
        f"{cost.factor:.4f} ({usual:.4f})",
        f"{1e3 * total:.2f}",
        f"{images / total:,.0f}",
        f"{cost.compute_secs / total:.3f}",
    )


def paper_table(options: argparse.Namespace, model: str, numbers: dict) -> str:
    compute, network = compute_of(options, numbers), network_of(options)
    spread = 1e3 * np.percentile(compute.step_secs, (0, 50, 99, 100))
    lines = [
        f"\n## On paper: {model} on {options.gpus[0]:,} to {options.gpus[-1]:,} GPUs\n",
        f"From one {numbers['kind']} device with b = {compute.images} images, "
        f"{len(compute.step_secs)} steps: "
        "{:.2f} ms at least, median {:.2f}, 99 % {:.2f}, at most {:.2f}; ".format(
            *spread
        )
        + f"B = {compute.num_bytes:,} bytes and 4 (n + 1) of metrics, in K = "
        f"{compute.num_buffers} buffer(s); input {compute.input_images_per_sec:,.0f} "
        f"images/s; d = {compute.save_secs:g} s, R = {compute.restart_secs:g} s.\n",
        measure.table_head(" | ".join(COLUMNS)),
    ]
    for num_gpus in options.gpus:
        cost = paper.cost(num_gpus, compute, network, HOUR * options.gpu_mtbf_hours)
        lines.append(cost_row(cost, compute))
    return "\n".join(lines)


def check_row(row: dict, network: paper.Network) -> str:
    median = functools.cache(lambda name: statistics.median(row[f"{name}_secs"]))
    alone = paper.Alone(
        row["alone_secs"],
        row["alone_processor_secs"],
        row["bytes"],
        row["buffers"],
    )
    compute, reduced = paper.predicted(
        row["workers"], alone, network, row["machine_cores"]
    )

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
        measure.table_head(" | ".join(CHECK_COLUMNS)),
    ]
    for row in rows:
        if network := workers.loopback_of(rows, row["model"]):
            lines.append(check_row(row, network))
    return "\n".join(lines)


def legend(columns: dict[str, str]) -> str:
    return "\n" + "\n".join(f"- {name}: {text}." for name, text in columns.items())


def print_paper(options: argparse.Namespace) -> None:
    numbers = json.loads(options.compute.read_text())
    print(measure.report_head("Scaling, on paper"))
    print(
        "Computed, not run: nobody had so many GPUs. Only the last table has runs.\n\n"
        f"- one device: measured on {numbers['date']}: {numbers['machine']}, load "
        f"average {numbers['load']:.2f} before\n"
        f"- network: machines of g = {options.gpus_per_machine} GPUs; "
        f"{options.inner_gb_per_sec:g} GB/s of a GPU to others of its machine and "
        f"{options.inner_hop_us:g} us a hop; {options.outer_gb_per_sec:g} GB/s of a "
        f"machine to others and {options.outer_hop_us:g} us a hop\n"
        f"- failures: one in {options.gpu_mtbf_hours:,.0f} hours of a GPU, noticed "
        f"after {options.notice_secs:g} s"
    )
    for model in options.models:
        print(paper_table(options, model, numbers["models"][model]))
    print(legend(COLUMNS))
    if options.workers.exists():
        print(check_table(json.loads(options.workers.read_text())))
        print(legend(CHECK_COLUMNS))


def main() -> None:
    options = parse_options()
    if options.measure:
        text = json.dumps(measure_devices(options))
        options.measure.write_text(text + "\n")
        print(text)
    else:
        print_paper(options)


if __name__ == "__main__":
    measure.run(main)
