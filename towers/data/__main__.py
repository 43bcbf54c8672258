"""Checks a data set before anyone trains on it.

    python -m towers.data --dataset=image_folder --data_dir=data

Reads every image once; says how many there are of each class, their sizes, mean and
deviation, and which cannot be read; draws some into a PNG file. Ends with 3 where
something is wrong with the data.
"""

import argparse
import difflib
import sys

from towers import data, quiet_imports
from towers.errors import ConfigError, TowersError

PROGRAM = "towers.data"


class Parser(argparse.ArgumentParser):
    """Tells a mistake in one line."""

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
    names = ", ".join(data.DATASETS)
    add = parser.add_argument
    add("--dataset", required=True, help=f"{names}, or {data.TFDS}NAME")
    add("--data_dir", default="", help="folder that holds it; empty for the usual ones")
    add(
        "--image_size",
        type=int,
        default=0,
        help="height and width that images of any size are brought to; 0 for as stored",
    )
    add("--grid", default="", help="PNG file for the picture; ./DATASET.png by default")
    flags = parser.parse_args(arguments)
    name = flags.dataset
    is_prepared = name.startswith(data.TFDS) and name != data.TFDS
    if name not in data.DATASETS and not is_prepared:
        near = difflib.get_close_matches(name, data.DATASETS, n=1)
        raise ConfigError(
            f"--dataset={name}: {f'did you mean {near[0]!r}? ' if near else ''}must be "
            f"one of {names} or {data.TFDS}NAME"
        )
    if flags.image_size < 0:
        raise ConfigError(f"--image_size={flags.image_size}: must be at least 0")
    return flags


def main(arguments: list[str]) -> int:
    """The command; its exit code."""
    try:
        flags = parse(arguments)
        with quiet_imports():
            from towers.data import check
        check.check(
            flags.dataset,
            flags.data_dir,
            image_size=flags.image_size,
            grid_path=flags.grid,
        )
    except TowersError as error:
        sys.stdout.flush()
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
