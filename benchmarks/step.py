"""How close a training step is to what the machine can do.

    python -m benchmarks.step --models=cnn,resnet20 --precisions=float32,bfloat16

For each combination of network, strategy, precision and compiler: images/s, arithmetic
per second and its share of the machine's own rate of plain matrix products at the same
dtype, and the peak of memory. Every one is measured in a process of its own, one after
another, on a batch that lies ready; the matrix rate is measured there before, between
the rounds and after. The share is that of the rate around each round, because machines
change their pace; the share of the best rate of the run is given beside it.

The arithmetic of a step is counted as three times that of the forward pass.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time

import tensorflow as tf

import towers  # noqa: F401  (before Keras: settles its backend)
from benchmarks import measure
from towers import build
from towers.config import config
from towers.models.flops import flops_per_image
from towers.parallel import devices


def options_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, known, default in (
        ("--models", config.MODELS, ",".join(config.MODELS)),
        ("--strategies", config.STRATEGIES, "towers"),
        ("--precisions", config.PRECISIONS, "float32"),
        ("--compilers", config.COMPILERS, "none"),
    ):
        parser.add_argument(name, type=measure.some_of(known), default=default)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--num_towers", type=int, default=1)
    parser.add_argument("--device", default="auto", choices=config.DEVICES)
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def measure_one(options, model, strategy, precision, compiler) -> dict:
    """Medians of one combination, in this process."""
    chosen = devices.configure(options.device, options.num_towers)
    is_split = strategy == "model_parallel"
    settings = config.Config(
        dataset="synthetic",
        model=model,
        augment="none",
        optimizer="nesterov",
        momentum=0.9,
        learning_rate=1e-6,  # noise for images may not lead to what is not finite
        ema_decay=0.0,
        input="stream",
        batch_size=options.batch_size,
        precision=precision,
        compile=compiler,
        strategy=strategy,
        group_size=options.num_towers if is_split else 1,
    )
    parts = build.build(settings)
    parts = measure.on_still_batch(parts)
    memory = measure.PeakMemory(chosen)
    steps = build.create_strategy(settings, parts, chosen)
    steps.train(2)
    peak = memory.more_bytes()

    on = tf.as_dtype(precision), chosen.towers
    seconds, rates = [], []
    for _ in range(options.rounds):
        rates.append(measure.matrix_rate(*on))
        started = time.perf_counter()
        steps.train(options.steps)
        seconds.append((time.perf_counter() - started) / options.steps)
    rates.append(measure.matrix_rate(*on))
    return {
        "secs": seconds,
        "flops": 3 * flops_per_image(parts.model) * options.batch_size,
        "matrix_rates": rates,
        "peak": peak,
    }


def main():
    options = options_of()
    if options.one:
        print("\n" + json.dumps(measure_one(options, *options.one.split(","))))
        return
    print(measure.report_head("A training step against the machine's matrix rate"))
    print(
        f"Batch {options.batch_size} of 32x32 images, {options.num_towers} tower(s); "
        f"{options.rounds} rounds of {options.steps} steps; a process for each line\n"
    )
    print(
        "| network | strategy | precision | compiler | images/s, median (min, max) | "
        "ms a step | GFLOP/s | matrix rate, median (best), GFLOP/s | share, round by "
        "round (of the best) | MB more than before |"
    )
    print("|" + " --- |" * 10)
    lists = (options.models, options.strategies, options.precisions, options.compilers)
    for one in itertools.product(*lists):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.step", *sys.argv[1:]]
            + [f"--one={','.join(one)}"],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            reason = (done.stderr.strip() or "killed").splitlines()[-1]
            print(f"| {' | '.join(one)} | {reason} |" + " |" * 5, flush=True)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        rates = sorted(options.batch_size / secs for secs in found["secs"])
        achieved = [found["flops"] / secs for secs in found["secs"]]
        matrix_rates = found["matrix_rates"]
        shares = [
            2 * rate / (before + after)
            for rate, (before, after) in zip(
                achieved, itertools.pairwise(matrix_rates), strict=True
            )
        ]
        cells = [
            *one,
            f"{statistics.median(rates):.1f} ({rates[0]:.1f}, {rates[-1]:.1f})",
            f"{1e3 * statistics.median(found['secs']):.1f}",
            f"{statistics.median(achieved) / 1e9:.0f}",
            f"{statistics.median(matrix_rates) / 1e9:.0f} "
            f"({max(matrix_rates) / 1e9:.0f})",
            f"{statistics.median(shares):.3f} "
            f"({statistics.median(achieved) / max(matrix_rates):.3f})",
            f"{found['peak'] / 1e6:.0f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
