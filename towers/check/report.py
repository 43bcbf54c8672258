"""Inspection of every image of a data set before training."""

import dataclasses
import hashlib
import io
import itertools
import math
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from PIL import Image, PngImagePlugin

from towers import console, data, store
from towers.data.classes import images_of_classes
from towers.data.files.cached import progress, read_in_batches
from towers.data.files.image_files import Survey
from towers.data.pixel_format import PixelFormat
from towers.data.sources import DataSet, Source, channel_counts, location_of, moments
from towers.errors import ConfigError, DataError, refuse_url
from towers.messages import shown

# The picture: maximum number of classes and of images per class, and pixels of the
# longer side of an image; larger ones would take gigabytes.
GRID_CLASSES = 20
GRID_IMAGES = 10
CELL_PIXELS = 48
MAX_CELL_PIXELS = 256
GAP_PIXELS = 2

BATCH_SIZE = 100
# Minimum share of the photos' area that is cut away for a line about it.
MIN_CUT = 0.05
# Maximum number of stored sizes that are listed one by one.
LISTED_SIZES = 5

# Thumbnails of SIDE x SIDE pixels are standardized to a mean of 0 and a standard
# deviation of UNIT. Images are similar if the root mean square of the difference is at
# most MAX_DIFFERENT * UNIT: a copy that was shrunk, or saved again, differs less.
SIDE, UNIT, MAX_DIFFERENT = 8, 32, 0.1
MIN_CONTRAST = 2.0  # standard deviation of 0..255; flatter images are never similar
# Hashes are sorted, rotated by each number of bytes; each is compared with the next.
ROTATIONS, NEIGHBORS = (0, 2, 4, 6), 3
MAX_NAMED = 3


