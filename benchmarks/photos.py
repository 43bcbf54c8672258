"""Photos of 500x375 in JPEG files: how fast several loaders decode them, and whether
that is fast enough for two towers; a part of `python -m benchmarks.input`.

Every loader reads the files of `train/` in a random order, decodes each, resizes the
shorter side to 64 with a triangular filter that widens as the image shrinks, crops the
middle and makes batches of uint8, with nothing kept from one epoch to the next and as
many files at the same time as there are cores, or more:
- `towers`: the source of `image_folder`, as `TrainBatches.stored_stream` reads it. It
  decodes at a reduced scale where that has twice the pixels that are wanted, here half.
- `tf.data`: `tf.io.decode_jpeg` and `tf.image.resize` in a parallel map.
- `tf.data, half`: the same, decoded at half the scale, as `towers` does.
- `torch`: torchvision's ImageFolder and transforms of Pillow images in a DataLoader
  with a worker for each core, in a Python of its own.
- `torch, half`: the same, decoded at half the scale by Pillow's `draft`.

A loader that is not drawn from reads ahead until its buffers are full, and then waits.
They are filled in the turn of the next loader, whose first batches do not count.
"""

import argparse
import functools
import os
import pathlib
import statistics
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from PIL import Image

from benchmarks import measure, torch_photos, trainers
from towers import build, data
from towers.config import Config
from towers.data.augment import none
from towers.data.batches import TrainBatches
from towers.data.sources import Source
from towers.errors import DataError
from towers.parallel.devices import Devices

WIDTH, HEIGHT, QUALITY, SIZE = 500, 375, 90, 64
NOISE = 8.0
MODEL, TOWERS = "resnet18", 2
# Batches that plain `tf.data` reads ahead. A buffer that tunes itself would grow from
# turn to turn.
PREFETCHED = 2


def create_photos(folder: pathlib.Path, count: int, dataset: dict[str, str]) -> None:
    """`train/CLASS/NAME.jpg` and for testing one photo of each class: pictures of a
    data set, enlarged, with noise, so that a file has about as many bytes as one of a
    camera. What an earlier call left undone is continued."""
    source = data.load(dataset["dataset"], dataset.get("data_dir", ""))
    unfinished = folder / "train.unfinished"
    for number in range(count):
        index = tf.constant([number % source.train.num_examples], tf.int64)
        images, labels = source.train.read(index)
        class_name = source.class_names[int(labels[0])]
        path = unfinished / class_name / f"{number:06}.jpg"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        photo = enlarged(images.numpy()[0], np.random.default_rng(number))
        part = path.with_suffix(".part")
        photo.save(part, "JPEG", quality=QUALITY)
        part.rename(path)
        test_folder = folder / "test" / class_name
        if not test_folder.exists():
            test_folder.mkdir(parents=True)
            photo.save(test_folder / "0.jpg", quality=QUALITY)
    unfinished.rename(folder / "train")


def enlarged(image: np.ndarray, rng: np.random.Generator) -> Image.Image:
    """A photo of WIDTH x HEIGHT from a square image, uint8 [height, width, 3]."""
    large = Image.fromarray(image).resize((WIDTH, WIDTH), Image.Resampling.BICUBIC)
    noise = rng.normal(0, NOISE, (HEIGHT, WIDTH, 1))
    pixels = np.clip(np.asarray(large)[:HEIGHT] + noise, 0, 255)
    return Image.fromarray(pixels.astype(np.uint8))


def load_all(folder: pathlib.Path, num_files: int) -> Source:
    """The source of `train/`.

    Raises:
        DataError: it leaves out some files, as those that are held out for testing.
    """
    source = data.load(
        "image_folder", str(folder), image_size=SIZE, image_cache_mb=0.0
    ).train
    if source.num_examples != num_files:
        raise DataError(
            f"{folder}: image_folder trains on {source.num_examples} of {num_files} "
            "files train/*/*.jpg, and the other loaders on all; put some into test/, "
            "and files of other kinds away"
        )
    return source


