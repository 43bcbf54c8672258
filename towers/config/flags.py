"""The command line: one absl flag per field of Config, and the layers of a run.

A field's default is overridden by the recipe (`--config`), or without one by the config
of the run in the run's folder, and that by the flags given on the command line.
Importing this module defines the flags; it imports no TensorFlow, so that a wrong flag
is refused at once.
"""

import contextlib
import dataclasses
import importlib.metadata
import pathlib
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from absl import app, flags, logging

import towers
from towers.config import FIELDS, Config, non_defaults, synonyms
from towers.config.cluster import find_cluster
from towers.config.factories import foreseen
from towers.config.options import check_option
from towers.config.recipes import load_recipe, recipe_names
from towers.errors import ConfigError, end_process, one_line

# The recipe of a command without --config that names no data set.
DEFAULT_RECIPE = "quickstart"

_DEFINE = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}


# Of the name of a flag, with its dashes.
_MOST_CHARACTERS = 100


def define_config_flags(
    names: Iterable[str] = FIELDS,
    values: flags.FlagValues = flags.FLAGS,
    **defaults: Any,
) -> None:
    """Defines one flag per field of Config, with its help, choices and default.

    Args:
        names: of the fields; all by default.
        values: where the flags are defined; the program's own by default.
        **defaults: where the program's default is not the field's.
    """
    for name in names:
        field = FIELDS[name]
        default = defaults.get(name, field.default)
        help_text, choices = field.metadata["help"], field.metadata["choices"]
        if choices and not field.metadata["table"]:
            flags.DEFINE_enum(name, default, choices, help_text, flag_values=values)
        else:
            _DEFINE[field.type](name, default, help_text, flag_values=values)


