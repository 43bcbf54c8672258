"""What accuracy recipes reach, and how soon, over several seeds.

    python -m benchmarks.time_to_accuracy --config=cifar10_speedrun --data_dir=DATA

Everything but imports is counted: reading the data, tracing and compiling, training,
the evaluations of the recipe, the last checkpoint. Shown apart, and part of it, are the
training seconds and within them the first calls of each stage, which compile. With
`--accuracy=X` the first step is given whose evaluation reached X; how often a recipe
evaluates is its `--eval_every_epochs`. The cost is that
time multiplied with the machine's matrix rate, because machines differ from day to day
and from minute to minute: the mean of rates measured before each run, after it, and
about every minute within, when the clock stands still.

Every run has a process of its own. With `--records=FILE` it is a line of that file too,
and a series that was interrupted leaves out what is there already; another machine or
other code wants another file. With `--against=RECIPE` a second recipe runs on the same
seeds in turn, and the paired differences are given. Any option of a recipe but `--seed`
is applied to both.
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

from benchmarks.recipe import CONFIG, RECIPES  # with the flags of a recipe
from towers import quiet_imports
from towers.config import Config
from towers.config import flags as config_flags
from towers.errors import ConfigError

RATE_EVERY_SECS = 60.0
SPAWN = multiprocessing.get_context("spawn")
AGAINST = flags.DEFINE_string("against", "", "Another recipe, on the same seeds.")
SEEDS = flags.DEFINE_integer("seeds", 5, "How many, from 0 on.", 1)
RECORDS = flags.DEFINE_string("records", "", "A file, a line for each run.")
ACCURACY = flags.DEFINE_float(
    "accuracy", 0.0, "When each run reaches it, by its evaluations."
)


def of_metrics(path: pathlib.Path, wanted: float) -> tuple[dict, int | None]:
    """The last evaluation of a run, and the first step that reached an accuracy."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = [
        (r["step"], {k.removeprefix("test_"): v for k, v in r.items()})
        for r in records
        if "test_accuracy" in r
    ]
    reached = [step for step, r in found if best(r) >= wanted]
    return found[-1][1], reached[0] if wanted and reached else None


def best(record: dict) -> float:
    """By its views, or its moving averages, where the recipe has them."""
    for name in ("views_averaged", "views", "averaged"):
        if f"accuracy_{name}" in record:
            return record[f"accuracy_{name}"]
    return record["accuracy"]


class Clock:
    """Time, and rates that are measured while it stands still."""

    def __init__(self, rate_now: Callable[[], float]):
        self._rate_now = rate_now
        self.rates = [rate_now()]
        self.secs = 0.0
        self._going_since = time.monotonic()

    def measure(self) -> None:
        self.secs += time.monotonic() - self._going_since
        self.rates.append(self._rate_now())
        self._going_since = time.monotonic()

    def measure_each_minute(self) -> None:
        if time.monotonic() - self._going_since > RATE_EVERY_SECS:
            self.measure()


def run(config: Config, wanted: float) -> dict:
    """Trains and evaluates a recipe once; to be called in a fresh process."""
    with quiet_imports():
        import tensorflow as tf

        from benchmarks import measure
        from towers import training
        from towers.parallel import devices
        from towers.run import checkpoints

    chosen = devices.configure(config.device, config.num_towers, config.device_order)
    dtype = tf.as_dtype(config.precision)
    clock = Clock(lambda: measure.matrix_rate(dtype, chosen.towers))
    with tempfile.TemporaryDirectory() as workdir:
        training.train(config, workdir, after_call=clock.measure_each_minute)
        clock.measure()
        folder = pathlib.Path(workdir)
        record, reached = of_metrics(folder / "metrics.jsonl", wanted)
        stored = checkpoints.restore_latest(folder / "checkpoints").trainer_state
    rate = statistics.mean(clock.rates)
    return {
        "plain": record["accuracy"],
        "accuracy": best(record),
        "secs": clock.secs,
        "start_secs": stored["start_secs"],
        "train_secs": stored["train_secs"],
        "reached": reached,
        "rate": rate,
        "cost": clock.secs * rate,
    }


def recorded(name: str, config: Config) -> dict:
    """`run` in a process of its own, unless the records hold this run."""
    key = {
        "recipe": name,
        "config": dataclasses.asdict(config),
        "accuracy": ACCURACY.value,
    }
    key = json.loads(json.dumps(key))
    path = pathlib.Path(RECORDS.value or os.devnull)
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        if record["key"] == key:
            return record["found"]
    # Nothing may be traced or in a cache already.
    with concurrent.futures.ProcessPoolExecutor(1, SPAWN) as process:
        found = process.submit(run, config, ACCURACY.value).result()
    with path.open("a") as file:
        file.write(json.dumps({"key": key, "found": found}) + "\n")
    return found


def mean_and_error(values: list[float], digits: int = 4) -> str:
    """The mean and its standard error."""
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} +- {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"


def main(_):
    names = [CONFIG.value, *filter(None, [AGAINST.value])]
    given = config_flags.given_flags()
    configs = {
        name: config_flags.config_of_flags(name, RECIPES, given)[0] for name in names
    }
    if "seed" in given:
        raise ConfigError("--seed is 0, 1, ... here; --seeds says how many")
    for name, config in configs.items():
        if config.eval_every_epochs == 0 or config.validation_fraction > 0:
            raise ConfigError(
                f"{name} does not evaluate on the test images while it trains; set "
                "--eval_every_epochs and --validation_fraction=0"
            )
    with quiet_imports():
        from benchmarks import measure
    found = {name: [] for name in configs}
    lines = []
    for seed in range(SEEDS.value):
        for name, config in configs.items():
            config = dataclasses.replace(config, seed=seed)
            r = recorded(name, config)
            found[name].append(r)
            reached = f" {r['reached'] or 'none'} |" if ACCURACY.value else ""
            lines.append(
                f"| {name} | {seed} | {r['plain']:.4f} | {r['accuracy']:.4f} |"
                f"{reached} {r['secs']:.0f} | {r['start_secs']:.1f} | "
                f"{r['train_secs']:.0f} | {r['rate'] / 1e9:.0f} | "
                f"{r['cost'] / 1e12:.0f} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    print(measure.report_head("Time to an accuracy"))
    step = f" step of {ACCURACY.value:g} |" if ACCURACY.value else ""
    print(
        f"| recipe | seed | accuracy, plain | accuracy, views or averages |{step} "
        "seconds in all | first calls, s | training, s | matrix rate, GFLOP/s | cost, "
        "TFLOP |\n|" + " --- |" * (10 if step else 9)
    )
    print("\n".join(lines) + "\n")
    for name, runs in found.items():
        print(
            f"- {name}: plain {mean_and_error([r['plain'] for r in runs])}, views or "
            f"averages {mean_and_error([r['accuracy'] for r in runs])}, cost "
            f"{mean_and_error([r['cost'] / 1e12 for r in runs], 1)} TFLOP"
        )
    if AGAINST.value:
        pairs = zip(found[names[1]], found[names[0]], strict=True)
        accuracy, cost = zip(
            *((a["accuracy"] - b["accuracy"], a["cost"] - b["cost"]) for a, b in pairs),
            strict=True,
        )
        costs = mean_and_error([c / 1e12 for c in cost], 1)
        print(
            f"- {names[1]} less {names[0]}: accuracy {mean_and_error(accuracy)}, cost "
            f"{costs} TFLOP"
        )


if __name__ == "__main__":
    config_flags.run(main)
