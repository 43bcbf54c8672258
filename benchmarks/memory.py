r"""The memory and time of a training step with `--recompute`, without, and by peers.

    python -m benchmarks.memory --models=resnet50,deit_small --torch=PYTHON \
        --ways="towers;towers, --recompute;fit;torch;torch, checkpoints"

Each in a process of its own, in turn, on a batch that lies ready, SGD with momentum:
- `towers`, `towers, --recompute`: one tower.
- `fit`: `keras.Model.fit` of the network with the layers of Keras and TensorFlow.
- `torch`, `torch, checkpoints`: the network of timm (`deit_small` is its
  `vit_small_patch16_224`), without and with `set_grad_checkpointing`, by a Python that
  has them.

The peak is the most memory that a process has had (VmHWM), its libraries included; the
memory of the steps is the peak less what the process had before the first one, when its
parameters were there. Next to other work on the machine the ratios of processor time
are the steadier.

    python -m benchmarks.memory --images=250000 --data_dir=CIFAR

trains a small network for three steps on this number of images of 32x32 in memory, in
processes that get them in DATA_WAYS, and prints what the peak of each is above the peak
of a run on 1,000 images. CIFAR has the binary files of CIFAR-10. Then it indexes this
number of images in CONTAINERS, and prints bytes an image above those of 1,000 images.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import towers
from benchmarks import containers, measure, peers, trainers
from towers import data as datasets
from towers.build import builder
from towers.config import Config
from towers.parallel import devices

FIT, HELD, INDEXED = "--fit", "--held", "--indexed"
# Numbers of images: of the shortest run, and of CIFAR-10's files for training.
FEW, FILES = 1000, 50_000
# Ways to have images in memory.
DATA_WAYS = ("arrays", "float32", "resident", "tf.data", "fit", "cifar10")
# Data set, number of files, and the function that writes them.
CONTAINERS = (
    ("webdataset", 100, containers.write_tar),
    ("webdataset", 1, containers.write_tar),
    ("parquet", 100, containers.write_parquet),
)


class FitProcess(trainers.ChildProcess):
    """Steps of Keras' `fit`, by this program."""

    def __init__(self, fields: dict, steps: int):
        words = (fields["model"], fields["image_size"], fields["batch_size"], steps)
        command = [sys.executable, "-m", "benchmarks.memory", FIT, *map(str, words)]
        super().__init__(command, os.environ, cwd=trainers.ROOT)

    def __call__(self) -> float:
        self.say("")
        return self.answer()


def serve_fit(model: str, image_size: int, batch_size: int, steps: int) -> None:
    """Takes so many steps for each line of the standard input."""
    import time

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    fields = trainers.STEP_ALONE | {"model": model, "image_size": image_size}
    chosen = devices.configure("cpu", 1)
    parts = builder.build(Config(**fields, batch_size=batch_size))
    batch = trainers.first_batch(parts)
    train = peers.fit(peers.with_stock_layers(parts.model), batch, steps, "none")
    del parts, chosen
    print(measure.process_bytes("VmRSS"), file=answers, flush=True)
    for _ in sys.stdin:
        used = time.process_time()
        train()
        print(time.process_time() - used, file=answers, flush=True)


def create(name: str, fields: dict, options, stack: contextlib.ExitStack):
    """A process, its bytes before the first step, and the call with which it takes the
    steps of a round."""
    if name.startswith("towers"):
        process = trainers.TrainerProcess(fields, "cpu", steps=1, tells_memory=True)
        before = process.answer()
        process.wait()

        def train():
            process.train(options.steps)
            return process.processor[-1]
    elif name == "fit":
        process = train = FitProcess(fields, options.steps)
        before = process.answer()
    else:
        words = [fields[x] for x in ("image_size", "batch_size")]
        words = [peers.torch_name(fields["model"]), *words]
        words += [options.steps, "float32", *["--checkpoint"] * ("," in name)]
        process = train = peers.TorchProcess(options.torch, *words)
        print(f"{process.num_params:,} parameters in {name}", file=sys.stderr)
        before = measure.process_bytes("VmRSS", process.pid)
    stack.enter_context(contextlib.closing(process))
    return process, before, train


def compare(model: str, options) -> None:
    """The rows of a network."""
    fields = trainers.STEP_ALONE | {"model": model, "image_size": options.image_size}
    fields |= {"batch_size": options.batch_size, "device": "cpu"}
    things = {"towers": fields, "towers, --recompute": fields | {"recompute": True}}
    things["fit"] = fields
    things |= {"torch": fields, "torch, checkpoints": fields}
    things = {name: things[name] for name in options.ways}
    seconds = {name: [] for name in things}
    with contextlib.ExitStack() as stack:
        made = {name: create(name, x, options, stack) for name, x in things.items()}
        calls = {
            name: lambda name=name: seconds[name].append(made[name][-1]())
            for name in made
        }
        wall, _ = measure.in_turn(calls, options.rounds)
        peaks = {
            name: measure.process_bytes("VmHWM", process.pid)
            for name, (process, *_) in made.items()
        }
        steps = {name: peaks[name] - before for name, (_, before, _) in made.items()}
    processor = {name: x[1:] for name, x in seconds.items()}  # without the warm-up
    for name in things:
        print(
            measure.table_row(
                model,
                name,
                f"{peaks[name] / 1e6:.0f}",
                f"{peaks[name] / peaks['towers']:.2f}",
                f"{steps[name] / 1e6:.0f}",
                f"{steps[name] / steps['towers']:.2f}",
                f"{statistics.median(wall[name]) / options.steps:.2f}",
                measure.ratios_text(wall, name, "towers"),
                measure.ratios_text(processor, name, "towers"),
            ),
            flush=True,
        )


