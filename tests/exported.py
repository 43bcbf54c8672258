"""Runs with random values in place of trained ones, to be exported."""

import pathlib

import numpy as np

from towers import build, load_run
from towers.config import Config
from towers.data.augment.augmentation import create_augment
from towers.evaluation.restored import RestoredRun
from towers.run.dataset_info import DatasetInfo
from towers.training.train import train

CLASS_NAMES = ("cat", "dog", "größer als", "a\tb", "e", "f", "g", "h", "i", "j")
MEAN, DEVIATION = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)


def random_run(
    model: str,
    augment: str = "none",
    image_shape: tuple[int, int, int] = (32, 32, 3),
    std: tuple[float, ...] = DEVIATION,
    **options,
) -> RestoredRun:
    """A run of a network, all of whose values are drawn, also those that begin as 0 or
    1; its moving averages differ from its parameters."""
    config = Config(**{"width": 0.25, **options}, model=model, augment=augment)
    channels = image_shape[-1]
    info = DatasetInfo(
        "drawn", CLASS_NAMES, image_shape, MEAN[:channels], std[:channels]
    )
    shape = create_augment(augment, image_shape, info.mean, info.std).image_shape
    network = build.create_network(config, shape, len(CLASS_NAMES))
    rng = np.random.default_rng(0)

    def drawn(variable):
        values = variable.numpy()
        scale = 0.5 * values.std() + 0.05 * np.abs(values).mean() + 0.02
        values = values + rng.normal(0, scale, values.shape)
        is_variance = variable.path.endswith("moving_variance")
        return np.float32(np.abs(values) if is_variance else values)

    tensors = {}
    for variable in network.trainable_variables:
        for kind in ("params", "averages"):
            tensors[f"{kind}/{variable.path}"] = drawn(variable)
    for variable in network.non_trainable_variables:
        tensors[f"state/{variable.path}"] = drawn(variable)
    return RestoredRun(pathlib.Path("a run"), 7, config, info, tensors)


def random_images(run: RestoredRun, count: int = 4) -> np.ndarray:
    """uint8 [count, *run.image_shape]."""
    rng = np.random.default_rng(1)
    return rng.integers(0, 256, (count, *run.image_shape)).astype(np.uint8)


def trained(workdir: pathlib.Path, **options) -> RestoredRun:
    """A run on the drawn shapes."""
    settings = {"dataset": "shapes", "device": "cpu", "ema_decay": 0.0}
    settings |= {"eval_every_epochs": 0.0, "summary_every_steps": 0}
    train(workdir, Config(**settings | options))
    return load_run(workdir)
