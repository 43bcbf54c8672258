"""Whether reading, processing and computing overlap, for the tutorial's network.

    python -m benchmarks.pipeline --data_dir=DATA

Three stages work at the same time: batches are read, then augmented, then trained on.
Where they overlap, a step costs as much as the slowest of them, not their sum. In turn
in one process:
- `compute`: strategy `towers` with one tower, on a batch that lies ready.
- `as it is`: the same, on the stream: images from memory, augmented.
- `reading 2`: every read also waits for 2 x the time of `compute`, as for a disk that
  serves one request at a time; `processing 2` and `both 2` likewise.
- `reading 2, together`: reads that may wait beside each other, as on a network.
- `decoding`: every read also decodes JPEG files and scales them down.

What waits takes no processor, so that only this tells overlap on any machine. What is
computed shares the processors with the step where that runs on them too; a second table
gives what the stages take of them by themselves, without training.
"""

import argparse
import collections
import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

import towers  # noqa: F401  (before Keras: settles its backend)
from benchmarks import measure
from benchmarks.overhead import StillBatches
from towers import build, config
from towers.data.augment import Augment
from towers.data.batches import TrainBatches
from towers.data.sources import Source
from towers.parallel import devices
from towers.parallel.strategy import Strategy

# Steps of a new stream that do not count: until then it is filled for the first time.
FILLING_STEPS = 8

NUM_JPEGS, JPEG_SIZE = 256, 160


