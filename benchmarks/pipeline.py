"""Whether reading, processing and computing overlap.

    python -m benchmarks.pipeline --data_dir=DATA

Batches are read, then augmented, then trained on, each stage while the next one is at
work on the batch before. So a step should cost as much as the slowest stage, not as
their sum. In turn in one process, with strategy `towers` and one tower:
- `compute`: on a batch that lies ready.
- `as it is`: on the stream, images from memory, augmented.
- `reading 2`: every read also takes 2 x the time of `compute`, waiting, as for a disk
  that serves one request after the other; `processing 2` and `both 2` likewise.
- `reading 2, together`: reads that may wait beside each other, as on a network.
- `decoding`: every read also decodes JPEG files and scales them down.

First with computing that only waits, as the processor does for a GPU: this shows the
overlap by itself, on any machine. Then with the tutorial's network. Where the processor
computes that, stages that need the processor too cost their time of it; a last table
gives that time: what it takes to draw batches without training.
"""

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

import towers  # noqa: F401  (before Keras: settles its backend)
from benchmarks import measure, stages
from towers import build, config
from towers.data.batches import TrainBatches
from towers.optim import losses
from towers.parallel import devices
from towers.parallel.strategy import Strategy
from towers.parallel.towers import Towers

# Steps of a new stream that do not count: until then it is filled for the first time.
FILLING_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one step on average: seconds by the wall clock, of processor time, and those
    of waiting for the batch."""

    wall_secs: float
    processor_secs: float
    wait_secs: float


@dataclasses.dataclass(frozen=True)
class Stream:
    """Batches, and how long their stages wait for each: the slowest, and all."""

    batches: TrainBatches
    slowest_secs: float = 0.0
    sum_secs: float = 0.0


def streams(batches: TrainBatches, compute_secs: float) -> dict[str, Stream]:
    """Everything but `compute` itself."""
    found = {"as it is": Stream(batches)}
    for times in (1, 2, 4):
        secs = times * compute_secs
        waiting = stages.reading_waits(batches, secs)
        found[f"reading {times}"] = Stream(waiting, secs, secs)
    for times in (1, 2):
        secs = times * compute_secs
        waiting = stages.processing_waits(batches, secs)
        found[f"processing {times}"] = Stream(waiting, secs, secs)
    for times in (1, 2):
        secs = times * compute_secs
        waiting = stages.processing_waits(stages.reading_waits(batches, secs), secs)
        found[f"both {times}"] = Stream(waiting, secs, 2 * secs)
    secs = 2 * compute_secs
    waiting = stages.reading_waits(batches, secs, one_at_a_time=False)
    found["reading 2, together"] = Stream(waiting, secs, secs)
    return found | {"decoding": Stream(stages.reading_decodes(batches))}


@contextlib.contextmanager
def noted(num_steps: int, costs: list[Cost]) -> Iterator[list[float]]:
    """Notes the cost of its body, which adds to the list what it waited."""
    waited, started, used = [], time.perf_counter(), time.process_time()
    yield waited
    wall, processor = time.perf_counter() - started, time.process_time() - used
    costs.append(Cost(*(x / num_steps for x in (wall, processor, sum(waited)))))


def training(
    strategy: Strategy, num_steps: int, costs: list[Cost]
) -> Callable[[], None]:
    """A function that trains for some steps on a new stream and notes their cost."""
    state = strategy.state()

    def run():
        strategy.load(state)
        strategy.train(FILLING_STEPS)
        with noted(num_steps, costs) as waited:
            waited.append(strategy.train(num_steps)["input_wait_secs"])
        strategy.load(state)  # the stream ends, and takes nothing from the next thing

    return run


def drawing(
    batches: TrainBatches, num_steps: int, costs: list[Cost]
) -> Callable[[], None]:
    """A function that draws batches from a new stream and notes their cost."""

    def run():
        stream = iter(batches.stream(0))
        for _ in range(FILLING_STEPS):
            next(stream)
        with noted(num_steps, costs):
            for _ in range(num_steps):
                next(stream)

    return run


def waiting_towers(parts: build.Parts, device: str, secs: float):
    """Batches -> strategy `towers` whose computing is nothing but a wait."""
    images = keras.Input(parts.augment.image_shape, name="images")
    logits = keras.layers.Dense(len(parts.data.class_names), name="logits")
    model = keras.Model(images, logits(keras.layers.Flatten(name="flatten")(images)))
    stage = stages.Waiting(secs)

    def loss_fn(logits, labels):
        return losses.cross_entropy(logits, stage.before(labels), 0.0)

    def create(batches):
        return Towers(
            model,
            loss_fn=loss_fn,
            update=parts.update,
            stream=batches.stream,
            batch_size=parts.train_batches.batch_size,
            devices=[device],
        )

    return create


def measure_training(
    create_strategy: Callable[[TrainBatches | measure.StillBatches], Strategy],
    parts: build.Parts,
    options: argparse.Namespace,
) -> tuple[dict[str, list[Cost]], dict[str, list[Cost]], dict[str, Stream]]:
    """Runs everything in turn.

    Returns:
        The costs of `compute` and of training on each stream, per round; those of
        drawing alone, where a stream does more than wait; and the streams.
    """
    costs, drawn = collections.defaultdict(list), collections.defaultdict(list)
    still = measure.StillBatches(parts.train_batches(tf.constant(0, tf.int64)))

    def train_on(name, batches):
        return training(create_strategy(batches), options.steps, costs[name])

    things = {"compute": train_on("compute", still)}
    for _ in range(4):  # the first one traces
        things["compute"]()
    compute_secs = median(costs["compute"][1:], "wall_secs")
    found = streams(parts.train_batches, compute_secs)
    things |= {name: train_on(name, stream.batches) for name, stream in found.items()}
    for name in ("as it is", "decoding"):
        draw = drawing(found[name].batches, options.steps, drawn[name])
        things[f"{name}, drawn"] = draw
    measure.in_turn(things, options.rounds)
    last = slice(-options.rounds, None)
    return (
        {name: of_rounds[last] for name, of_rounds in costs.items()},
        {name: of_rounds[last] for name, of_rounds in drawn.items()},
        found,
    )


def median(costs: list[Cost], field: str) -> float:
    return statistics.median(getattr(cost, field) for cost in costs)


def spread(values: np.ndarray) -> str:
    return " ".join(f"{x:.3f}" for x in np.percentile(values, (0, 50, 100)))


def print_training(
    costs: dict[str, list[Cost]],
    drawn: dict[str, list[Cost]],
    found: dict[str, Stream],
    batch_size: int,
) -> None:
    """A row for each stream, all ratios taken round by round."""
    columns = (
        "stages",
        "images/s, median",
        "step / slowest stage (min, median, max)",
        "step / sum of the stages",
        "input wait, percent",
        "step without compute, percent",
        "cores",
        "processor time / compute",
    )
    print(f"\n| {' | '.join(columns)} |\n| {' | '.join(len(columns) * ['---'])} |")

    def column(name, field, costs=costs):
        return np.array([getattr(cost, field) for cost in costs[name]])

    alone = column("compute", "wall_secs")
    for name in costs:
        stream = found.get(name, Stream(None))
        wall, processor = column(name, "wall_secs"), column(name, "processor_secs")
        draw = column(name, "wall_secs", drawn) if name in drawn else 0.0
        slowest = np.maximum(alone, np.maximum(stream.slowest_secs, draw))
        cells = (
            name,
            f"{batch_size / np.median(wall):.0f}",
            spread(wall / slowest),
            f"{np.median(wall / (alone + stream.sum_secs + draw)):.3f}",
            f"{np.median(100 * column(name, 'wait_secs') / wall):.1f}",
            f"{np.median(100 * (1 - alone / wall)):.1f}",
            f"{np.median(processor / wall):.2f}",
            f"{np.median(processor / column('compute', 'processor_secs')):.3f}",
        )
        print(f"| {' | '.join(cells)} |")


def print_drawing(
    costs: dict[str, list[Cost]], compute: list[Cost], batch_size: int
) -> None:
    """What the stages take by themselves."""
    print("\n| drawn without training | images/s | cores | processor time / compute |")
    print("| --- | --- | --- | --- |")
    for name, found in costs.items():
        wall, processor = (median(found, f) for f in ("wall_secs", "processor_secs"))
        share = processor / median(compute, "processor_secs")
        print(
            f"| {name} | {batch_size / wall:.0f} | {processor / wall:.2f} "
            f"| {share:.3f} |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", default="", help="CIFAR-10; synthetic without it")
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=40, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wait_ms", type=float, default=50.0, help="computing")
    options = parser.parse_args()

    tf.get_logger().setLevel("ERROR")  # every strategy traces a step of its own
    chosen = devices.configure("auto", 1)
    settings = config.Config(
        dataset="cifar10" if options.data_dir else "synthetic",
        data_dir=options.data_dir,
        batch_size=options.batch_size,
        input="stream",
        num_epochs=1000.0,
    )
    parts = build.build(settings)
    rates = [measure.matrix_rate()]

    create = waiting_towers(parts, chosen.towers[0], options.wait_ms / 1000)
    waiting = measure_training(create, parts, options)

    def create_towers(batches):
        with_batches = dataclasses.replace(parts, train_batches=batches)
        return build.create_strategy(settings, with_batches, chosen)

    computing = measure_training(create_towers, parts, options)
    rates.append(measure.matrix_rate())

    print(measure.report_head("Overlap of reading, processing and computing"))
    print(
        f"Batch {options.batch_size}; {options.rounds} rounds of {options.steps} steps "
        f"on a new stream, after {FILLING_STEPS} that fill it, and one round more to "
        f"warm up; {measure.told_rates(*rates)}\n"
    )
    print(f"Computing that waits for {options.wait_ms:.0f} ms:")
    print_training(*waiting, options.batch_size)
    print(f"\ncnn at 24x24, float32, on the {chosen.kind}:")
    print_training(*computing, options.batch_size)
    print_drawing(computing[1], computing[0]["compute"], options.batch_size)


if __name__ == "__main__":
    main()
