"""Size, pixel format, range and moments of images, inferred from samples."""

import dataclasses

import numpy as np

from towers import console
from towers.config.list_options import height_and_width
from towers.data.files.cached import are_read, read_in_batches
from towers.data.files.image import inspect
from towers.data.files.image_files import ImageFiles, ImageOptions, Survey, refuse
from towers.data.inventory import Inventory
from towers.data.pixel_format import PERCENTILES, PHOTO, PixelFormat
from towers.data.sources import Source, blocks_of, channel_counts, moments
from towers.errors import DataError
from towers.messages import shown

NUM_COMPARED = 256  # number of images whose stored sizes are compared
# Number of training images, drawn with a fixed seed, for mean and standard deviation.
# The error of a mean is about 1 of 255; the means of images differ by 50.
SAMPLE = 5000
# A warning is given if this share of the sample spans less than FLAT_RANGE of 255.
FLAT_RANGE, FLAT_SHARE = 16, 0.1
NUM_BLOCKS = 16  # number of blocks that are read for a sample
# Numbers of training images, and of their pixels, for the range of value_range=auto.
RANGE_SAMPLE, RANGE_PIXELS = 500, 1_000_000


def settle_format(
    files: ImageFiles, channels: int, options: ImageOptions, inventory: Inventory
) -> tuple[ImageOptions, tuple[int, int, int]]:
    """Return options and the shape to read images in, and record what is inferred.

    The size is `image_size`, or that of all compared images, or else `default_size`.
    `options.pixels` is the format of the compared images if it is not known; gray and
    colors of 8 and 16 bits together are read as 8 bits.
    """
    size, survey = options.image_size, options.survey
    if options.pixels and options.pixels.bands != 3:
        channels = options.pixels.bands
    if size and options.pixels:
        return options, (*height_and_width(size), channels)
    sizes, kinds, num_frames = set(), dict[tuple[str, int], list[str]](), 0
    # A full pass detects them again.
    survey = survey and Survey(skips=survey.skips)
    indices, limit = _sample(files, len(files), NUM_COMPARED), options.max_image_pixels
    for index in indices.tolist():
        try:
            content, _ = files.read(index)
            stored, kind, has_frames = inspect(content, limit, not size)
        except (OSError, ValueError, MemoryError) as error:
            if not size:
                refuse(files, index, error, survey)
            continue
        num_frames += has_frames
        sizes.add(stored)
        kinds.setdefault(kind, []).append(files.location(index))
    if not sizes and not size:
        faults = survey.summary() if survey else ""
        raise DataError(f"no image can be read: {faults}")
    if num_frames:
        text = f"the first is read, {num_frames:,} of {len(indices):,} images have more"
        inventory.infer("frames", text)
    if options.pixels is None:
        dtype, bands = _common_kind(kinds)
        channels = channels if bands == 3 else bands
        if len(kinds) > 1:
            deep = len(kinds["uint16", 3])
            text = f"of {deep:,} of {len(indices):,} images, with 16, the upper ones"
            inventory.infer("pixels", f"8 bits; {text}")
        pixels = PixelFormat(dtype, bands).with_range(options.value_range)
        options = dataclasses.replace(options, pixels=pixels)
    if size or len(sizes) == 1:
        shape = height_and_width(size) if size else sizes.pop()
        return options, (*shape, channels)
    size = options.default_size
    about = f"sizes differ: resized to {size}x{size}"
    inventory.infer("sizes", f"{about}, --image_size=N for another size")
    return dataclasses.replace(options, image_size=size), (size, size, channels)


def _common_kind(kinds):
    """Return the dtype and bands of (dtype, bands) -> images; DataError if they differ.

    Of gray and colors 8 and 16 bits do not differ, and are read as 8.
    """
    if len(kinds) < 2 or kinds.keys() == {("uint8", 3), ("uint16", 3)}:
        return min(kinds, default=("uint8", 3), key=lambda kind: kind[0] != "uint8")
    texts = (
        f"{len(images):,} of {bands} band(s) of {dtype} such as {shown(images[0], 60)}"
        for (dtype, bands), images in kinds.items()
    )
    why = f"the images have several kinds of pixels: {', '.join(texts)}"
    raise DataError(f"{why}; convert all to one kind, or keep them in other folders")


def settle_range(
    source: Source, options: ImageOptions, is_known: bool, inventory: Inventory
) -> PixelFormat:
    """Return the pixel format, with its range by value_range, and record it."""
    pixels = options.pixels or PHOTO
    if is_known or options.value_range != "auto" or pixels.dtype == "uint8":
        if not pixels.is_photo:
            inventory.infer("pixels", str(pixels))
        return pixels
    values = []
    indices = _sample(source, source.num_examples, RANGE_SAMPLE)
    for images in _read_sample(source, indices, options):
        flat = images.reshape(-1, images.shape[-1])
        values.append(flat[:: 1 + len(flat) * len(indices) // (50 * RANGE_PIXELS)])
    pixels = pixels.with_percentiles(np.concatenate(values))
    low, high = PERCENTILES
    note = f"{pixels}, percentiles {low} and {high} of training images"
    inventory.infer("pixels", f"{note}; --value_range=LOW:HIGH for others")
    return pixels


def _sample(files, num_files, count):
    """Return indices of at most about `count` images, always the same.

    If they are read in blocks, they are from NUM_BLOCKS at equal distances.
    """
    if num_files <= count:
        return np.arange(num_files)
    if (blocks := blocks_of(files)) is None:
        rng = np.random.Generator(np.random.Philox(0))
        return np.sort(rng.choice(num_files, count, replace=False))
    chosen = np.unique(blocks)
    positions = np.linspace(0, len(chosen) - 1, min(len(chosen), NUM_BLOCKS))
    indices = np.flatnonzero(np.isin(blocks, chosen[positions.astype(int)]))
    return indices[:: -(-len(indices) // count)]


def _read_sample(source, indices, options):
    """Yield batches without unreadable images; DataError if none is left."""
    num_read = 0
    for images, labels in read_in_batches(source, 50, indices):
        is_read = are_read(labels)
        num_read += is_read.sum()
        yield images[is_read]
    if not num_read:
        faults = options.survey.summary() if options.survey else ""
        raise DataError(f"no training image can be read: {faults}")


def sampled_moments(
    source: Source, options: ImageOptions, pixels: PixelFormat = PHOTO
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of at most SAMPLE images."""
    indices, num_flat = _sample(source, source.num_examples, SAMPLE), 0
    counts: np.ndarray = np.zeros(1)
    for stored in _read_sample(source, indices, options):
        images = np.asarray(pixels.scale(stored))
        counts = counts + channel_counts(images)
        spans = images.max((1, 2, 3)) - images.min((1, 2, 3))  # not below 0
        num_flat += int(np.sum(spans < FLAT_RANGE))
    if num_flat >= FLAT_SHARE * len(indices):
        what = f"{num_flat:,} of {len(indices):,} training images are constant"
        console.warn(f"{what}, or their values span less than {FLAT_RANGE} of 255")
    return moments(counts)
