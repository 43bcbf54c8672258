"""Accuracy does not fall with more towers: one recipe, trained by every strategy.

    python -m benchmarks.accuracy --data_dir=DATA --epochs 5 --seeds 5

One tower and four with several seeds show how far chance alone carries the result, and
the difference that towers make; the other strategies train with seed 0. All train and
are evaluated as by `run_train.py` and `run_eval.py`, each in a process of its own,
because the number of logical devices is fixed per process. Results go to the file --out
as they come: the same command goes on where it was interrupted.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

from benchmarks import measure
from towers import evaluation, training
from towers.config import Config
from towers.config import flags as config_flags

RECIPES = pathlib.Path(__file__).resolve().parent.parent / "configs"

# They take time and do not touch what is trained.
UNOBSERVED = {"eval_every_epochs": 0.0, "summary_every_steps": 0}

FOUR = {"num_towers": 4}
REPLICATED = {"strategy": "replicated", **FOUR}
SPLIT = {"strategy": "model_parallel", **FOUR}
SEEDED = {"one tower": {}, "towers, 4": FOUR}
OTHERS = {
    "replicated, 4": REPLICATED,
    "replicated, 4, bfloat16 all-reduce": REPLICATED | {"all_reduce_dtype": "bfloat16"},
    "model_parallel, 2 groups of 2": SPLIT | {"group_size": 2},
    "model_parallel, 1 group of 4": SPLIT | {"group_size": 4},
    "one tower, 2 micro-batches of half the size": {"accumulate_steps": 2},
    "async_towers, 4": {"strategy": "async_towers", **FOUR},
}

# What is compared, and its heading.
MEASURES = {
    "accuracy": "test accuracy",
    "loss": "test loss",
    "accuracy_averaged": "accuracy, averaged",
    "loss_averaged": "loss, averaged",
}


def configs_by_name(base: Config, num_seeds: int) -> dict[str, Config]:
    """Every run of the comparison; those of several seeds come first."""
    changes = {
        f"{name}, seed {seed}": change | {"seed": seed}
        for name, change in SEEDED.items()
        for seed in range(num_seeds)
    }
    changes |= OTHERS
    one = dataclasses.replace(base, seed=0, num_towers=1, device="cpu", **UNOBSERVED)
    found = {}
    for name, change in changes.items():
        if steps := change.get("accumulate_steps"):
            change = change | {"batch_size": one.batch_size // steps}
        found[name] = dataclasses.replace(one, **change)
    return found


def train_and_evaluate(config: Config) -> dict:
    """The accuracy and loss of a run, with raw and averaged parameters, and seconds."""
    with tempfile.TemporaryDirectory() as workdir:
        started = time.monotonic()
        training.train(config, workdir)
        secs = time.monotonic() - started
        record = {"secs": secs}
        for suffix, use_ema in (("", False), ("_averaged", True)):
            if use_ema and not config.ema_decay:
                continue
            result = evaluation.evaluate(config, workdir, use_ema=use_ema)
            record["steps"] = result["step"]
            record[f"accuracy{suffix}"] = result["test_accuracy"]
            record[f"loss{suffix}"] = result["test_loss"]
    return record


def results(out: pathlib.Path, configs: dict[str, Config]) -> dict[str, dict]:
    """Name -> record of the runs that are done, with the very same config."""
    if not out.exists():
        return {}
    done = [json.loads(line) for line in out.read_text().splitlines()]
    found = {}
    for name, config in configs.items():
        wanted = dataclasses.asdict(config)
        for record in done:
            if record["config"] == wanted:
                found[name] = record
    return found


def table(records: dict[str, dict], num_seeds: int) -> str:
    """A row per run; differences from the mean over the seeds of one tower, in
    deviations of those. Then what four towers make of it, seed by seed."""
    measures = [m for m in MEASURES if all(m in r for r in records.values())]
    one, four = (
        {
            m: np.array([records[f"{name}, seed {i}"][m] for i in range(num_seeds)])
            for m in measures
        }
        for name in SEEDED
    )
    headings = " | ".join(f"{MEASURES[m]} | in deviations" for m in measures)
    lines = [
        f"| run | {headings} | seconds |",
        "| --- |" + " --- | --- |" * len(measures) + " --- |",
    ]
    for name, record in records.items():
        cells = []
        for m in measures:
            away = (record[m] - one[m].mean()) / one[m].std(ddof=1)
            cells.append(f"{record[m]:.4f} | {away:+.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} | {record['secs']:.0f} |")
    summary = {
        "one tower, mean": {m: one[m].mean() for m in measures},
        "one tower, deviation": {m: one[m].std(ddof=1) for m in measures},
        "towers, 4, mean": {m: four[m].mean() for m in measures},
        "their difference": {m: (four[m] - one[m]).mean() for m in measures},
        "its standard error": {
            m: (four[m] - one[m]).std(ddof=1) / num_seeds**0.5 for m in measures
        },
    }
    for title, values in summary.items():
        cells = " | ".join(f"{values[m]:.4f} |" for m in measures)
        lines.append(f"| {title} | {cells} | |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="cifar10_cnn", help="recipe")
    parser.add_argument("--data_dir", default="", help="folder of the data set")
    parser.add_argument("--epochs", type=float, default=5.0)
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--out", type=pathlib.Path, default="accuracy.jsonl")
    parser.add_argument("--run", help="train only the run of this name, here and now")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error(f"--seeds={options.seeds}: a deviation needs at least 2")
    base = dataclasses.replace(
        config_flags.load_recipe(options.config, RECIPES),
        data_dir=options.data_dir,
        num_epochs=options.epochs,
    )
    configs = configs_by_name(base, options.seeds)

    if options.run:
        config = configs[options.run]
        record = {"name": options.run, **train_and_evaluate(config)}
        record["config"] = dataclasses.asdict(config)
        with options.out.open("a") as out:
            out.write(json.dumps(record) + "\n")
        return
    for name in configs:
        if name in results(options.out, configs):
            continue
        print(f"--- {name}", flush=True)
        again = [sys.executable, "-m", "benchmarks.accuracy", *sys.argv[1:]]
        done = subprocess.run([*again, "--run", name])
        if done.returncode:
            sys.exit(f"{name} ended with exit code {done.returncode}")
    records = results(options.out, configs)
    records = {name: records[name] for name in configs}
    print(measure.report_head("Accuracy of every strategy on more towers"))
    print(
        f"{options.config} for {options.epochs:g} epochs "
        f"({records['one tower, seed 0']['steps']:,} steps); seed 0 where none is "
        "named; deviations are those of one tower over the seeds, from their mean; the "
        "difference of four towers is taken seed by seed; seconds are those of "
        "training, with reading the data and tracing\n"
    )
    print(table(records, options.seeds))


if __name__ == "__main__":
    main()
