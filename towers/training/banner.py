"""The start banner: devices, strategy, data set, network and length of a run."""

import math
import textwrap
from collections.abc import Mapping

from towers import console
from towers.build.builder import Parts
from towers.config import Config, non_defaults
from towers.config.checks import ignored_options
from towers.console import print_versions
from towers.data import classes
from towers.messages import counted
from towers.optim.phases import image_size
from towers.parallel.devices import Devices
from towers.parallel.trainer import Trainer
from towers.run.folder import RunFolder

MANY_IMAGES = 64  # images per tower below which a GPU is hardly used


def print_banner(
    config: Config,
    folder: RunFolder,
    devices: Devices,
    parts: Parts,
    trainer: Trainer,
    origins: Mapping[str, str],
) -> None:
    """Print the versions, once in a process, and the start banner."""
    print_versions()
    data, (height, width, channels) = parts.data, parts.augment.image_shape
    split, held_out = parts.eval_split
    validation = ""
    if split == "validation":
        validation = f"{held_out.num_examples:,} validation, "
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
            f"{data.name}: {parts.num_examples:,} training, {validation}"
            f"{data.test.num_examples:,} test images, {data.origin}",
        ),
        *data.inventory.lines(data),
        (
            "network",
            f"{config.model} on {height}x{width}x{channels}, {config.precision}: "
            f"{_num_params(trainer)} parameters",
        ),
        ("batch", f"{batch} a step over all towers"),
        (
            "length",
            f"{counted(parts.total_steps, 'step')}, "
            f"{counted(config.num_epochs, 'epoch')} of "
            f"{counted(parts.num_examples, 'image')}",
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
    notes = [*devices.remarks, *classes.few_images(data)]
    # num_towers=0 takes all GPUs, which may leave each of them few images.
    is_chosen = config.num_towers or config.device_order
    count, least = len(trainer.sizes), min(trainer.sizes)
    if devices.kind == "GPU" and not is_chosen and count > 1 and least < MANY_IMAGES:
        few = f"batch_size={config.batch_size} is {least} images a tower, few for a GPU"
        way = f"{MANY_IMAGES * count} is {MANY_IMAGES} a tower"
        way = f"raise --batch_size ({way}) or take fewer GPUs with --num_towers"
        notes.append(f"num_towers=0 takes all {count} GPUs, so that {few}: {way}")
    lines += [("note", note) for note in notes]
    lines += [("warning", text) for text in _warnings(config, parts)]
    for name, text in lines:
        print_entry(name, text)


def print_entry(name: str, text: str) -> None:
    """Print a name and a text in lines of at most 80 characters."""
    for line in textwrap.wrap(
        f"{name:12} {text}",
        console.columns(80),
        subsequent_indent=" " * 13,
        break_long_words=False,
        break_on_hyphens=False,
    ):
        console.line(line)


def _warnings(config, parts):
    yield from ignored_options(config)
    height, width, _ = parts.augment.image_shape
    stored_height, stored_width, _ = parts.data.image_shape
    if 2 * height * width < stored_height * stored_width:
        sizes = f"{height}x{width} out of images of {stored_height}x{stored_width}"
        why = f"augment={config.augment} cuts {sizes}, and only this middle part is "
        yield f"{why}evaluated; --augment=pad_crop_flip takes whole images"
    if config.images_per_step > parts.num_examples:
        options = "--batch_size"
        if config.accumulate_steps > 1:
            options += " or --accumulate_steps"
        why = f"as there are {parts.num_examples} to train on; lower {options}"
        images = f"{config.images_per_step} images, some of them more than once"
        yield f"a step takes {images}, {why}"


def _num_params(trainer):
    """Return the numbers of parameters that are trained, and frozen, in a text."""
    frozen, counts = trainer.phases[0].frozen, [0, 0]
    for variable in trainer.model.trainable_variables:
        counts[variable.path in frozen] += math.prod(variable.shape)
    trained, kept = counts
    return f"{trained:,} trained and {kept:,} frozen" if kept else f"{trained:,}"


def _options(config, origins):
    """Yield lines of the options that are not defaults, by the layer that set them."""
    others = [name for name in non_defaults(config) if name not in origins]
    layers = {**origins, **dict.fromkeys(others, "config")}
    if origins:  # See `with_options_of_weights`.
        names = "model image_size interpolation center_crop fit standardize".split()
        by_weights = {*names}.intersection(others)
        layers |= dict.fromkeys(sorted(by_weights), "the trained weights")
    for i, layer in enumerate(dict.fromkeys(layers.values())):
        values = (f"{n}={getattr(config, n)}" for n in layers if layers[n] == layer)
        yield "" if i else "options", f"{layer}: {', '.join(values)}"