def define_cluster_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags that say which worker of which cluster this process is."""
    flags.DEFINE_string(
        "cluster",
        "",
        "Addresses of all workers, host:port with commas between; without it those of "
        "TF_CONFIG or Slurm, if any.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "task_index",
        None,
        "Which of --cluster this worker is; 0 is the chief.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "allow_public_address",
        False,
        "Let workers have public addresses; they know no passwords.",
        flag_values=values,
    )


def cluster_of_flags(values: flags.FlagValues = flags.FLAGS) -> dict[str, Any]:
    """The arguments of `towers.train` about the cluster.

    Raises:
        ConfigError: a description of a cluster is wrong.
    """
    return {
        "cluster": find_cluster(values["cluster"].value, values["task_index"].value),
        "allow_public_address": values["allow_public_address"].value,
    }


def given_flags(values: flags.FlagValues = flags.FLAGS) -> dict[str, Any]:
    """The fields of Config whose flags stand on the command line."""
    return {
        name: values[name].value
        for name in FIELDS
        if name in values and not values[name].using_default_value
    }


class CommandLine(NamedTuple):
    """What a command line asks for.

    Attributes:
        config: of the run.
        workdir: the run's folder.
        origins: the layer of each option that is not a default: "flags", "run folder",
            or "recipe" with its name.
        remark: a line that names the recipe where the command did not; may be empty.
    """

    config: Config
    workdir: pathlib.Path
    origins: dict[str, str]
    remark: str


def config_of_flags(
    recipe: str | None,
    folder: pathlib.Path,
    given: dict[str, Any],
    workdir: str | None = None,
    stored_config: Callable[[pathlib.Path], Config | None] = lambda workdir: None,
) -> CommandLine:
    """The Config of a command line.

    The flags stand on the recipe; without --config on the config of the run in the
    run's folder, or, where there is none, on the recipe DEFAULT_RECIPE, or with flags
    that name a data set on the defaults.

    Args:
        recipe: the value of --config, or None.
        folder: where recipes lie.
        given: `given_flags`.
        workdir: the value of --workdir, or None.
        stored_config: the run's folder -> the config of the run there, None without a
            run.

    Raises:
        ConfigError: there is no such recipe, or the options do not fit.
    """
    for name, value in given.items():
        check_option(FIELDS[name], value)  # before TensorFlow is imported
    default = None if {"dataset", "data_dir"} & set(given) else DEFAULT_RECIPE
    name = recipe or default
    stem = pathlib.Path(name).stem if name else "default"
    if workdir == "":
        raise ConfigError("--workdir is empty; give a folder, or leave it away")
    path = pathlib.Path(workdir or pathlib.Path("runs") / stem)
    stored = None if recipe else stored_config(path)
    remark = ""
    if stored is not None:
        base, layer = stored, "run folder"
    elif name:
        base, layer = load_recipe(name, folder), f"recipe {stem}"
        if not recipe:
            others = ", ".join(n for n in recipe_names(folder) if n != name)
            remark = (
                f"no --config and no --dataset: training the recipe {name}; other "
                f"recipes are {others}, and --help lists the flags"
            )
    else:
        base, layer = Config(), "default"
    origins = dict.fromkeys(non_defaults(base), layer) | dict.fromkeys(given, "flags")
    return CommandLine(dataclasses.replace(base, **given), path, origins, remark)


def parse(
    argv: Sequence[str],
    values: flags.FlagValues = flags.FLAGS,
    *,
    takes_paths: bool = False,
) -> Sequence[str]:
    """Gives flags the values of a command line.

    Returns:
        The program's name, and where it takes paths these, which may stand before,
        between and after the flags.

    Raises:
        ConfigError: a flag is unknown or its value wrong, or there is something else.
    """
    values.set_gnu_getopt(takes_paths)
    for argument in argv[1:]:
        # absl's search for the nearest flag recurses once per character.
        name = argument.partition("=")[0]
        if len(name) > _MOST_CHARACTERS and name.startswith("-"):
            raise ConfigError(f"{one_line(name, 60)} is no flag; --help lists them")
    try:
        rest = values(argv)
    except (flags.Error, ValueError, OSError, RecursionError) as error:
        message = one_line(error)
        unknown = getattr(error, "flagname", "")
        meant = synonyms.meant(unknown, values)
        if unknown in synonyms.RENAMED:
            new = synonyms.RENAMED[unknown]
            message += f"; it is called --{new} now, see --help"
        elif meant and isinstance(error, flags.UnrecognizedFlagError):
            message = f"Unknown command line flag '{unknown}'. Did you mean: {meant} ?"
        raise ConfigError(message) from None
    if len(rest) > 1 and not takes_paths:
        raise ConfigError(f"{rest[1]!r} is no flag; flags begin with --")
    return rest


def version_line() -> str:
    """The version of towers and those of what it stands on, without importing it."""
    versions = [f"towers {towers.__version__}"]
    for package in ("TensorFlow", "Keras"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(package.lower())
            versions.append(f"{package} {version}")
    return ", ".join([*versions, f"Python {platform.python_version()}"])


def _with_common_flags(argv: Sequence[str]) -> list[str]:
    """A command line with --help in place of -h; --version prints the versions and
    ends the process. What follows `--` is of another program."""
    end = argv.index("--") if "--" in argv else len(argv)
    if "--version" in argv[1:end]:
        try:
            print(version_line(), flush=True)
        except OSError as error:
            raise ConfigError(f"standard output: {error.strerror}") from None
        sys.exit()
    own = ["--help" if argument == "-h" else argument for argument in argv[:end]]
    return [*own, *argv[end:]]


def _more_memory():
    """The way out, by the flags of the program, where no memory is left."""
    if "accumulate_steps" in flags.FLAGS:
        return (
            "lower --batch_size (with more --accumulate_steps if the batch must stay), "
            "set --precision=bfloat16, or take a smaller network"
        )
    if "batch_size" in flags.FLAGS:
        return "lower --batch_size, or end other programs"
    return "end other programs, or use a larger machine"


def run(
    main: Callable[[Sequence[str]], int | None],
    parse: Callable[[Sequence[str]], Sequence[str]] = parse,
    program: str = "",
) -> None:
    """`absl.app.run` with the exit codes of `towers.errors`, one line per mistake.

    Args:
        main: gets what `parse` returns; its result is the exit code, None for 0.
        parse: gives flags the values of a command line.
        program: begins each line; by default the name of the file.
    """
    program = program or pathlib.Path(sys.argv[0]).name
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a path may have any characters, or bytes
            stream.reconfigure(errors="backslashreplace")

    def parse_or_end(argv):
        try:
            return parse(_with_common_flags(argv))
        except ConfigError as error:
            end_process(program, error)
        except SystemExit as end:  # absl ends --help with 1
            sys.exit(0 if end.code == 1 else end.code)

    def main_or_end(argv):
        try:
            return main(argv)
        except SystemExit:
            raise
        except BaseException as error:  # also those of a user's file
            workdir = flags.FLAGS["workdir"].value if "workdir" in flags.FLAGS else ""
            end_process(program, foreseen(error, _more_memory()), workdir or None)

    logging.set_verbosity(logging.WARNING)
    app.run(main_or_end, flags_parser=parse_or_end)