def hold(way: str, num_images: int, data_dir: str) -> None:
    """Trains on images in memory; prints their bytes and the most of the process."""
    rng = np.random.default_rng(0)
    shape = (num_images, 32, 32, 3)
    images = np.empty(shape, np.float32 if way == "float32" else np.uint8)
    is_made = way not in ("tf.data", "cifar10")
    for first in range(0, num_images if is_made else 0, FEW):
        part = images[first : first + FEW]
        part[:] = rng.integers(0, 256, part.shape, np.uint8)
    labels, nbytes = np.arange(num_images) % 10, images.nbytes
    if way == "fit":
        network = keras.Sequential([keras.Input(shape[1:]), keras.layers.Flatten()])
        network.add(keras.layers.Dense(10))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile("sgd", loss)
        network.fit(images, labels, steps_per_epoch=3, verbose=0)
    else:
        fields = {"model": "cnn", "max_steps": 3, "eval_every_epochs": 0}
        testing = rng.integers(0, 256, (10 * FEW, *shape[1:]), np.uint8)
        testing = testing, np.arange(10 * FEW) % 10
        data: Any = (images, labels), testing
        if way == "tf.data":  # which has no images in memory

            def image_and_label(number):
                seed = tf.stack([0, tf.cast(number, tf.int32)])
                bits = tf.random.stateless_uniform(shape[1:], seed, 0, 256, tf.int32)
                return tf.cast(bits, tf.uint8), number % 10

            dataset = tf.data.Dataset.range(num_images).map(image_and_label)
            data = dataset.batch(128), testing
        if way == "resident":
            fields["input"] = "resident"
        if way == "cifar10":
            data, fields["data_dir"] = None, data_dir
        with tempfile.TemporaryDirectory() as folder:
            workdir = f"{folder}/run"
            towers.train(workdir, Config(**fields), data=data, report=False)
    print(nbytes, measure.process_bytes("VmHWM"))


def compare_data(options) -> None:
    """The table of images in memory."""

    def peak(way, num_images):
        return run_again(HELD, way, num_images, options.data_dir)

    print(measure.table_head("way | MB of images | MB above 1,000 images | ratio"))
    least = {name: peak(name, FEW)[1] for name in ("arrays", "fit")}
    for way in DATA_WAYS:
        num_bytes, most = peak(way, FILES if way == "cifar10" else options.images)
        num_bytes -= FEW * 3072
        more = most - least["fit" if way == "fit" else "arrays"]
        cells = num_bytes / 1e6, more / 1e6, more / num_bytes
        print(measure.table_row(way, *(f"{x:.2f}" for x in cells)), flush=True)


def run_again(*words: object) -> list[int]:
    """The last two numbers that this program prints in a new process."""
    command = [sys.executable, "-m", "benchmarks.memory", *map(str, words)]
    done = subprocess.run(command, cwd=trainers.ROOT, stdout=-1, check=True)
    return [int(x) for x in done.stdout.split()[-2:]]


def index(dataset: str, folder: str) -> None:
    """Indexes a container; prints the most and the last bytes, without files' pages."""
    seen, is_done = [], threading.Event()

    def watch():
        while not is_done.wait(0.01):
            seen.append(measure.process_bytes("RssAnon"))

    watching = threading.Thread(target=watch)
    watching.start()
    data_set = datasets.load(dataset, folder, image_cache_mb=0.0)
    kept = measure.process_bytes("RssAnon")
    is_done.set()
    watching.join()
    print(data_set.train.num_examples, max([*seen, kept]), kept)


def compare_indexes(num_images: int) -> None:
    """The table of containers."""
    print("\n" + measure.table_head("container | files | bytes an image, peak | kept"))
    for dataset, num_files, write in CONTAINERS:
        bytes_used = []
        for count in (FEW, num_images):
            with tempfile.TemporaryDirectory() as folder:
                write(f"{folder}/files", count, num_files)
                bytes_used.append(run_again(INDEXED, dataset, f"{folder}/files"))
        more = np.subtract(*bytes_used[::-1]) / (num_images - FEW)
        cells = [dataset, num_files, *(f"{x:.0f}" for x in more)]
        print(measure.table_row(*cells), flush=True)


def main() -> None:
    parser = measure.create_parser(__doc__, batch_size=32, steps=1, rounds=3)
    parser.add_argument("--models", type=measure.names, default="resnet50,deit_small")
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument(
        "--ways", type=lambda x: x.split(";"), default="towers;towers, --recompute;fit"
    )
    parser.add_argument("--torch", metavar="PYTHON", default="")
    parser.add_argument("--images", type=int, default=0)
    options = parser.parse_args()
    if options.images:
        print(measure.report_head("The memory of images"))
        compare_data(options)
        compare_indexes(options.images)
        return
    print(measure.report_head("The memory of a training step"))
    print(
        f"Batch {options.batch_size} of {options.image_size}x{options.image_size} "
        f"images, float32, one tower on the CPU; {options.rounds} rounds of "
        f"{options.steps} step(s), one more to warm up\n\n"
        + measure.table_head(
            "network | trained by | MB at the peak | / towers | MB of "
            "the steps | / towers | s a step, median | "
            "time / towers (min, median, max) | processor time / towers"
        )
    )
    for model in options.models:
        compare(model, options)


if __name__ == "__main__":
    if FIT in sys.argv:
        serve_fit(sys.argv[2], *map(int, sys.argv[3:]))
    elif HELD in sys.argv:
        hold(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    elif INDEXED in sys.argv:
        index(*sys.argv[2:])
    else:
        measure.run(main)
