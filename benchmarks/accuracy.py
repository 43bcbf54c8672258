"""Accuracy does not fall with more towers: one recipe, trained by every strategy.

    python -m benchmarks.accuracy --data_dir=DATA --epochs 5 --seeds 5

One tower with several seeds shows how far chance alone carries the result; then every
strategy trains with seed 0, as `run_train.py` and `run_eval.py` do. Each run has a
process of its own, because the number of logical devices is fixed per process. Results
go to the file --out as they come: the same command goes on where it was interrupted.
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
from towers import config_flags, evaluate, train
from towers.config import Config

RECIPES = pathlib.Path(__file__).resolve().parent.parent / "configs"

# They take time and do not touch what is trained.
UNOBSERVED = {"eval_every_epochs": 0.0, "summary_every_steps": 0}

FOUR = {"num_towers": 4}
VARIANTS = {
    "towers, 4": {"strategy": "towers", **FOUR},
    "replicated, 4": {"strategy": "replicated", **FOUR},
    "replicated, 4, bfloat16 all-reduce": {
        "strategy": "replicated",
        "all_reduce_dtype": "bfloat16",
        **FOUR,
    },
    "model_parallel, 2 groups of 2": {
        "strategy": "model_parallel",
        "group_size": 2,
        **FOUR,
    },
    "model_parallel, 1 group of 4": {
        "strategy": "model_parallel",
        "group_size": 4,
        **FOUR,
    },
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
    """Every run of the comparison; the seeds of one tower come first."""
    changes = {seed_name(seed): {"seed": seed} for seed in range(num_seeds)}
    changes |= VARIANTS
    one = dataclasses.replace(base, seed=0, num_towers=1, device="cpu", **UNOBSERVED)
    found = {}
    for name, change in changes.items():
        if steps := change.get("accumulate_steps"):
            change = change | {"batch_size": one.batch_size // steps}
        found[name] = dataclasses.replace(one, **change)
    return found


def seed_name(seed: int) -> str:
    return f"one tower, seed {seed}"


def train_and_evaluate(config: Config) -> dict:
    """The accuracy and loss of a run, with raw and averaged parameters, and seconds."""
    with tempfile.TemporaryDirectory() as workdir:
        started = time.monotonic()
        train.train(config, workdir)
        secs = time.monotonic() - started
        record = {"steps": 0, "secs": secs}
        for suffix, use_ema in (("", False), ("_averaged", True)):
            if use_ema and not config.ema_decay:
                continue
            result = evaluate.evaluate(config, workdir, use_ema=use_ema)
            record["steps"] = result["step"]
            record[f"accuracy{suffix}"] = result["test_accuracy"]
            record[f"loss{suffix}"] = result["test_loss"]
    return record


def results(out: pathlib.Path, configs: dict[str, Config]) -> dict[str, dict]:
    """Name -> record of the runs that are done, with the very same config."""
    if not out.exists():
        return {}
    records = [json.loads(line) for line in out.read_text().splitlines()]
    wanted = {name: dataclasses.asdict(config) for name, config in configs.items()}
    return {r["name"]: r for r in records if r["config"] == wanted.get(r["name"])}


def table(records: dict[str, dict], num_seeds: int) -> str:
    """A row per run; differences from the mean over the seeds, in deviations of it."""
    measures = [m for m in MEASURES if all(m in r for r in records.values())]
    of_seeds = {
        m: [records[seed_name(seed)][m] for seed in range(num_seeds)] for m in measures
    }
    headings = " | ".join(f"{MEASURES[m]} | in deviations" for m in measures)
    lines = [
        f"| run | {headings} | seconds |",
        "| --- |" + " --- | --- |" * len(measures) + " --- |",
    ]
    for name, record in records.items():
        cells = []
        for m in measures:
            away = record[m] - np.mean(of_seeds[m])
            cells.append(f"{record[m]:.4f}")
            cells.append(f"{away / _deviation(of_seeds[m]):+.1f}")
        lines.append(f"| {name} | {' | '.join(cells)} | {record['secs']:.0f} |")
    for title, of in (("mean of the seeds", np.mean), ("their deviation", _deviation)):
        cells = " | ".join(f"{of(of_seeds[m]):.4f} |" for m in measures)
        lines.append(f"| {title} | {cells} | |")
    return "\n".join(lines)


def _deviation(values):
    return np.std(values, ddof=1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="cifar10_cnn", help="recipe")
    parser.add_argument("--data_dir", default="", help="folder of the data set")
    parser.add_argument("--epochs", type=float, default=5.0)
    parser.add_argument("--seeds", type=int, default=5, help="of one tower, at least 2")
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
        f"({records[seed_name(0)]['steps']:,} steps); "
        "seed 0 where none is named; differences are from the mean of the seeds, in "
        "standard deviations of the seeds; seconds are those of training, with "
        "reading the data and tracing\n"
    )
    print(table(records, options.seeds))


if __name__ == "__main__":
    main()
