"""Small images in tar shards and Parquet files: towers next to other readers.

    python -m benchmarks.containers FOLDER --peers=PYTHON

Makes FOLDER/tar and FOLDER/parquet, each with SHARDS files of JPEG images of 64x64
pixels, where they are missing. Each reader then decodes and shuffles batches of 256 in
a process of its own, in turn, several rounds: seconds to the first batch after the
imports, in the first round with no index or cache; images/s for some seconds after it;
microseconds of the processor for an image, which other work on the machine changes
less; of ours microseconds of the interpreter's lock for an image, which a thread that
only counts loses; megabytes at the peak, without the pages of files. PYTHON is the
interpreter of an environment with torch, webdataset and datasets; without it towers
alone is measured.
"""

import argparse
import contextlib
import functools
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow
from PIL import Image
from pyarrow import parquet

from benchmarks import measure
from benchmarks.with_torch import containers as peers
from towers import data
from towers.data.augment.augmentation import none
from towers.data.batches import TrainBatches
from towers.data.orders import block_order

SHARDS, CLASSES = 100, 10
DIFFERENT = 4000  # images, which are repeated
OURS = {"towers, tar": ("webdataset", "tar"), "towers, Parquet": ("parquet", "parquet")}
COLUMNS = (
    "reader | first batch after, s: first round | later | images/s, median (min, max) "
    "| us of the processor an image, median | us of the lock | MB at the peak"
)


@functools.cache
def draw() -> list[bytes]:
    """DIFFERENT JPEG images of 64x64 pixels."""
    rng, images = np.random.default_rng(0), []
    for _ in range(DIFFERENT):
        file, small = io.BytesIO(), rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((64, 64), Image.Resampling.BICUBIC)
        image.save(file, "JPEG", quality=85)
        images.append(file.getvalue())
    return images


def write_tar(folder: str, num_images: int, shards: int = SHARDS) -> None:
    """Tar files with images and labels as members."""
    images = draw()
    os.makedirs(folder)
    for shard, numbers in enumerate(np.array_split(np.arange(num_images), shards)):
        with tarfile.open(f"{folder}/train-{shard:06}.tar", "w") as archive:
            for number in numbers.tolist():
                label = str(number % CLASSES).encode()
                for ending, content in (
                    ("jpg", images[number % DIFFERENT]),
                    ("cls", label),
                ):
                    member = tarfile.TarInfo(f"{number:08}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def write_parquet(folder: str, num_images: int, shards: int = SHARDS) -> None:
    """The same images in Parquet files of `datasets`."""
    images = draw()
    names = list(map(str, range(CLASSES)))
    features = {
        "image": {"_type": "Image"},
        "label": {"_type": "ClassLabel", "names": names},
    }
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    os.makedirs(folder)
    for shard, numbers in enumerate(np.array_split(np.arange(num_images), shards)):
        rows = [{"bytes": images[x % DIFFERENT], "path": None} for x in numbers]
        table = pyarrow.table(
            {"image": pyarrow.array(rows, kind), "label": numbers % CLASSES}
        )
        path = f"{folder}/train-{shard:05}-of-{shards:05}.parquet"
        table = table.replace_schema_metadata(about)
        parquet.write_table(table, path, row_group_size=1000)


def read(name: str, folder: str, secs: float, buffer_mb: float) -> dict[str, float]:
    """What `peers.measure` gives of a reader of OURS."""
    begin = time.perf_counter()
    dataset, place = OURS[name]
    options = {"image_size": 64, "image_cache_mb": 0.0, "shuffle_buffer_mb": buffer_mb}
    data_set = data.load(dataset, f"{folder}/{place}", **options)
    augment = none(data_set.image_shape, data_set.mean, data_set.std)
    order = block_order(data_set.train, buffer_mb)
    batches = TrainBatches(data_set.train, augment, 0, peers.BATCH, order=order)
    stream = iter(batches.stored_stream(0))
    row = peers.measure(stream, secs, begin, lambda batch: len(batch["labels"]))
    return row | {"lock_us": lock_us(stream, secs)}


def lock_us(stream: Iterator, secs: float) -> float:
    """Microseconds that a counting thread loses for each image while others read."""
    counted, is_over = [0.0], threading.Event()

    def count():
        with contextlib.suppress(PermissionError):  # it loses no core to the others
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        while not is_over.is_set():
            for _ in range(1000):
                pass
            counted[0] = time.thread_time()  # all of it with the lock

    def share(work):
        begin, before = time.perf_counter(), counted[0]
        work()
        length = time.perf_counter() - begin
        return (counted[0] - before) / length, length

    def read_on():
        end = time.perf_counter() + secs
        while time.perf_counter() < end:
            num_images[0] += len(next(stream)["labels"])

    time.sleep(1)  # until all that is read ahead is ready
    sys.setswitchinterval(1e-3)
    threading.Thread(target=count, daemon=True).start()
    time.sleep(0.1)
    num_images = [0]
    alone, _ = share(functools.partial(time.sleep, 1))
    beside, length = share(read_on)
    is_over.set()
    return 1e6 * (alone - beside) * length / num_images[0]


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--peers", default="", help="interpreter")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--secs", type=float, default=10.0, help="of a round")
    parser.add_argument("--buffer_mb", type=float, default=1000.0)
    parser.add_argument("--reader", default="", help="one of ours, in this process")
    return parser.parse_args(argv)


def main() -> None:
    options = parse_options()
    folder = os.path.abspath(options.folder)
    if options.reader:
        row = read(options.reader, folder, options.secs, options.buffer_mb)
        print(json.dumps(row), flush=True)
        os._exit(0)  # batches are being read ahead
    if not os.path.isdir(f"{folder}/tar"):
        write_tar(f"{folder}/tar", options.images)
        write_parquet(f"{folder}/parquet", options.images)
    for cache in ("cache", "datasets_cache"):
        shutil.rmtree(f"{folder}/{cache}", ignore_errors=True)
    again = [sys.executable, "-m", "benchmarks.containers", folder]
    again += [f"--secs={options.secs}", f"--buffer_mb={options.buffer_mb}"]
    commands = {name: [*again, f"--reader={name}"] for name in OURS}
    if options.peers:
        program = [options.peers, peers.__file__]
        for name in peers.READERS:
            commands[name] = [*program, name, folder, str(options.secs)]
    print(measure.report_head("Containers of images"))
    print(
        f"{options.images:,} images, {options.rounds} rounds of {options.secs:g} s\n\n"
        f"{measure.table_head(COLUMNS)}",
        flush=True,
    )
    rows = {name: [] for name in commands}
    environ = os.environ | {"TOWERS_CACHE_DIR": f"{folder}/cache"}
    for _ in range(options.rounds):
        for name, command in commands.items():
            done = subprocess.run(
                command, env=environ, stdout=subprocess.PIPE, text=True, check=True
            )
            rows[name].append(json.loads(done.stdout.splitlines()[-1]))
    for name, measured in rows.items():
        speeds = [row["images_per_sec"] for row in measured]
        later = [f"{row['first_secs']:.1f}" for row in measured[1:]]
        locks = [row["lock_us"] for row in measured if "lock_us" in row]
        print(
            measure.table_row(
                name,
                f"{measured[0]['first_secs']:.1f}",
                ", ".join(later),
                f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f}, "
                f"{max(speeds):,.0f})",
                f"{statistics.median(row['cpu_us'] for row in measured):.0f}",
                f"{statistics.median(locks):.1f}" if locks else "",
                f"{max(row['peak_mb'] for row in measured):,.0f}",
            ),
            flush=True,
        )


if __name__ == "__main__":
    measure.run(main)
