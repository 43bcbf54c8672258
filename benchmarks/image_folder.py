"""Training from a folder of images over training from one file of pixels; a part of
`python -m benchmarks.input`."""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import time

from benchmarks import measure, trainers
from towers import build
from towers.config.recipes import load_recipe

RECIPES = pathlib.Path(__file__).resolve().parent.parent / "configs"
RECIPE, SMALL_CACHE_MB = "cifar10_lenet", 20.0


def compare(options: argparse.Namespace) -> None:
    """Training from a folder of images over training from one file of pixels."""
    chosen = measure.all_devices(options.device, options.towers, core_per_tower=True)
    binary = {"dataset": "cifar10", "data_dir": options.data_dir}
    folder = {"dataset": "image_folder", "data_dir": options.folder, "image_size": 32}
    small = folder | {"image_cache_mb": SMALL_CACHE_MB}
    cases = {
        "binary file": binary,
        "image folder": folder,
        f"image folder, {SMALL_CACHE_MB:g} MB in memory": small,
    }
    fields = {"batch_size": options.batch_size, "num_towers": len(chosen.towers)}
    fields |= {"input": "stream", "num_epochs": 1000.0}
    recipe = load_recipe(RECIPE, RECIPES)
    rates, rows, training, drawing = [measure.matrix_rate()], {}, {}, {}
    for name, case in cases.items():
        memory, started = measure.PeakMemory(chosen), time.perf_counter()
        config = dataclasses.replace(recipe, **fields, **case)
        parts = build.build(config, device_kind=chosen.kind)
        trainer = trainers.create_trainer(config, parts, chosen)
        trainer.train(1)
        first_step_secs = time.perf_counter() - started
        epoch_steps = max(1, parts.num_examples // options.batch_size - 1)
        started = time.perf_counter()
        trainer.train(epoch_steps)
        speed = epoch_steps * options.batch_size / (time.perf_counter() - started)
        megabytes = memory.growth_bytes() / 1e6
        rows[name] = f"{first_step_secs:.1f}", f"{speed:,.0f}", f"{megabytes:,.0f}"
        training[name] = functools.partial(trainer.train, options.steps)
        stream = iter(parts.train_batches.stream(epoch_steps))
        drawing[name] = functools.partial(measure.draw, stream, options.steps)
    wall, _ = measure.in_turn(training, options.rounds)
    bare, _ = measure.in_turn(drawing, options.rounds)
    rates.append(measure.matrix_rate())
    print(measure.report_head("Training from a folder of images"))
    print(
        f"LeNet, float32, batch {options.batch_size}, {len(chosen.towers)} tower(s); "
        f"{options.rounds} rounds of {options.steps} steps after the first epoch, one "
        f"more to warm up; {measure.rates_text(rates)}\n\n"
        + measure.table_head(
            "data | first step after, s | images/s in the first epoch | MB at the peak "
            "| images/s later, median | speed / binary file (min, median, max) | "
            "images/s without training"
        )
    )
    images = options.steps * options.batch_size
    for name, row in rows.items():
        speeds = (images / statistics.median(secs[name]) for secs in (wall, bare))
        later, bare_speed = (f"{speed:,.0f}" for speed in speeds)
        speedup = " ".join(
            f"{x:.3f}" for x in measure.ratios(wall, "binary file", name)
        )
        print(measure.table_row(name, *row, later, speedup, bare_speed))
