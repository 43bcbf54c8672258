"""Every recipe trains, on data made on the spot."""

import dataclasses
import fcntl
import importlib
import itertools
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pictures
import pytest
from marks import slow
from processes import environ_of

from towers.config import choices
from towers.config.recipes import load_recipe, recipe_names
from towers.data.sources import ArraySource, DataSet
from towers.training.train import train

CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"

# Shape of the images and number of classes of what recipes train on.
DATA_SETS = {
    "cifar10": ((32, 32, 3), 10),
    "cifar100": ((32, 32, 3), 100),
    "fashion_mnist": ((28, 28, 1), 10),
}
STRATEGIES = {
    "towers": {"num_towers": 2},
    "replicated": {"strategy": "replicated", "num_towers": 2},
    "async_towers": {"strategy": "async_towers", "num_towers": 2},
    "model_parallel": {"strategy": "model_parallel", "num_towers": 2, "group_size": 2},
}
# The steps of AdamW, LAMB and Muon do not depend on how gradients are scaled; Muon
# needs whole kernels; depthwise convolutions are not split, nor three heads in two.
REFUSED = {
    ("cifar10_convmixer", "async_towers"),
    ("cifar10_vit_tiny", "async_towers"),
    ("cifar10_vit_tiny", "model_parallel"),
    ("imagenet_resnet50_a2", "async_towers"),
    ("imagenet_vit_small", "async_towers"),
    *itertools.product(
        (
            *("cifar10_speedrun", "cifar10_speedrun_fast", "cifar10_speedrun_96"),
            *("photos", "photos_finetune"),
        ),
        ("async_towers", "model_parallel"),
    ),
}

# In the fast suite: of stored arrays, and of image files.
FAST = {"cifar10_cnn", "photos"}

each_recipe = pytest.mark.parametrize("name", recipe_names(CONFIGS))


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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@each_recipe
def test_a_recipe_trains_at_full_width_under_every_strategy(name, strategy, tmp_path):
    if (name, strategy) in REFUSED:
        pytest.skip("refused by name: see test_config, test_optimizers")
    # In another process: oneDNN keeps most of what a network takes until the process
    # ends. The wide ones, which take 12 GB, one at a time.
    script = (
        "import towers, pathlib, sys, pytest, test_recipes as t; "
        "name, strategy, workdir = sys.argv[1:]; "
        "t.train_two_steps(t.load_recipe(name, t.CONFIGS), pathlib.Path(workdir), "
        "pytest.MonkeyPatch(), **t.STRATEGIES[strategy])"
    )
    with open(pathlib.Path(tempfile.gettempdir(), "towers-large-test"), "w") as file:
        if "wide" in name:
            fcntl.flock(file, fcntl.LOCK_EX)
        command = [sys.executable, "-c", script, name, strategy, str(tmp_path)]
        done = subprocess.run(command, env=environ_of(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