class Waiting:
    """A stage that takes its time in each call, and no processor.

    Args:
        secs: how long a call takes.
        one_at_a_time: whether calls are served one after the other, as they come.
    """

    def __init__(self, secs: float, one_at_a_time: bool = True):
        self._secs, self._one_at_a_time = secs, one_at_a_time
        self._free_at, self._lock = 0.0, threading.Lock()

    def before(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor, after the wait."""

        def wait():
            with self._lock:
                now = time.monotonic()
                begun = max(now, self._free_at) if self._one_at_a_time else now
                self._free_at = done = begun + self._secs
            time.sleep(done - now)
            return np.int32(0)

        with tf.control_dependencies([tf.numpy_function(wait, [], tf.int32)]):
            return tf.identity(tensor)


class WaitingSource:
    """A source whose reads wait first."""

    def __init__(self, source: Source, stage: Waiting):
        self.num_examples = source.num_examples
        self.image_shape = source.image_shape
        self._source, self._stage = source, stage

    def read(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self._source.read(self._stage.before(indices))


class JpegSource:
    """Images of noise that lie in memory as JPEG files, larger than they are read."""

    def __init__(self, source: Source):
        self.num_examples = source.num_examples
        self.image_shape = source.image_shape
        self._source = source
        rng = np.random.default_rng(0)
        tiles = rng.integers(0, 256, [NUM_JPEGS, 8, 8, 3], np.uint8)
        repeats = JPEG_SIZE // 8
        images = tiles.repeat(repeats, axis=1).repeat(repeats, axis=2)
        self._files = tf.stack([tf.io.encode_jpeg(image) for image in images])

    def read(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        height, width, channels = self.image_shape

        def decode(file):
            image = tf.io.decode_jpeg(file, channels=channels)
            return tf.image.resize(image, [height, width], method="area")

        images = tf.map_fn(
            decode,
            tf.gather(self._files, indices % NUM_JPEGS),
            fn_output_signature=tf.TensorSpec(self.image_shape, tf.float32),
        )
        return tf.cast(images, tf.uint8), self._source.read(indices)[1]


def waiting_augment(augment: Augment, stage: Waiting) -> Augment:
    """An augmentation that waits first."""

    def train(images, draw):
        return augment.train(stage.before(images), draw)

    return dataclasses.replace(augment, train=train)


@dataclasses.dataclass(frozen=True)
class Row:
    """What is measured: batches, and how long their stages wait in each step."""

    batches: TrainBatches | StillBatches
    wait_secs: float = 0.0


def create_rows(batches: TrainBatches, compute_secs: float) -> dict[str, Row]:
    """Everything but `compute` itself."""

    def reading(secs, **options):
        source = WaitingSource(batches.source, Waiting(secs, **options))
        return dataclasses.replace(batches, source=source)

    def processing(secs, batches=batches):
        augment = waiting_augment(batches.augment, Waiting(secs))
        return dataclasses.replace(batches, augment=augment)

    rows = {"as it is": Row(batches)}
    for times in (1, 2, 4):
        secs = times * compute_secs
        rows[f"reading {times}"] = Row(reading(secs), secs)
    for times in (1, 2):
        secs = times * compute_secs
        rows[f"processing {times}"] = Row(processing(secs), secs)
        rows[f"both {times}"] = Row(processing(secs, reading(secs)), secs)
    secs = 2 * compute_secs
    rows["reading 2, together"] = Row(reading(secs, one_at_a_time=False), secs)
    decoding = dataclasses.replace(batches, source=JpegSource(batches.source))
    return rows | {"decoding": Row(decoding)}


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one step on average: seconds by the wall clock, of processor time, and those
    of waiting for the batch."""

    wall_secs: float
    processor_secs: float
    wait_secs: float = 0.0


@contextlib.contextmanager
def measured(num_steps: int, results: list[Measured]) -> Iterator[list[float]]:
    """Measures its body; what the body puts into the list is the time of waiting."""
    waited, started, used = [], time.perf_counter(), time.process_time()
    yield waited
    wall, processor = time.perf_counter() - started, time.process_time() - used
    results.append(
        Measured(wall / num_steps, processor / num_steps, sum(waited) / num_steps)
    )


def training(
    strategy: Strategy, num_steps: int, results: list[Measured]
) -> Callable[[], None]:
    """A function that trains for some steps on a new stream and notes their cost."""
    state = strategy.state()

    def run():
        strategy.load(state)
        strategy.train(FILLING_STEPS)
        with measured(num_steps, results) as waited:
            waited.append(strategy.train(num_steps)["input_wait_secs"])
        strategy.load(state)  # the stream ends, and takes nothing from the next thing

    return run


def drawing(
    batches: TrainBatches, num_steps: int, results: list[Measured]
) -> Callable[[], None]:
    """A function that draws batches and does nothing with them."""

    def run():
        stream = iter(batches.stream(0))
        for _ in range(FILLING_STEPS):
            next(stream)
        with measured(num_steps, results):
            for _ in range(num_steps):
                next(stream)

    return run


def median(results: list[Measured], field: str) -> float:
    return statistics.median(getattr(result, field) for result in results)


def spread(values: list[float]) -> str:
    return " ".join(f"{x:.3f}" for x in np.percentile(values, (0, 50, 100)))


def print_training(
    results: dict[str, list[Measured]], waits: dict[str, float], batch_size: int
) -> None:
    """The table of the steps.

    Args:
        results: per thing, a result per round; "compute" among them.
        waits: per thing, seconds that its slowest stage waits in a step.
        batch_size: images of a step.
    """
    print(
        "| stages | images/s, median | step / slowest stage (min, median, max) "
        "| step / sum of stages | input wait, percent | cores | processor time / "
        "compute |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, found in results.items():
        alone = [result.wall_secs for result in results["compute"]]
        stages = 2 if name.startswith("both") else 1
        wall = np.array([result.wall_secs for result in found])
        slowest = np.maximum(alone, waits[name])
        total = np.add(alone, stages * waits[name])
        shares = [100 * r.wait_secs / r.wall_secs for r in found]
        cores = median(found, "processor_secs") / median(found, "wall_secs")
        processor = [
            result.processor_secs / other.processor_secs
            for result, other in zip(found, results["compute"], strict=True)
        ]
        print(
            f"| {name} | {batch_size / statistics.median(wall):.0f} "
            f"| {spread(wall / slowest)} | {np.median(wall / total):.3f} "
            f"| {statistics.median(shares):.1f} | {cores:.2f} "
            f"| {statistics.median(processor):.3f} |"
        )


def print_drawing(
    results: dict[str, list[Measured]], compute: list[Measured], batch_size: int
) -> None:
    """The table of what the stages take by themselves."""
    print("\n| drawn without training | images/s | cores | processor time / compute |")
    print("| --- | --- | --- | --- |")
    for name, found in results.items():
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
    parser.add_argument("--steps", type=int, default=20, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    chosen = devices.configure("auto", 1)
    settings = config.Config(
        dataset="cifar10" if options.data_dir else "synthetic",
        data_dir=options.data_dir,
        batch_size=options.batch_size,
        num_epochs=1000.0,
    )
    parts = build.build(settings)
    results = collections.defaultdict(list)
    drawn = collections.defaultdict(list)
    rates = [measure.matrix_rate()]

    def train_on(name, batches):
        parts_of_row = dataclasses.replace(parts, train_batches=batches)
        strategy = build.create_strategy(settings, parts_of_row, chosen)
        return training(strategy, options.steps, results[name])

    still = StillBatches(parts.train_batches(tf.constant(0, tf.int64)))
    compute = train_on("compute", still)
    for _ in range(4):  # the first one traces
        compute()
    compute_secs = median(results["compute"][1:], "wall_secs")

    rows = create_rows(parts.train_batches, compute_secs)
    things = {"compute": compute}
    things |= {name: train_on(name, row.batches) for name, row in rows.items()}
    alone = {"augmented": rows["as it is"], "decoded, augmented": rows["decoding"]}
    things |= {
        name: drawing(row.batches, options.steps, drawn[name])
        for name, row in alone.items()
    }
    measure.in_turn(things, options.rounds)
    rates.append(measure.matrix_rate())

    def counted(found):
        return {name: values[-options.rounds :] for name, values in found.items()}

    print(measure.report_head("Overlap of reading, processing and computing"))
    print(
        f"cnn at 24x24, float32, batch {options.batch_size}, {chosen.kind}; "
        f"{options.rounds} rounds of {options.steps} steps, {FILLING_STEPS} before "
        f"each and one round more to warm up; a stage that waits 1 waits "
        f"{1000 * compute_secs:.0f} ms; matrix rate {rates[0] / 1e9:.0f} GFLOP/s "
        f"before and {rates[1] / 1e9:.0f} after\n"
    )
    waits = {"compute": 0.0} | {name: row.wait_secs for name, row in rows.items()}
    print_training(counted(results), waits, options.batch_size)
    print_drawing(counted(drawn), counted(results)["compute"], options.batch_size)


if __name__ == "__main__":
    main()
