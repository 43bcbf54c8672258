"""Whether reading, augmenting and computing overlap; a part of `python -m
benchmarks.input`, which names the streams that are compared."""

import argparse
import collections
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from benchmarks import measure, trainers
from benchmarks.stages import (
    JpegSource,
    WaitingLayer,
    processing_waits,
    reading_waits,
)
from towers import build
from towers.config import Config
from towers.data.batches import TrainBatches

# Steps of a new stream that do not count: until then it is filled for the first time.
FILLING_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Cost:
    """Mean seconds of a step: wall clock, processor time, waiting for the batch."""

    wall: float
    processor: float
    wait: float


@dataclasses.dataclass(frozen=True)
class Stream:
    """Batches, and the seconds that their stages wait: the slowest one, and all."""

    batches: TrainBatches | None
    slowest_secs: float = 0.0
    sum_secs: float = 0.0


def create_streams(batches: TrainBatches, compute_secs: float) -> dict[str, Stream]:
    """Everything but `compute` itself."""
    streams = {"as it is": Stream(batches)}
    for times in (1, 2, 4):
        secs = times * compute_secs
        streams[f"reading {times}"] = Stream(reading_waits(batches, secs), secs, secs)
    for times in (1, 2):
        secs = times * compute_secs
        waiting = processing_waits(batches, secs)
        streams[f"processing {times}"] = Stream(waiting, secs, secs)
        both = reading_waits(waiting, secs)
        streams[f"both {times}"] = Stream(both, secs, 2 * secs)
    secs = 2 * compute_secs
    together = reading_waits(batches, secs, False)
    streams["reading 2, together"] = Stream(together, secs, secs)
    jpegs = dataclasses.replace(batches, source=JpegSource(batches.source))
    return streams | {"decoding": Stream(jpegs)}


@contextlib.contextmanager
def noted(num_steps: int, costs: list[Cost]) -> Iterator[list[float]]:
    """Notes the cost of its body, which adds to the list the seconds that it waited."""
    waits, started, used = [], time.perf_counter(), time.process_time()
    yield waits
    wall, processor = time.perf_counter() - started, time.process_time() - used
    costs.append(Cost(*(x / num_steps for x in (wall, processor, sum(waits)))))


def training(trainer, num_steps: int, costs: list[Cost]) -> Callable[[], None]:
    """A function that trains for some steps on a new stream and notes their cost."""
    state = trainer.state()

    def run():
        trainer.load(state)
        trainer.train(FILLING_STEPS)
        with noted(num_steps, costs) as waits:
            waits.append(trainer.train(num_steps)["input_wait_secs"])
        trainer.load(state)  # the stream ends, and takes nothing from the next thing

    return run


def drawing(batches, num_steps: int, costs: list[Cost]) -> Callable[[], None]:
    """A function that draws batches from a new stream and notes their cost."""

    def run():
        stream = iter(batches.stream(0))
        measure.draw(stream, FILLING_STEPS)
        with noted(num_steps, costs):
            measure.draw(stream, num_steps)

    return run


def waiting_model(parts: build.Parts, secs: float) -> keras.Model:
    """A network whose computing is nothing but a wait."""
    images = keras.Input(parts.augment.image_shape, name="images")
    x = keras.layers.Flatten(name="flatten")(images)
    x = keras.layers.Dense(len(parts.data.class_names), name="logits")(x)
    return keras.Model(images, WaitingLayer(secs, name="wait")(x))


def measure_overlap(config, parts: build.Parts, chosen, options) -> None:
    """Runs everything in turn and prints a row for each stream, with the ratios taken
    round by round; then the batches drawn without training."""
    costs, drawn = collections.defaultdict(list), collections.defaultdict(list)

    def train_on(name, with_batches):
        trainer = trainers.create_trainer(config, with_batches, chosen)
        return training(trainer, options.steps, costs[name])

    things = {"compute": train_on("compute", trainers.on_still_batch(parts))}
    for _ in range(4):  # the first one traces
        things["compute"]()
    compute_secs = statistics.median(cost.wall for cost in costs["compute"][1:])
    streams = create_streams(parts.train_batches, compute_secs)
    for name, stream in streams.items():
        with_stream = dataclasses.replace(parts, train_batches=stream.batches)
        things[name] = train_on(name, with_stream)
    for name in ("as it is", "decoding"):
        batches = streams[name].batches
        things[f"{name}, drawn"] = drawing(batches, options.steps, drawn[name])
    measure.in_turn(things, options.rounds)

    def column(costs, name, field):
        return np.array([getattr(c, field) for c in costs[name][-options.rounds :]])

    alone, alone_processor = (
        column(costs, "compute", field) for field in ("wall", "processor")
    )
    columns = (
        "stages | images/s, median | step / slowest stage (min, median, max) | step / "
        "sum of the stages | input wait, percent | step without compute, percent | "
        "cores | processor time / compute"
    )
    print(f"\n{measure.table_head(columns)}")
    for name in costs:
        stream = streams.get(name, Stream(None))
        wall, processor, wait = (
            column(costs, name, field) for field in ("wall", "processor", "wait")
        )
        draw_secs = column(drawn, name, "wall") if name in drawn else 0.0
        slowest = np.maximum(alone, np.maximum(stream.slowest_secs, draw_secs))
        print(
            measure.table_row(
                name,
                f"{options.batch_size / np.median(wall):.0f}",
                measure.spread(wall / slowest),
                f"{np.median(wall / (alone + stream.sum_secs + draw_secs)):.3f}",
                f"{np.median(100 * wait / wall):.1f}",
                f"{np.median(100 * (1 - alone / wall)):.1f}",
                f"{np.median(processor / wall):.2f}",
                f"{np.median(processor / alone_processor):.3f}",
            )
        )
    columns = "drawn without training | images/s | cores | processor time / compute"
    print(f"\n{measure.table_head(columns)}")
    for name in drawn:
        wall, processor = (
            np.median(column(drawn, name, field)) for field in ("wall", "processor")
        )
        print(
            measure.table_row(
                name,
                f"{options.batch_size / wall:.0f}",
                f"{processor / wall:.2f}",
                f"{processor / np.median(alone_processor):.3f}",
            )
        )


def compare(options: argparse.Namespace) -> None:
    """The overlap with computing that waits, and with the tutorial's network."""
    tf.get_logger().setLevel("ERROR")  # every trainer traces a step of its own
    chosen = measure.all_devices(options.device, 1, core_per_tower=True)
    config = Config(
        **measure.dataset(options),
        batch_size=options.batch_size,
        input="stream",
        num_towers=1,
        num_epochs=1000.0,
    )
    parts = build.build(config, device_kind=chosen.kind)
    print(measure.report_head("Overlap of reading, processing and computing"))
    print(
        f"Batch {options.batch_size}; {options.rounds} rounds of {options.steps} steps "
        f"on a new stream, after {FILLING_STEPS} that fill it, and one round more to "
        f"warm up\n\nComputing that waits for {options.wait_ms:.0f} ms:"
    )
    rates = [measure.matrix_rate()]
    model = waiting_model(parts, options.wait_ms / 1000)
    waiting = dataclasses.replace(parts, model=model)
    measure_overlap(config, waiting, chosen, options)
    print(f"\ncnn at 24x24, float32, on the {chosen.kind}:")
    measure_overlap(config, parts, chosen, options)
    rates.append(measure.matrix_rate())
    print(f"\n{measure.rates_text(rates)}")
