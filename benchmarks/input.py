"""The cost of the input: reading, augmenting and feeding a step.

    python -m benchmarks.input --data_dir=DATA

Batches are read, then augmented, then trained on, each stage while the next one is at
work on the batch before. So a step should cost as much as the slowest stage, not as
their sum. In turn in one process, with strategy `towers` and one tower:
- `compute`: on a batch that lies ready.
- `as it is`: on the stream, images from memory, augmented.
- `reading 2`: every read also takes 2 x the time of `compute`, waiting, as for a disk
  that serves one request after the other; `processing 2` and `both 2` likewise.
- `reading 2, together`: reads that may wait at the same time, as on a network.
- `decoding`: every read also decodes JPEG files and scales them down.

First with computing that only waits, as the processor does for a GPU: this shows the
overlap by itself, on any machine. Then with the tutorial's network. Where the processor
computes that, stages that need the processor too cost their time of it; a last table
gives that time: batches that are drawn without training.

    python -m benchmarks.input --data_dir=DATA --folder=ROOT

compares LeNet on CIFAR-10 from the official binary files in DATA, from the same images
in `ROOT/train/CLASS/*.jpg` and `ROOT/test/CLASS/*.jpg`, and from that folder with room
in memory for an eighth of them. Each is set up and trained for its first epoch, in
which a folder's images are decoded, one after the other; then they train in turn, and
last batches are drawn without training. Memory is the growth of the process at its peak
until the end of the first epoch.

    python -m benchmarks.input --photos=20000 --folder=ROOT --torch=PYTHON

compares how fast photos of 500x375 are decoded: by `image_folder`, by plain `tf.data`
and, where PYTHON is a Python that has torch and torchvision, by PyTorch's DataLoader;
then the wait of two towers of ResNet-18 for them. The photos are made in ROOT where it
has no `train/`. See `benchmarks/photos.py`.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import pathlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from benchmarks import measure, photos, trainers
from towers import build
from towers.config import Config
from towers.config import flags as config_flags
from towers.data.batches import TrainBatches
from towers.data.sources import Source

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECIPE, SMALL_CACHE_MB = "cifar10_lenet", 20.0
NUM_JPEGS, JPEG_SIZE = 256, 160
# Steps of a new stream that do not count: until then it is filled for the first time.
FILLING_STEPS = 8


# Stages that wait, as for a disk, or decode, as image files need it.


class Waiting:
    """A stage that takes its time in each call, and no processor.

    Args:
        secs: the time of a call.
        one_at_a_time: calls are served one after the other, as they come.
    """

    def __init__(self, secs: float, one_at_a_time: bool = True):
        self._secs, self._one_at_a_time = secs, one_at_a_time
        self._free_at, self._lock = 0.0, threading.Lock()

    def before(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor, after the wait."""

        def wait():
            with self._lock:
                start = called = time.monotonic()
                if self._one_at_a_time:
                    start = max(start, self._free_at)
                self._free_at = end = start + self._secs
            time.sleep(end - called)
            return np.int32(0)

        with tf.control_dependencies([tf.numpy_function(wait, [], tf.int32)]):
            return tf.identity(tensor)


class WaitingLayer(keras.layers.Layer):
    """A layer whose forward pass waits."""

    def __init__(self, secs: float, **kwargs):
        super().__init__(**kwargs)
        self._stage = Waiting(secs)

    def call(self, x):
        return self._stage.before(x)

    def compute_output_shape(self, input_shape):
        return input_shape


class WaitingSource:
    """A source whose reads wait first."""

    def __init__(self, source: Source, stage: Waiting):
        self.num_examples, self.image_shape = source.num_examples, source.image_shape
        self._source, self._stage = source, stage

    def read(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self._source.read(self._stage.before(indices))


class JpegSource:
    """Images of noise that lie in memory as JPEG files, larger than they are read;
    with the labels of another source."""

    def __init__(self, source: Source):
        self.num_examples, self.image_shape = source.num_examples, source.image_shape
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


def reading_waits(batches: TrainBatches, *wait) -> TrainBatches:
    """The same batches, each read after a wait."""
    source = WaitingSource(batches.source, Waiting(*wait))
    return dataclasses.replace(batches, source=source)


def processing_waits(batches: TrainBatches, *wait) -> TrainBatches:
    """The same batches, each augmented after a wait."""
    stage, augment = Waiting(*wait), batches.augment

    def train(images, draw):
        return augment.train(stage.before(images), draw)

    return dataclasses.replace(
        batches, augment=dataclasses.replace(augment, train=train)
    )


# Overlap of the stages.


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
        draw(stream, FILLING_STEPS)
        with noted(num_steps, costs):
            draw(stream, num_steps)

    return run


def draw(stream: Iterator, num_steps: int) -> None:
    for _ in range(num_steps):
        next(stream)


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


def compare_stages(options: argparse.Namespace) -> None:
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
    parts = build.build(config)
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


# Files of images.


def compare_files(options: argparse.Namespace) -> None:
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
    recipe = config_flags.load_recipe(RECIPE, ROOT / "configs")
    rates, rows, training, drawing = [measure.matrix_rate()], {}, {}, {}
    for name, case in cases.items():
        memory, started = measure.PeakMemory(chosen), time.perf_counter()
        config = dataclasses.replace(recipe, **fields, **case)
        parts = build.build(config)
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
        drawing[name] = functools.partial(draw, stream, options.steps)
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


def main() -> None:
    parser = measure.create_parser(__doc__, steps=40, rounds=3)
    parser.add_argument("--wait_ms", type=float, default=50.0, help="computing")
    parser.add_argument("--folder", default="", help="with train/ and test/")
    parser.add_argument("--towers", type=int, default=2, help="with --folder")
    parser.add_argument("--photos", type=int, default=0, help="made where missing")
    parser.add_argument("--torch", default="", help="Python with torch, with --photos")
    options = parser.parse_args()
    if options.photos:
        if not options.folder:
            parser.error("--photos are made, or read, in --folder")
        return photos.compare(options)
    if options.folder and not options.data_dir:
        parser.error("--folder is compared with --data_dir, the binary files")
    compare_files(options) if options.folder else compare_stages(options)


if __name__ == "__main__":
    measure.run(main)