class Prints(NamedTuple):
    """Fingerprints of n images: labels, -1 without; digests; gray thumbnails."""

    labels: np.ndarray
    digests: np.ndarray
    thumbnails: np.ndarray


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of one split.

    Attributes:
        labels: readable images of each class, int64 [num_classes].
        values: counts of each value in each channel, see `channel_counts`.
        samples: the first images of each class, large ones with fewer pixels.
        prints: the fingerprints of all images.
    """

    labels: np.ndarray
    values: np.ndarray
    samples: dict[int, list[np.ndarray]]
    prints: Prints


def check(
    name: str,
    data_dir: str = "",
    *,
    grid_path: str = "",
    say: Callable[[str], None] = console.line,
    **options: Any,
) -> None:
    """Read every image once, report on the data set, and draw some into a PNG file.

    The file is `grid_path`, by default named after the data set; `say` gets each line;
    `options` are of `data.load`. Memory is bounded, except for the faults and 76 bytes
    for each image. DataError if images cannot be read, ConfigError if the picture
    cannot be written.
    """
    subject = ascii((name, data_dir and os.path.realpath(data_dir)))
    grid_path = _picture_path(name, data_dir, grid_path, subject)
    survey = Survey()
    # Nothing is kept, so that every image is decoded, and its size counted, once.
    data_set = data.load(name, data_dir, image_cache_mb=0.0, survey=survey, **options)
    survey.sizes.clear()
    sources = data_set.sources
    total = sum(source.num_examples for source in sources.values())
    count_read = progress(total, say)
    num_classes, pixels = len(data_set.class_names), data_set.pixels
    statistics = {
        split: read_through(source, num_classes, count_read, pixels)
        for split, source in sources.items()
    }
    train = statistics["training"]
    _write(grid_path, grid(train, data_set.image_shape), subject)
    for line in report(data_set, statistics, survey, options.get("fit", "auto")):
        say(line)

    def location(split, index):
        return shown(location_of(sources[split], index)) or f"{split} image {index}"

    prints = {name: x.prints for name, x in statistics.items()}
    for heading, text in duplicates(prints, location):
        say(f"{heading:11} {text}")
    say(f"picture     {grid_path}: a row for each of {len(train.samples)} classes")
    count = len(survey.faults) + len(survey.misplaced)
    if count:
        subject = f"{count} of {total + len(survey.misplaced)} images of {name}"
        raise DataError(f"{subject} cannot be used; replace or remove what is named")


def read_through(
    source: Source,
    num_classes: int,
    count_read: Callable[[int], None],
    pixels: PixelFormat,
) -> Statistics:
    """Read every image once; call `count_read` with the size of each batch."""
    counts = np.zeros(num_classes, np.int64)
    values: np.ndarray = np.zeros(1)
    samples: dict[int, list[np.ndarray]]
    samples = {label: [] for label in range(min(num_classes, GRID_CLASSES))}
    step = _pixel_step(source.image_shape)
    prints: list[Prints] = []
    for batch in read_in_batches(source, BATCH_SIZE):
        codes = _codes(batch[1])
        count_read(len(codes))
        prints.append(prints_of(pixels.to_bytes(batch[0]), codes))
        images, labels = (x[codes >= 0] for x in batch)
        is_set = labels.ndim == 2
        if not is_set and (largest := labels.max(initial=0)) >= num_classes:
            expected = f"0 to {num_classes - 1} for {num_classes} classes"
            raise DataError(f"an image has the label {largest}, expected {expected}")
        counts += images_of_classes(labels, num_classes)
        values = values + channel_counts(np.asarray(pixels.scale(images)))
        images = pixels.to_bytes(images)
        for label, examples in samples.items():
            missing = GRID_IMAGES - len(examples)
            # Copies: a view would keep its whole batch in memory.
            chosen = labels[:, label] if is_set else labels == label
            for index in np.flatnonzero(chosen)[:missing]:
                examples.append(images[index, ::step, ::step].copy())
    joined = map(np.concatenate, zip(*prints, strict=True))
    return Statistics(counts, values, samples, Prints(*joined))


def _codes(labels):
    """Return a number for each image, equal for equal labels; -1 if unreadable."""
    if labels.ndim == 1:
        return labels
    codes = np.array([zlib.crc32(row.tobytes()) for row in labels], np.int64)
    return np.where((labels >= 0).all(1), codes, -1)


def prints_of(images: np.ndarray, labels: np.ndarray) -> Prints:
    """Return fingerprints of uint8 [n, height, width, channels]."""
    digests = [hashlib.blake2b(x.tobytes(), digest_size=8).digest() for x in images]
    small = tf.image.resize(images, (SIDE, SIDE), "area").numpy()
    small = small.reshape(len(images), SIDE**2, -1)
    gray = small @ [0.299, 0.587, 0.114] if small.shape[2] == 3 else small.mean(2)
    gray -= gray.mean(1, keepdims=True)
    contrast = gray.std(1, keepdims=True)
    gray = np.where(contrast < MIN_CONTRAST, 0, gray / np.maximum(contrast, 1))
    thumbnails = np.rint(np.clip(UNIT * gray, -127, 127)).astype(np.int8)
    return Prints(labels, np.frombuffer(b"".join(digests), np.uint64), thumbnails)


def duplicates(
    prints: dict[str, Prints], location: Callable[[str, int], str]
) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) on images that are in two splits, or classes."""
    names, sizes = list(prints), [len(x.labels) for x in prints.values()]
    begins = np.cumsum([0, *sizes])
    joined = map(np.concatenate, zip(*prints.values(), strict=True))
    labels, digests, thumbnails = joined
    # The first of identical images, and each of the others.
    _, firsts, groups = np.unique(digests, return_index=True, return_inverse=True)
    identical = np.stack([firsts[groups], np.arange(len(digests))], 1)
    identical = identical[identical[:, 0] < identical[:, 1]]
    similar = _similar(thumbnails)
    similar = similar[~np.isin(similar[:, 1], identical[:, 1])]
    for heading, indices in (("identical", identical), ("similar", similar)):
        pairs = indices[(labels[indices] >= 0).all(1)]
        splits = np.searchsorted(begins, pairs, "right") - 1
        for a, b in itertools.combinations_with_replacement(range(len(names)), 2):
            is_counted = (a != b) | np.diff(labels[pairs]).any(1)
            chosen = pairs[(splits == (a, b)).all(1) & is_counted]
            chosen = chosen[np.unique(chosen[:, 1], return_index=True)[1]]
            if len(chosen):
                examples = ", ".join(
                    f"{location(names[b], j)} is {location(names[a], i)}"
                    for i, j in (chosen[:MAX_NAMED] - begins[[a, b]]).tolist()
                )
                other = names[a] if a != b else "another class"
                count = f"{len(chosen):,} {names[b]} image(s) also in {other}"
                yield heading, f"{count}, such as {examples}"


