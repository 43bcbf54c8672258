"""The accuracy that recipes reach, and how soon, over several seeds.

    python -m benchmarks.accuracy --config=cifar10_speedrun --data_dir=DATA --seeds=5

Every run trains from the start and is evaluated on the test images, in a process of its
own. Everything but imports and the last evaluation is counted: reading the data,
tracing and compiling, training, the recipe's own evaluations, the last checkpoint.
Shown apart, and part of it, are the training seconds and within them the first calls of
each phase, which compile. The cost is that time multiplied with the machine's matrix
rate, because machines differ from day to day and from minute to minute: the mean of
rates measured before each run, after it, and about every minute within, when the clock
stands still.

With `--against=RECIPE` a second recipe runs on the same seeds in turn, and with
`--strategies` the recipe is trained by one tower, by every strategy with four, and in
micro-batches; paired differences from the first are given. With `--records=FILE` each
run is a line of that file too, and a series that was interrupted leaves out the runs
that it holds; another machine or other code wants another file. Any option of a recipe
but `--seed` is applied to all runs.
"""

import concurrent.futures
import dataclasses
import json
import math
import multiprocessing
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

from absl import flags

from towers.callbacks import Callback
from towers.cli import flags as config_flags
from towers.cli.recipes import config_of_flags
from towers.config import Config
from towers.errors import ConfigError

RECIPES = pathlib.Path(__file__).resolve().parent.parent / "configs"
RATE_EVERY_SECS = 60.0
SPAWN = multiprocessing.get_context("spawn")

CONFIG = flags.DEFINE_string("config", None, "Recipe.", required=True)
AGAINST = flags.DEFINE_string("against", "", "Another recipe, on the same seeds.")
BY_STRATEGY = flags.DEFINE_bool("strategies", False, "Train by every strategy.")
SEEDS = flags.DEFINE_integer("seeds", 1, "How many, from 0 on.", 1)
RECORDS = flags.DEFINE_string("records", "", "A file, a line for each run.")
config_flags.define_config_flags()

# --strategies: name -> fields of Config; the others are compared with the first.
FOUR = {"num_towers": 4}
SPLIT = {"strategy": "model_parallel", **FOUR}
STRATEGIES = {
    "one tower": {"num_towers": 1},
    "towers, 4": FOUR,
    "replicated, 4": {"strategy": "replicated", **FOUR},
    "replicated, 4, bfloat16 all-reduce": {
        "strategy": "replicated",
        "all_reduce_dtype": "bfloat16",
        **FOUR,
    },
    "model_parallel, 2 groups of 2": SPLIT | {"group_size": 2},
    "model_parallel, 1 group of 4": SPLIT | {"group_size": 4},
    "one tower, 2 micro-batches": {"num_towers": 1, "accumulate_steps": 2},
    "async_towers, 4": {"strategy": "async_towers", **FOUR},
}

# The accuracy of a record: by test-time augmentation and moving averages, where it has
# them.
PLAIN = "test_accuracy"
KINDS = ("_tta_ema", "_tta", "_ema", "")


def best(record: dict) -> float:
    return next(record[PLAIN + x] for x in KINDS if PLAIN + x in record)


class Clock(Callback):
    """Time, and rates that are measured while it stands still."""

    def __init__(self, measure_rate: Callable[[], float]):
        self._measure_rate = measure_rate
        self.rates = [measure_rate()]
        self.secs = 0.0
        self._running_since = time.monotonic()

    def measure(self) -> None:
        self.secs += time.monotonic() - self._running_since
        self.rates.append(self._measure_rate())
        self._running_since = time.monotonic()

    def on_log(self, step, metrics):
        """Measures the rate about once a minute."""
        if time.monotonic() - self._running_since > RATE_EVERY_SECS:
            self.measure()


def run(config: Config) -> dict:
    """Trains and evaluates a recipe once; to be called in a fresh process."""
    import tensorflow as tf

    from benchmarks import measure
    from towers.evaluation.evaluate import evaluate
    from towers.parallel import devices
    from towers.training.train import train

    chosen = devices.configure(config.device, config.num_towers, config.device_order)
    dtype = tf.as_dtype(config.precision)
    clock = Clock(lambda: measure.matrix_rate(dtype, chosen.towers))
    with tempfile.TemporaryDirectory() as workdir:
        train(workdir=workdir, config=config, callbacks=[clock])
        clock.measure()
        last = evaluate(workdir=workdir, config=config)
    rate = statistics.mean(clock.rates)
    return {
        "plain": last[PLAIN],
        "accuracy": best(last),
        "loss": last.get("test_loss_ema", last["test_loss"]),
        "secs": clock.secs,
        "start_secs": last["start_secs"],
        "train_secs": last["train_secs"],
        "images_per_sec": last["images_per_sec"],
        "rate": rate,
        "cost": clock.secs * rate,
    }


