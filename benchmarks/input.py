"""The cost of the input: reading, augmenting and feeding a step.

    python -m benchmarks.input --data_dir=DATA --folder=ROOT --models=lenet,cnn

In turn in one process, for each network:
- `ready, HxW`: steps on a batch of images of that size that lies ready.
- `stream`, `resident`: on the binary files in DATA, or without it on synthetic images.
- `folder`: on the images `ROOT/train/CLASS/*.jpg` and `ROOT/test/CLASS/*.jpg`, with
  what is decoded kept in memory; `folder, decoded anew`: with nothing kept.

A stage works on the next batch while the step computes, so a step should cost as much
as the slowest stage. Where the processor computes the network too, stages cost it their
time; the last column gives that: batches drawn without training. On GPUs the wait says
nothing (`docs/input.md`), and the time over `ready` counts. Memory is the growth of the
process, or of the fullest GPU, at its peak until the first round ends.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks import measure, trainers
from towers.build import builder
from towers.config import Config
from towers.errors import ConfigError

# Batches of a new stream that do not count: until then it is filled.
FILLING_STEPS = 8
COLUMNS = (
    "network | input | first step after, s | images/s of the first round | MB at the "
    "peak | images/s later, median | time / ready (min, median, max) | waiting, percent"
    " of the time | images/s drawn without training"
)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = measure.create_parser(__doc__, steps=40, rounds=5)
    parser.add_argument("--models", type=measure.names, default="cnn")
    parser.add_argument("--folder", default="", help="with train/ and test/")
    parser.add_argument("--image_size", type=int, default=32, help="of the folder's")
    parser.add_argument("--augment", default="pad_crop_flip")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--towers", type=int, default=1)
    return parser.parse_args(argv)


def cases(options: argparse.Namespace, model: str) -> dict[str, Config]:
    """Name of an input -> the training on it."""
    common = Config(
        **measure.dataset(options),
        model=model,
        augment=options.augment,
        precision=options.precision,
        batch_size=options.batch_size,
        num_towers=options.towers,
        device=options.device,
        num_epochs=1e4,
    )
    result = {
        kind: dataclasses.replace(common, input=kind) for kind in ("stream", "resident")
    }
    if options.folder:
        folder = {"dataset": "image_folder", "data_dir": options.folder}
        folder |= {"image_size": options.image_size, "input": "stream"}
        for name, size in (
            ("folder", {}),
            ("folder, decoded anew", {"image_cache_mb": 0.0}),
        ):
            result[name] = dataclasses.replace(common, **folder, **size)
    return result


def draw(batches: Iterator, num_steps: int) -> None:
    """Takes so many batches from a stream."""
    for _ in range(num_steps):
        next(batches)


def measure_inputs(options: argparse.Namespace, chosen, model: str) -> None:
    """Prints a row for each input of a network."""
    made, streams, ready, ready_of = {}, {}, {}, {}
    for name, config in cases(options, model).items():
        memory, started = measure.PeakMemory(chosen), time.perf_counter()
        try:
            parts = builder.build(config, device_kind=chosen.kind)
        except ConfigError as error:
            print(measure.table_row(model, name, error), flush=True)
            continue
        trainer = trainers.create_trainer(config, parts, chosen)
        height, width, _ = parts.augment.image_shape
        ready_of[name] = f"ready, {height}x{width}"
        if ready_of[name] not in ready:
            constant = trainers.create_on_constant_batch(config, parts, chosen)
            ready[ready_of[name]] = constant
        trainer.train(1)
        first_secs = time.perf_counter() - started
        started = time.perf_counter()
        trainer.train(options.steps)
        speed = options.steps * options.batch_size / (time.perf_counter() - started)
        memory_mb = memory.growth_bytes() / 1e6
        row = f"{first_secs:.1f}", f"{speed:,.0f}", f"{memory_mb:,.0f}"
        made[name] = trainer, row
        if config.input == "stream":
            streams[name] = iter(parts.train_batches.stream(0))
            draw(streams[name], FILLING_STEPS)
    if not made:
        return
    waits = {name: [] for name in made}

    def train(name):
        waits[name].append(made[name][0].train(options.steps)["input_wait_secs"])

    things = {k: functools.partial(v.train, options.steps) for k, v in ready.items()}
    things |= {name: functools.partial(train, name) for name in made}
    wall, _ = measure.in_turn(things, options.rounds)
    bare, _ = measure.in_turn(
        {
            name: functools.partial(draw, stream, options.steps)
            for name, stream in streams.items()
        },
        options.rounds,
    )
    images = options.steps * options.batch_size
    for name, secs in wall.items():
        cells = made[name][1] if name in made else ("",) * 3
        wait = (
            [100 * np.median(np.divide(waits[name][1:], secs))] if name in made else []
        )
        drawn = [images / statistics.median(bare[name])] if name in bare else []
        print(
            measure.table_row(
                model,
                name,
                *cells,
                f"{images / statistics.median(secs):,.0f}",
                measure.ratios_text(wall, name, ready_of.get(name, name)),
                "".join(f"{percent:.1f}" for percent in wait),
                "".join(f"{speed:,.0f}" for speed in drawn),
            ),
            flush=True,
        )


def main() -> None:
    options = parse_options()
    chosen = measure.all_devices(options.device, options.towers, core_per_tower=True)
    print(measure.report_head("The cost of the input"))
    print(
        f"{options.precision}, batch {options.batch_size}, {options.towers} tower(s) "
        f"on the {chosen.kind}, {options.augment}; {options.rounds} rounds of "
        f"{options.steps} steps, one more to warm up\n\n{measure.table_head(COLUMNS)}"
    )
    rates = [measure.matrix_rate(devices=chosen.towers)]
    for model in options.models:
        measure_inputs(options, chosen, model)
    rates.append(measure.matrix_rate(devices=chosen.towers))
    print(f"\n{measure.rates_text(rates)} before and after.")


if __name__ == "__main__":
    measure.run(main)
