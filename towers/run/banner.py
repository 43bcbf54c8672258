"""The start banner: what will run, where and on what."""

import math
import platform

import keras
import tensorflow as tf

import towers
from towers import build
from towers.config import Config
from towers.config.checks import ignored_options
from towers.optim.phases import image_size
from towers.parallel.devices import Devices
from towers.parallel.strategy import Strategy
from towers.run.folder import RunFolder


def start_banner(
    config: Config,
    folder: RunFolder,
    parts: build.Parts,
    devices: Devices,
    strategy: Strategy,
) -> list[str]:
    """The lines of the banner."""
    data, model = parts.data, parts.model
    height, width, channels = parts.augment.image_shape
    num_params = sum(math.prod(v.shape) for v in model.trainable_variables)
    batch = f"{config.batch_size} images"
    if config.accumulate_steps > 1:
        batch = f"{config.accumulate_steps} x {batch}"
    lines = [
        ("run folder", folder.path),
        ("devices", ", ".join(devices.towers)),
        ("strategy", config.strategy),
        *(("", line) for line in strategy.describe()),
        (
            "data set",
            f"{data.name}: {parts.num_examples:,} training and "
            f"{data.test.num_examples:,} test images, {data.found}",
        ),
        (
            "network",
            f"{config.model} on {height}x{width}x{channels}, {config.precision}: "
            f"{num_params:,} parameters",
        ),
        ("batch", f"{batch} a step over all towers"),
        (
            "length",
            f"{parts.total_steps:,} steps, {config.num_epochs:g} epochs of "
            f"{parts.num_examples:,} images",
        ),
    ]
    sizes = {image_size(phase.model): phase.end_step for phase in parts.phases}
    if len(sizes) > 1:
        *first, _ = (f"{h}x{w} until step {end}" for (h, w), end in sizes.items())
        lines.append(("images", f"{', '.join(first)}, then {height}x{width}"))
    if config.device_memory_mb:
        lines += [("memory", str(account)) for account in strategy.memory()]
    lines += [("note", remark) for remark in devices.remarks]
    lines += [("warning", line) for line in ignored_options(config)]
    versions = (
        f"towers {towers.__version__}, TensorFlow {tf.__version__}, "
        f"Keras {keras.__version__}, Python {platform.python_version()}"
    )
    return [versions, *(f"{name:12} {text}" for name, text in lines)]