def recorded(name: str, config: Config) -> dict:
    """`run` in a process of its own, unless the records hold this run."""
    key = {"recipe": name, "config": dataclasses.asdict(config)}
    key = json.loads(json.dumps(key))
    path = pathlib.Path(RECORDS.value or os.devnull)
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        if record["key"] == key:
            return record["result"]
    # A fresh process: nothing is traced or in a cache yet.
    with concurrent.futures.ProcessPoolExecutor(1, SPAWN) as process:
        result = process.submit(run, config).result()
    with path.open("a") as file:
        file.write(json.dumps({"key": key, "result": result}) + "\n")
    return result


def mean_and_error(values: list[float], digits: int = 4) -> str:
    """The mean and its standard error."""
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} +- {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"


def configs_by_name(given: dict) -> dict[str, Config]:
    """Every series of runs; the others are compared with the first."""
    names = [CONFIG.value, *filter(None, [AGAINST.value])]
    if BY_STRATEGY.value and AGAINST.value:
        raise ConfigError("--strategies compares one recipe; drop --against")
    configs = {name: config_of_flags(name, RECIPES, given)[0] for name in names}
    if not BY_STRATEGY.value:
        return configs
    base = configs[CONFIG.value]
    result = {}
    for name, fields in STRATEGIES.items():
        size = base.batch_size // fields.get("accumulate_steps", 1)
        result[name] = dataclasses.replace(base, **fields, batch_size=size)
    return result


def main(_) -> None:
    given = config_flags.given_flags()
    if "seed" in given:
        raise ConfigError("--seed is 0, 1, ... here; --seeds says how many")
    configs = configs_by_name(given)
    from benchmarks import measure

    results, rows = {name: [] for name in configs}, []
    for seed in range(SEEDS.value):
        for name, config in configs.items():
            r = recorded(name, dataclasses.replace(config, seed=seed))
            results[name].append(r)
            speed = r["images_per_sec"] or math.nan
            row = measure.table_row(
                name,
                seed,
                f"{r['plain']:.4f}",
                f"{r['accuracy']:.4f}",
                f"{r['loss']:.4f}",
                f"{r['secs']:.0f}",
                f"{r['start_secs'] or math.nan:.1f}",
                f"{r['train_secs']:.0f}",
                f"{speed:.0f} ({1e9 * speed / r['rate']:.2f})",
                f"{r['rate'] / 1e9:.0f}",
                f"{r['cost'] / 1e12:.0f}",
            )
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
    print(measure.report_head("Accuracy and time"))
    head = measure.table_head(
        "recipe | seed | accuracy, plain | by TTA or averages | loss, averages | "
        "seconds in all | first calls, s | training, s | images/s after the first call "
        "(per GFLOP/s) | matrix rate, GFLOP/s | cost, TFLOP"
    )
    print("\n".join([head, *rows, ""]))
    for name, runs in results.items():
        print(
            f"- {name}: plain {mean_and_error([r['plain'] for r in runs])}, by TTA or "
            f"averages {mean_and_error([r['accuracy'] for r in runs])}, cost "
            f"{mean_and_error([r['cost'] / 1e12 for r in runs], 1)} TFLOP"
        )
    first, *others = results
    for name in others:
        pairs = list(zip(results[name], results[first], strict=True))
        plain, accuracy, loss, cost = (
            [a[key] - b[key] for a, b in pairs]
            for key in ("plain", "accuracy", "loss", "cost")
        )
        print(
            f"- {name} less {first}: plain {mean_and_error(plain)}, by TTA or averages "
            f"{mean_and_error(accuracy)}, loss {mean_and_error(loss)}, cost "
            f"{mean_and_error([c / 1e12 for c in cost], 1)} TFLOP"
        )


if __name__ == "__main__":
    config_flags.start(main)
