"""Every recipe trains, on data made on the spot."""

import dataclasses
import importlib
import pathlib

import numpy as np
import pictures
import pytest
from marks import slow

from towers.cli.recipes import load_recipe, recipe_names
from towers.config import choices
from towers.data.sources import ArraySource, DataSet
from towers.training.train import train

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"

# Shape of the images and number of classes of what recipes train on.
DATA_SETS = {
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
    "fashion_mnist": ((28, 28, 1), 10),
}
# In the fast suite: of stored arrays, and of image files.
FAST = {"cifar10_cnn", "photos"}


def made_up(data_dir, name):
    image_shape, num_classes = DATA_SETS[name]
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (40, *image_shape), dtype=np.uint8)
    source = ArraySource(images, rng.integers(0, num_classes, 40))
    names = tuple(str(i) for i in range(num_classes))
    channels = image_shape[-1]
    return DataSet(
        name, source, source, names, (127.5,) * channels, (74.0,) * channels, ""
    )


def train_two_steps(recipe, workdir, monkeypatch, **changes):
    for name in DATA_SETS:
        place, _, function = choices.target_of("dataset", name).rpartition(":")
        monkeypatch.setattr(
            importlib.import_module(f"towers.{place}"), function, made_up
        )
    if recipe.dataset == "image_folder" or recipe.dataset.startswith("tfds:"):
        changes["dataset"] = "image_folder"
        pictures.write_folder(workdir / "data", "train", {"a": 12, "b": 12})
        changes["data_dir"] = str(workdir / "data")
    if recipe.init_from == "imagenet":  # would be downloaded
        changes["init_from"] = ""
    config = dataclasses.replace(
        recipe,
        **{"group_size": 1, "strategy": "towers", "batch_size": 8} | changes,
        device="cpu",
        max_steps=2,
        eval_every_epochs=0.0,
        summary_every_steps=0,
    )
    state = train(workdir / "run", config).state
    assert state["step"] == 2
    for name, value in state.items():
        assert np.all(np.isfinite(value)), name


@pytest.mark.parametrize(
    "name", [name if name in FAST else slow(name) for name in recipe_names(CONFIGS)]
)
def test_a_recipe_takes_two_steps_at_an_eighth_of_its_width(
    name, tmp_path, monkeypatch
):
    recipe = load_recipe(name, CONFIGS)
    changes = {"width": recipe.width / 8}
    if recipe.image_size:
        # oneDNN (TensorFlow 2.21, AVX-512) ends the process in the gradient of a 1x1
        # convolution of stride 2 from 8 to 16 channels at 64x64; not at full width.
        changes["image_size"] = 32
    train_two_steps(recipe, tmp_path, monkeypatch, num_towers=1, **changes)