def _similar(thumbnails):
    """Return pairs of similar images [m, 2], the smaller index first."""
    similar, hashes = [np.zeros((0, 2), int)], np.packbits(thumbnails > 0, 1)
    for rotation, distance in itertools.product(ROTATIONS, range(1, NEIGHBORS + 1)):
        keys = np.roll(hashes, rotation, 1).copy().view(np.uint64)[:, 0]
        order = np.argsort(keys)
        for pairs in np.array_split(
            np.stack([order[:-distance], order[distance:]], 1), 1 + len(order) // 50_000
        ):
            one, other = np.moveaxis(thumbnails[pairs].astype(np.float32), 1, 0)
            differences = ((one - other) ** 2).mean(1) / UNIT**2
            is_similar = (differences <= MAX_DIFFERENT**2) & one.any(1) & other.any(1)
            similar.append(pairs[is_similar])
    return np.unique(np.sort(np.concatenate(similar), 1), axis=0)


def report(
    data_set: DataSet, statistics: dict[str, Statistics], survey: Survey, fit: str
) -> list[str]:
    """Return the lines of the report, except for the picture's."""
    train = statistics["training"]
    height, width, channels = data_set.image_shape
    images = {n: (x.prints.labels >= 0).sum() for n, x in statistics.items()}
    lines = [
        ("data set", f"{data_set.name}, {data_set.origin}"),
        *itertools.islice(data_set.inventory.lines(data_set), 1, None),
        ("images", ", ".join(f"{x:,} {n}" for n, x in images.items())),
        ("read as", f"{height}x{width} (height x width), {channels} channel(s)"),
    ]
    if survey.sizes:
        lines.append(("stored as", _sizes(survey.sizes)))
        cut = cut_away(survey.sizes, (height, width))
        if fit in ("auto", "crop") and cut > MIN_CUT:
            text = f"the crop cuts away {cut:.0%} of the photos' area on average; "
            lines.append(("fit", text + "if objects are at the edges, use --fit=pad"))
    if train.values.any():
        pairs = zip(moments(train.values), (data_set.mean, data_set.std), strict=True)
        for name, (values, used) in zip(("mean", "std"), pairs, strict=True):
            line = _numbers(values)
            if _numbers(used) != line:
                line += f" (training uses a sample: {_numbers(used)})"
            lines.append((name, line))
    names = ", ".join(statistics)
    lines.append(("classes", f"{len(data_set.class_names)}: {names} images"))
    longest = max(map(len, data_set.class_names))
    for label, name in enumerate(data_set.class_names):
        counts = (f"{x.labels[label]:8,}" for x in statistics.values())
        lines.append(("", f"{name:{longest}} {' '.join(counts)}"))
    lines += [("fault", f"{shown(x)}: {y}") for x, y in survey.bad_images.items()]
    return [f"{name:11} {text}" for name, text in lines]


def cut_away(sizes: Mapping[tuple[int, int], int], size: tuple[int, int]) -> float:
    """Return the mean share of the area of images that a center crop cuts away.

    `sizes` counts images by (height, width); `size` has the proportions of the crop.
    """
    rest = 0.0
    for stored, count in sizes.items():
        scale = min(x / y for x, y in zip(stored, size, strict=True))
        rest += count * scale**2 * math.prod(size) / math.prod(stored)
    return 1 - rest / sum(sizes.values())


