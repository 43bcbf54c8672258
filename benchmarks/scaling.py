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
- 10 s until the others notice a failure: the heartbeats of towers.parallel.connect.
"""

import argparse
import json
import math
import pathlib
from collections.abc import Sequence

import numpy as np

from benchmarks import loopback, measure, one_device, paper
from towers.config import Config
from towers.errors import ConfigError
from towers.parallel.connect import HEARTBEAT_SECS
from towers.parallel.strategies import WORKER_PACK_MB

FOLDER = pathlib.Path(__file__).resolve().parent
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
        "rings through all GPUs, as many as a machine has network cards, each with its "
        "part of B; sent by a GPU: s = 2 (n-1)/n B; s / min(inner, outer bandwidth) + "
        "K (2 (n-1) - 2m) inner hops + K 2m outer hops, at most two from each machine "
        "to the next (on one machine 2 (n-1) inner hops)"
    ),
    "hierarchical: MB, ms": (
        "sent by a machine: s = 2 (m-1)/m B; 2 (g-1)/g B / inner bandwidth + s / outer "
        "bandwidth + K 2 (g-1) inner hops + K 2 (m-1) outer hops"
    ),
    "input, ms": "g b / images per second of a machine; hidden behind the rest",
    "step, ms": "max(E[max of n] + the faster all-reduce, input)",
    "failures": "24 n / hours between failures of a GPU, a day",
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
        ("notice_secs", HEARTBEAT_SECS, "until a failure is noticed"),
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
        num_buffers=math.ceil(num_bytes / (WORKER_PACK_MB * 2**20)),
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


def legend(columns: dict[str, str]) -> str:
    return "\n" + "\n".join(f"- {name}: {text}." for name, text in columns.items())


def print_paper(options: argparse.Namespace) -> None:
    numbers = _read(options.compute)
    print(measure.report_head("Scaling, on paper"))
    print(
        "Computed, not measured. Only the last table has runs.\n\n"
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
        print(loopback.check_table(_read(options.workers)))
        print(legend(loopback.COLUMNS))


def _read(path):
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; --measure=FILE measures one device, and "
            "--compute=FILE names what it has written"
        ) from None


def main() -> None:
    options = parse_options()
    if options.measure:
        text = json.dumps(one_device.measure_models(options))
        options.measure.write_text(text + "\n")
        print(text)
    else:
        print_paper(options)


if __name__ == "__main__":
    measure.run(main)
