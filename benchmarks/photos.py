"""Photos of 500x375 in JPEG files: how fast several loaders decode them, and whether
that is fast enough for two towers; a part of `python -m benchmarks.input`.

Every loader reads a file, decodes it, resizes the shorter side to 64 with a filter that
widens as the image shrinks, crops the middle and makes batches of uint8, in the same
random order, with nothing kept from one epoch to the next:
- `towers`: the source of `image_folder`, as `TrainBatches.stored_stream` reads it.
- `tf.data`: `tf.io.decode_jpeg` and `tf.image.resize` in a map that `tf.data` tunes.
- `tf.data, reduced`: the same with `ratio=2`.
- `torch`: torchvision's ImageFolder and transforms of Pillow images in a DataLoader
  with a worker for each core, in a Python of its own.
"""

import argparse
import functools
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
from PIL import Image

from benchmarks import measure, torch_photos, trainers
from towers import build, data
from towers.config import Config
from towers.data.augment import none
from towers.data.batches import TrainBatches
from towers.parallel.devices import Devices

WIDTH, HEIGHT, QUALITY, SIZE = 500, 375, 90, 64
NOISE = 8.0
MODEL, TOWERS = "resnet18", 2
# More batches than any loader reads ahead.
READY_STEPS = 20


def create_photos(folder: pathlib.Path, count: int, dataset: dict[str, str]) -> None:
    """`train/CLASS/NAME.jpg`: pictures of a data set, enlarged, with noise, so that a
    file has about as many bytes as one of a camera."""
    source = data.load(dataset["dataset"], dataset.get("data_dir", ""))
    rng = np.random.default_rng(0)
    for number in range(count):
        index = tf.constant([number % source.train.num_examples], tf.int64)
        images, labels = source.train.read(index)
        small = Image.fromarray(images.numpy()[0])
        large = small.resize((WIDTH, WIDTH), Image.Resampling.BICUBIC)
        pixels = np.asarray(large)[:HEIGHT] + rng.normal(0, NOISE, (HEIGHT, WIDTH, 1))
        class_folder = folder / "train" / source.class_names[int(labels[0])]
        class_folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
        image.save(class_folder / f"{number:06}.jpg", quality=QUALITY)


def towers_stream(folder: pathlib.Path, batch_size: int) -> tf.data.Dataset:
    source = data.load(
        "image_folder", str(folder), image_size=SIZE, image_cache_mb=0.0
    ).train
    augment = none(source.image_shape, (0.0,) * 3, (1.0,) * 3)
    return TrainBatches(source, augment, 0, batch_size).stored_stream(0)


def plain_stream(folder: pathlib.Path, batch_size: int, ratio: int) -> tf.data.Dataset:
    """As the documentation of `tf.data` has it."""
    size = [SIZE, round(WIDTH * SIZE / HEIGHT)]

    def decode(path):
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3, ratio=ratio)
        image = tf.image.resize(image, size, antialias=True)
        image = tf.image.resize_with_crop_or_pad(image, SIZE, SIZE)
        return tf.cast(tf.round(image), tf.uint8)

    paths = sorted(map(str, folder.glob("train/*/*.jpg")))
    files = tf.data.Dataset.from_tensor_slices(paths)
    files = files.shuffle(len(paths), seed=0).repeat()
    images = files.map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    return images.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def draw(batches: Iterator, num_steps: int) -> None:
    for _ in range(num_steps):
        next(batches)


def timed(draw_fn: Callable[[int], None], num_steps: int, secs: list[float]) -> None:
    """Notes the seconds of so many batches, after those that lie ready."""
    draw_fn(READY_STEPS)
    started = time.perf_counter()
    draw_fn(num_steps)
    secs.append(time.perf_counter() - started)


def compare_decoding(folder: pathlib.Path, options: argparse.Namespace) -> None:
    """Images a second of each loader, in turn."""
    streams = {
        "towers": towers_stream(folder, options.batch_size),
        "tf.data": plain_stream(folder, options.batch_size, 1),
        "tf.data, reduced": plain_stream(folder, options.batch_size, 2),
    }
    draw_fns = {
        name: functools.partial(draw, iter(stream)) for name, stream in streams.items()
    }
    loader = None
    if options.torch:
        loader = torch_photos.Loader(options.torch, folder, SIZE, options.batch_size)
        draw_fns[f"torch {loader.versions}"] = loader.draw
    secs = {name: [] for name in draw_fns}
    things = {
        name: functools.partial(timed, draw_fn, options.steps, secs[name])
        for name, draw_fn in draw_fns.items()
    }
    measure.in_turn(things, options.rounds)
    secs = {name: all_secs[-options.rounds :] for name, all_secs in secs.items()}
    columns = "loader | images/s, median | over tf.data (min, median, max)"
    print(measure.table_head(columns))
    images = options.steps * options.batch_size
    for name in secs:
        speed = f"{images / statistics.median(secs[name]):,.0f}"
        speedup = measure.ratios(secs, "tf.data", name)
        row = " ".join(f"{x:.3f}" for x in speedup)
        print(measure.table_row(name, speed, row))
    if loader:
        loader.close()


def measure_wait(
    folder: pathlib.Path, options: argparse.Namespace, chosen: Devices
) -> None:
    """The share of the time in which two towers wait for decoded photos."""
    config = Config(
        dataset="image_folder",
        data_dir=str(folder),
        image_size=SIZE,
        image_cache_mb=0.0,
        model=MODEL,
        augment="random_resized_crop",
        batch_size=options.batch_size,
        num_towers=TOWERS,
        num_epochs=1000.0,
    )
    parts = build.build(config)
    trainer = trainers.create_trainer(config, parts, chosen)
    trainer.train(2)
    waits = []

    def run():
        waits.append(trainer.train(options.steps)["input_wait_secs"])

    walls, _ = measure.in_turn({MODEL: run}, options.rounds)
    secs = walls[MODEL]
    percents = [
        100 * wait / wall for wait, wall in zip(waits[-len(secs) :], secs, strict=True)
    ]
    speed = options.steps * options.batch_size / statistics.median(secs)
    print(
        f"\n{TOWERS} towers of {MODEL} at {SIZE}x{SIZE} on the {chosen.kind}, batch "
        f"{options.batch_size}, random_resized_crop: {speed:,.0f} images/s, waiting "
        f"for {measure.spread(percents, 1)} percent of the time (min, median, max)"
    )


def compare(options: argparse.Namespace) -> None:
    """Makes the photos where they are not there, and measures."""
    # Before anything else: TensorFlow makes its devices once.
    chosen = measure.all_devices(options.device, TOWERS, core_per_tower=True)
    folder = pathlib.Path(options.folder)
    if not (folder / "train").is_dir():
        create_photos(folder, options.photos, measure.dataset(options))
    files = list(folder.glob("train/*/*.jpg"))
    mean_bytes = statistics.mean(path.stat().st_size for path in files)
    print(measure.report_head(f"Decoding photos of {WIDTH}x{HEIGHT}"))
    print(
        f"{len(files):,} JPEG files of {mean_bytes / 1000:.0f} kB, quality {QUALITY}, "
        f"read before; batch {options.batch_size}, {options.rounds} rounds of "
        f"{options.steps} batches, one more to warm up; {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}\n"
    )
    for path in files:
        path.read_bytes()
    compare_decoding(folder, options)
    measure_wait(folder, options, chosen)
