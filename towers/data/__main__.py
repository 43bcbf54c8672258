"""Checks a data set before training.

    python -m towers.data photos
    python -m towers.data --dataset=cifar10 --data_dir=data

Reads every image once; reports the number of each class, the sizes, the mean
and the standard deviation, and the images that cannot be read; draws some into
a PNG file. Ends with 3 where something is wrong with the data.
"""

import argparse
import os
import sys

from towers import __version__, console, quiet_imports
from towers.config import choices
from towers.config.factories import foreseen
from towers.config.synonyms import suggestion
from towers.data.photos import photo_options
from towers.errors import ConfigError, report
from towers.run.signals import exit_on_signals

PROGRAM = "towers.data"


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message):
        raise ConfigError(message)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags of a command line.

    Raises:
        ConfigError: one is wrong.
    """
    parser = Parser(
        prog=f"python -m {PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folder", nargs="?", default="", help="the same as --data_dir")
    add(
        "--dataset",
        help=f"{choices.explained('dataset')}; by default image_folder, of a size that "
        "run_train.py chooses, too",
    )
    add("--data_dir", default="", help="folder that holds it; empty for the usual ones")
    add(
        "--image_size",
        type=int,
        default=0,
        help="height and width that images are brought to; 0 for as stored, or 64 "
        "where their sizes differ",
    )
    add(
        "--max_image_pixels",
        type=int,
        default=choices.MAX_IMAGE_PIXELS,
        help="most pixels of an image file; a larger one is not decoded",
    )
    add("--version", action="version", version=f"towers {__version__}")
    add("--grid", default="", help="PNG file for the picture; ./DATASET.png by default")
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0].lstrip("-")
        near = suggestion(name, vars(flags))
        raise ConfigError(f"{unknown[0]} is no flag; {near}--help lists them")
    flags.data_dir = flags.data_dir or flags.folder
    if flags.folder not in ("", flags.data_dir):
        raise ConfigError(f"{flags.folder} with --data_dir={flags.data_dir}: give one")
    if flags.dataset is None:
        if not flags.data_dir:
            raise ConfigError("give a folder of images, or --dataset")
        flags.dataset = "image_folder"
        if not flags.image_size and (options := photo_options(flags.data_dir)):
            flags.image_size = options["image_size"]
    try:
        choices.find("dataset", flags.dataset)
    except ConfigError as error:
        raise ConfigError(f"--{error}") from None
    if flags.image_size < 0:
        raise ConfigError(f"--image_size={flags.image_size}: must be at least 0")
    if flags.max_image_pixels < max(1, flags.image_size**2):
        raise ConfigError(
            f"--max_image_pixels={flags.max_image_pixels}: must be at least "
            f"{max(1, flags.image_size**2)} with --image_size={flags.image_size}"
        )
    return flags


def main(arguments: list[str]) -> int:
    """The command; its exit code."""
    console.has_flags = True
    try:
        flags = parse(arguments)
        with quiet_imports():
            from towers.data import check
        check.check(
            flags.dataset,
            flags.data_dir,
            image_size=flags.image_size,
            max_image_pixels=flags.max_image_pixels,
            grid_path=flags.grid,
        )
    except Exception as error:
        return report(PROGRAM, foreseen(error, "take smaller images, see --image_size"))
    return 0


if __name__ == "__main__":
    exit_on_signals()
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # they may be training
    sys.exit(main(sys.argv[1:]))
