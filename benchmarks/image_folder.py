"""Whether a folder of images trains as fast as one file of pixels.

    python -m benchmarks.image_folder --data_dir=DATA --folder=ROOT

Trains the from-scratch chapter's LeNet on CIFAR-10: from the official binary files in
DATA, from the same images in `ROOT/train/CLASS/*.jpg` and `ROOT/test/CLASS/*.jpg`, and
from that folder with room in memory for an eighth of them. Every run is one of
`run_train.py` in a process of its own, in turn; speeds are of the steps after the first
epoch, in which a folder's images are decoded. The bare input is what comes out of the
stream when nothing trains.
"""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import towers  # noqa: F401  (before Keras: settles its backend)
from benchmarks import measure
from towers import build
from towers.config import flags as config_flags

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECIPE = "cifar10_lenet"
BATCH_SIZE = 128
SMALL_CACHE_MB = 20


def cases(options) -> dict[str, dict]:
    """What is compared: name -> its options; the binary file first."""
    folder = {
        "dataset": "image_folder",
        "data_dir": options.folder,
        "image_size": 32,
    }
    small = {"image_cache_mb": float(SMALL_CACHE_MB)}
    return {
        "binary file": {"data_dir": options.data_dir},
        "image folder": folder,
        f"image folder, {SMALL_CACHE_MB} MB in memory": folder | small,
    }


def run(changes: dict, options) -> dict[str, float]:
    """Trains once in a process of its own; rates in images/s, memory in MB."""
    flags = changes | {
        "config": RECIPE,
        "batch_size": BATCH_SIZE,
        "num_towers": options.towers,
        "device": "cpu",
        "num_epochs": options.epochs,
        "max_steps": options.steps,
        "log_every_steps": options.log_every,
        "eval_every_epochs": 0,
    }
    with tempfile.TemporaryDirectory() as workdir:
        command = [sys.executable, "run_train.py", f"--workdir={workdir}"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        path = pathlib.Path(workdir) / "metrics.jsonl"
        log = pathlib.Path(workdir) / "log"
        with log.open("w") as output:
            started = time.monotonic()
            process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
            first_step_secs, ended = None, 0
            while not ended:
                time.sleep(0.02)
                if first_step_secs is None and path.exists() and path.read_text():
                    first_step_secs = time.monotonic() - started
                ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(log.read_text())
        records = [json.loads(line) for line in path.read_text().splitlines()]
    timed = [r for r in records if "images_per_sec" in r]
    return {
        "first_step_secs": first_step_secs,
        "first": _rate([r for r in timed if r["epoch"] <= 1]),
        "later": _rate([b for a, b in itertools.pairwise(timed) if a["epoch"] >= 1]),
        "peak_mb": usage.ru_maxrss * 1024 / 1e6,
    }


def _rate(records):
    """Of pieces of about equal length; not a number where there are none."""
    rates = [r["images_per_sec"] for r in records]
    return statistics.harmonic_mean(rates) if rates else float("nan")


def bare_input(changes: dict, options) -> tuple[float, float]:
    """Images/s out of the stream in the first epoch, or so many steps, and after it."""
    recipe, _, _ = config_flags.config_of_flags(
        RECIPE, ROOT / "configs", changes | {"batch_size": BATCH_SIZE}
    )
    parts = build.build(recipe)
    most = options.steps or parts.num_examples // BATCH_SIZE
    stream = iter(parts.train_batches.stream(0))
    rates = []
    for _ in range(2):
        started = time.perf_counter()
        for _ in range(most):
            next(stream)
        rates.append(most * BATCH_SIZE / (time.perf_counter() - started))
    return tuple(rates)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", required=True, help="of the binary files")
    parser.add_argument("--folder", required=True, help="with train/ and test/")
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--steps", type=int, default=0, help="where to stop early")
    parser.add_argument("--log_every", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    compared = cases(options)
    found = {name: [] for name in compared}
    things = {
        name: lambda name=name: found[name].append(run(compared[name], options))
        for name in compared
    }
    rates = [measure.matrix_rate()]
    measure.in_turn(things, options.rounds, warm_up=0)
    rates.append(measure.matrix_rate())

    print(measure.report_head("Training from a folder of images"))
    print(
        f"- float32, {measure.told_rates(*rates)}\n\n"
        "| data | images/s in the first epoch | in later ones (each run) | first step "
        "after (last of them), s | peak memory of the process, MB | bare input, first "
        "epoch, second, images/s |\n" + "|" + " --- |" * 6
    )
    for name, runs in found.items():
        of = {key: [r[key] for r in runs] for key in runs[0]}
        each = " ".join(f"{rate:,.0f}" for rate in of["later"])
        bare = bare_input(compared[name], options)
        print(
            f"| {name} | {statistics.median(of['first']):,.0f} | "
            f"{statistics.median(of['later']):,.0f} ({each}) | "
            f"{statistics.median(of['first_step_secs']):.1f} "
            f"({max(of['first_step_secs']):.1f}) | {max(of['peak_mb']):,.0f} | "
            f"{bare[0]:,.0f}, {bare[1]:,.0f} |"
        )
    print()
    binary, *folders = found
    for name in folders:
        pairs = zip(found[name], found[binary], strict=True)
        quotients = sorted(a["later"] / b["later"] for a, b in pairs)
        print(
            f"- {name} over {binary}, after the first epoch: median "
            f"{statistics.median(quotients):.3f}, {quotients[0]:.3f} to "
            f"{quotients[-1]:.3f}"
        )


if __name__ == "__main__":
    main()
