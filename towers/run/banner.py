"""The start banner: devices, strategy, data set, network and length of a run."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from towers.config import Config, non_defaults
from towers.config.checks import ignored_options
from towers.data import classes
from towers.data.sources import DataSet
from towers.optim.phases import image_size
from towers.parallel.devices import Devices
from towers.parallel.trainer import Trainer
from towers.run.folder import RunFolder

# With fewer images a tower, a GPU is hardly used.
MANY_IMAGES = 64


def start_banner(
    config: Config,
    folder: RunFolder,
    devices: Devices,
    trainer: Trainer,
    *,
    data: DataSet,
    image_shape: tuple[int, int, int],
    num_examples: int,
    total_steps: int,
    origins: Mapping[str, str],
) -> list[str]:
    """The lines of the banner.

    Args:
        data: as it was loaded.
        image_shape: height, width and channels that the network takes.
        num_examples: training images of an epoch.
        total_steps: of the schedule.
        origins: option -> the layer that set it, see `config.recipes.CommandLine`.
            Others that are not defaults are of the layer "config".
    """
    height, width, channels = image_shape
    batch = f"{config.batch_size} images"
    if config.accumulate_steps > 1:
        batch = f"{config.accumulate_steps} x {batch}"
    lines = [
        ("run folder", folder.path),
        *_options(config, origins),
        ("devices", ", ".join(devices.towers)),
        ("strategy", config.strategy),
        *(("", line) for line in trainer.describe()),
        (
            "data set",
            f"{data.name}: {num_examples:,} training and "
            f"{data.test.num_examples:,} test images, {data.origin}",
        ),
        (
            "network",
            f"{config.model} on {height}x{width}x{channels}, {config.precision}: "
            f"{_num_params(trainer)} parameters",
        ),
        ("batch", f"{batch} a step over all towers"),
        (
            "length",
            f"{total_steps:,} steps, {config.num_epochs:g} epochs of "
            f"{num_examples:,} images",
        ),
    ]
    sizes = {image_size(phase.model): phase.end_step for phase in trainer.phases}
    if len(sizes) > 1:
        *first, _ = (f"{h}x{w} until step {end}" for (h, w), end in sizes.items())
        lines.append(("images", f"{', '.join(first)}, then {height}x{width}"))
    if config.device_memory_mb:
        lines += [
            ("memory", f"{device} {size / 1e6:.1f} MB of variables")
            for device, size in trainer.variable_bytes().items()
        ]
    remarks = [
        *devices.remarks,
        *few_images(config, devices, trainer.sizes),
        *classes.few_images(data),
    ]
    lines += [("note", remark) for remark in remarks]
    warnings = [
        *ignored_options(config),
        *small_crops(config.augment, image_shape, data.image_shape),
        *large_batches(config, num_examples),
    ]
    lines += [("warning", line) for line in warnings]
    return [line for name, text in lines for line in entry(name, text)]


def entry(name: str, text: str) -> list[str]:
    """A name and a text in lines of at most 80 characters, unless a word is longer."""
    return textwrap.wrap(
        f"{name:12} {text}",
        80,
        subsequent_indent=" " * 13,
        break_long_words=False,
        break_on_hyphens=False,
    )


def few_images(config: Config, devices: Devices, images: Sequence[int]) -> list[str]:
    """A line where a tower on each GPU, which nobody asked for, leaves it few images.

    Args:
        images: of a (micro-)batch per tower.
    """
    is_chosen = config.num_towers or config.device_order
    least = min(images)
    if is_chosen or devices.kind == "CPU" or len(images) == 1 or least >= MANY_IMAGES:
        return []
    return [
        f"num_towers=0 takes all {len(devices.towers)} GPUs, so that "
        f"batch_size={config.batch_size} is {least} images a tower, few for a GPU: "
        f"raise --batch_size ({MANY_IMAGES * len(images)} is {MANY_IMAGES} a tower) or "
        "take fewer GPUs with --num_towers"
    ]


def large_batches(config: Config, num_examples: int) -> list[str]:
    """A line where a step takes more images than there are to train on."""
    if config.images_per_step <= num_examples:
        return []
    options = "--batch_size"
    if config.accumulate_steps > 1:
        options += " or --accumulate_steps"
    return [
        f"a step takes {config.images_per_step} images, some of them more than once, "
        f"as there are {num_examples} to train on; lower {options}"
    ]


def small_crops(
    augment: str, image_shape: Sequence[int], stored_shape: Sequence[int]
) -> list[str]:
    """A line where an augmentation leaves less than half of an image.

    Args:
        augment: its name.
        image_shape: height, width, channels of what it gives.
        stored_shape: height, width, channels of the data set's images.
    """
    (height, width, _), (stored_height, stored_width, _) = image_shape, stored_shape
    if 2 * height * width >= stored_height * stored_width:
        return []
    return [
        f"augment={augment} cuts {height}x{width} out of images of "
        f"{stored_height}x{stored_width}, and only this middle part is evaluated; "
        "--augment=pad_crop_flip takes whole images"
    ]


def _num_params(trainer: Trainer) -> str:
    """Number of the network's parameters, and of the ones frozen from the first step
    on."""
    frozen, counts = trainer.phases[0].frozen, [0, 0]
    for variable in trainer.model.trainable_variables:
        counts[variable.path in frozen] += math.prod(variable.shape)
    trained, kept = counts
    return f"{trained:,} trained and {kept:,} frozen" if kept else f"{trained:,}"


def _options(config: Config, origins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The options that are not defaults, by the layer that set them."""
    others = (name for name in non_defaults(config) if name not in origins)
    origins = {**origins, **dict.fromkeys(others, "config")}
    name = "options"
    for layer in dict.fromkeys(origins.values()):
        values = ", ".join(
            f"{n}={getattr(config, n)}" for n in origins if origins[n] == layer
        )
        yield name, f"{layer}: {values}"
        name = ""