def towers_stream(source: Source, batch_size: int) -> tf.data.Dataset:
    augment = none(source.image_shape, (0.0,) * 3, (1.0,) * 3)
    return TrainBatches(source, augment, 0, batch_size).stored_stream(0)


def plain_stream(
    files: list[pathlib.Path], batch_size: int, ratio: int
) -> tf.data.Dataset:
    """As the documentation of `tf.data` has it, but for the fixed numbers."""
    size = [SIZE, round(WIDTH * SIZE / HEIGHT)]

    def decode(path):
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3, ratio=ratio)
        image = tf.image.resize(image, size, antialias=True)
        image = tf.image.resize_with_crop_or_pad(image, SIZE, SIZE)
        return tf.cast(tf.round(image), tf.uint8)

    paths = tf.data.Dataset.from_tensor_slices([str(path) for path in files])
    paths = paths.shuffle(len(files), seed=0).repeat()
    images = paths.map(decode, num_parallel_calls=os.cpu_count())
    return images.batch(batch_size, drop_remainder=True).prefetch(PREFETCHED)


def timed(
    draw_fn: Callable[[int], None],
    options: argparse.Namespace,
    secs: list[float],
) -> None:
    """Notes the seconds of a turn, after the batches that lie ready and more than any
    other loader then still reads ahead."""
    draw_fn(max(20, 6 * os.cpu_count()))
    started = time.perf_counter()
    draw_fn(options.steps)
    secs.append(time.perf_counter() - started)


def compare_decoding(
    folder: pathlib.Path, files: list[pathlib.Path], options: argparse.Namespace
) -> None:
    """Images a second of each loader, in turn."""
    batch_size, loaders = options.batch_size, []
    streams = {
        "towers": towers_stream(load_all(folder, len(files)), batch_size),
        "tf.data": plain_stream(files, batch_size, 1),
        "tf.data, half": plain_stream(files, batch_size, 2),
    }
    draw_fns = {
        name: functools.partial(measure.draw, iter(stream))
        for name, stream in streams.items()
    }
    if options.torch:
        for name, ratio in (("torch", 1), ("torch, half", 2)):
            loader = torch_photos.Loader(
                options.torch, folder / "train", SIZE, batch_size, ratio
            )
            loaders.append(loader)
            draw_fns[name] = loader.draw
        print(f"{loaders[0].versions}\n")
    secs = {name: [] for name in draw_fns}
    things = {
        name: functools.partial(timed, draw_fn, options, secs[name])
        for name, draw_fn in draw_fns.items()
    }
    measure.in_turn(things, options.rounds)
    for loader in loaders:
        loader.close()
    secs = {name: all_secs[-options.rounds :] for name, all_secs in secs.items()}
    columns = (
        "loader | images/s (min, median, max) | over tf.data (min, median, max) | "
        "over tf.data, half (min, median, max)"
    )
    print(measure.table_head(columns))
    images = options.steps * batch_size
    for name in secs:
        speeds = measure.spread([images / x for x in secs[name]], 0)
        ratios = (
            " ".join(f"{x:.3f}" for x in measure.ratios(secs, base, name))
            for base in ("tf.data", "tf.data, half")
        )
        print(measure.table_row(name, speeds, *ratios))


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
    parts = build.build(config, device_kind=chosen.kind)
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
    files = sorted(folder.glob("train/*/*.jpg"))
    mean_bytes = statistics.mean(path.stat().st_size for path in files)
    print(measure.report_head(f"Decoding photos of {WIDTH}x{HEIGHT}"))
    print(
        f"{len(files):,} JPEG files of {mean_bytes / 1000:.0f} kB, read before; batch "
        f"{options.batch_size}, {options.rounds} rounds of {options.steps} batches and "
        f"one to warm up; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    for path in files:
        path.read_bytes()
    compare_decoding(folder, files, options)
    measure_wait(folder, options, chosen)
    print(f"\nLoad of the machine at the end: {os.getloadavg()[0]:.1f}")