def _sizes(sizes) -> str:
    if len(sizes) <= LISTED_SIZES:
        return ", ".join(f"{h}x{w} ({n:,})" for (h, w), n in sizes.most_common())
    heights, widths = zip(*sizes, strict=True)
    values = {"heights": heights, "widths": widths, "shorter sides": [*map(min, sizes)]}
    ranges = (f"{name} {min(x)} to {max(x)}" for name, x in values.items())
    return f"{len(sizes)} sizes: {', '.join(ranges)}"


def _numbers(values):
    return " ".join(f"{value:.2f}" for value in values)


def grid(statistics: Statistics, image_shape: tuple[int, int, int]) -> np.ndarray:
    """Return the picture, uint8 [height, width, 3]: a row for each class."""
    step = _pixel_step(image_shape)
    height, width = (-(-pixels // step) for pixels in image_shape[:2])
    factor = -(-CELL_PIXELS // max(height, width))
    cell = np.array([height, width]) * factor + GAP_PIXELS
    rows, columns = len(statistics.samples), GRID_IMAGES
    picture = np.full((*(cell * [rows, columns] + GAP_PIXELS), 3), 128, np.uint8)
    for row, images in enumerate(statistics.samples.values()):
        for column, image in enumerate(images):
            top, left = cell * [row, column] + GAP_PIXELS
            large = image.repeat(factor, 0).repeat(factor, 1)
            # A gray image is copied to all three channels.
            large = large[..., : 3 if image.shape[-1] >= 3 else 1]
            picture[top : top + len(large), left : left + large.shape[1]] = large
    return picture


def _pixel_step(image_shape):
    """Return the distance between the pixels of an image that are drawn."""
    return -(-max(image_shape[:2]) // MAX_CELL_PIXELS)


def _picture_path(name, data_dir, grid_path, subject):
    """Return the path of the picture; ConfigError if it must not be written."""
    refuse_url("grid", grid_path)
    path = os.path.expanduser(grid_path) or _default_path(name, data_dir, subject)
    path = os.path.abspath(path)
    folder = os.path.realpath(os.path.expanduser(data_dir or "data"))
    is_inside = pathlib.Path(os.path.realpath(path)).is_relative_to(folder)
    fault = ""
    if is_inside and (name == "image_folder" or (grid_path and data_dir)):
        fault = "is among the images of --data_dir; choose another"
    elif os.path.lexists(path) and not _is_picture(path):
        fault = "another program wrote what is there; choose another"
    elif not os.access(os.path.dirname(path), os.W_OK):
        fault = "cannot be written to that folder"
    if fault:
        raise ConfigError(f"--grid={path}: {fault}")
    return path


def _default_path(name, data_dir, subject):
    """Return the first NAME-FOLDER[-2].png that is free or of this data set."""
    parts = name, os.path.basename(data_dir.rstrip("/"))
    stem = re.sub(r"[^\w.-]+", "-", "-".join(filter(None, parts)))
    names = (f"{stem}-{i}.png" if i > 1 else f"{stem}.png" for i in itertools.count(1))
    return next(x for x in names if not os.path.lexists(x) or _is_picture(x, subject))


def _write(path, picture, subject):
    content, about = io.BytesIO(), PngImagePlugin.PngInfo()
    about.add_text("Source", f"{__name__} {subject}")
    Image.fromarray(picture).save(content, "PNG", pnginfo=about)
    try:
        store.write_aside(path, content.getvalue())
    except OSError as error:
        why = f"cannot be written: {error.strerror}"
        raise ConfigError(f"--grid={path}: {why}") from error


def _is_picture(path, subject=""):
    """Return whether `_write` wrote a file, if given for this subject."""
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            return picture.info.get("Source", "").startswith(f"{__name__} {subject}")
    except (OSError, Image.DecompressionBombError):
        return False
