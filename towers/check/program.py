"""Checks a data set before training.

    python -m towers.check photos
    python -m towers.check --dataset=cifar10 --data_dir=data

Reads every image once; reports the number of each class, the sizes, mean and standard
deviation, and the images that cannot be read; draws some into a PNG file. The exit code
is 3 if something is wrong with the data.
"""

import functools
from collections.abc import Sequence
from typing import Any

from absl import flags

from towers import console
from towers.cli import flags as config_flags
from towers.cli import recipes
from towers.config import Config
from towers.config.checks import ignored_options
from towers.data.sets.photos import photo_options
from towers.errors import ConfigError

PROGRAM = "towers.check"
PRINTS_RESULTS = True  # see `flags.start`
OPTIONS = (
    *("dataset", "data_dir", "columns", "image_dir", "fold"),
    *("label_separator", "class_level"),
    *("image_size", "fit", "value_range", "max_image_pixels"),
)


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Define the program's flags."""
    config_flags.define_config_flags(OPTIONS, values, dataset="")
    about = "PNG file for the picture; ./DATASET-FOLDER.png by default."
    flags.DEFINE_string("grid", "", about, flag_values=values)


parse = functools.partial(config_flags.parse, takes_paths=True)


def main(argv: Sequence[str], values: flags.FlagValues = flags.FLAGS) -> None:
    """Check the data set of the flags, or of a folder after the program in `argv`."""
    given: dict[str, Any] = config_flags.given_flags(values)
    folders = {*argv[1:], given.get("data_dir", "")} - {""}
    if len(folders) > 1:
        raise ConfigError(f"give one folder, not {' and '.join(sorted(folders))}")
    folder = given["data_dir"] = "".join(folders)
    if "dataset" not in given:
        if not folders:
            raise ConfigError("give a folder of images, or --dataset")
        name = recipes.photo_recipe(recipes.RECIPES, {})
        is_tuned = name == recipes.FINETUNE_RECIPE
        given = photo_options(folder, is_tuned, values.class_level) | given
        if given["dataset"] in recipes.PHOTO_SETS:  # as a training reads them
            recipe = recipes.load_recipe(name, recipes.RECIPES)
            given.setdefault("image_size", recipe.image_size)
    config = Config(**{name: given[name] for name in OPTIONS if name in given})
    from towers.check import report

    for line in ignored_options(config):
        console.warn(line)
    options = {name: getattr(config, name) for name in OPTIONS[1:]}
    report.check(config.dataset, grid_path=values.grid, **options)
