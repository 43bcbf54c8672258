"""Command lines: one absl flag per field of Config, and one line per mistake.

Does not import TensorFlow, so that a wrong flag is refused at once. Differences to absl
are -h, --version, names of other programs, and exit codes.
"""

import io
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from absl import app, flags, logging

from towers import console
from towers.cli.help import help_text, list_text
from towers.cli.recipes import RECIPES
from towers.config import FIELDS, synonyms
from towers.config.checks import check_environment
from towers.config.choices import listed
from towers.config.factories import foreseen
from towers.errors import ConfigError, end_process
from towers.messages import one_line, version_line

_DEFINE: dict[Any, Callable[..., Any]] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
    int | str: flags.DEFINE_string,
}

# Message of absl for a required flag.
_MISSING = re.compile(r"Flag --(\w+) must have a value other than None")

flags.disclaim_key_flags()  # they are of the program that defines them


def define_config_flags(
    names: Iterable[str] = FIELDS,
    values: flags.FlagValues = flags.FLAGS,
    **defaults: Any,
) -> None:
    """Define flags of options, with their help, choices and defaults."""
    for name in names:
        field = FIELDS[name]
        default = defaults.get(name, field.default)
        about, choices = field.metadata["help"], field.metadata["choices"]
        if choices:
            text = listed(name) if field.metadata["table"] else ", ".join(choices)
            about += f" One of {text}."
        if field.type == int | str:
            default = str(default)
        _DEFINE[field.type](name, default, about, flag_values=values)


class NumberParser(flags.ArgumentParser):
    """The parser of a flag that takes some words, or a number of at least 1."""

    def __init__(self, *words: str):
        self._words = words

    def parse(self, argument: int | str) -> int | str:
        """Return a word or a number."""
        if argument in self._words:
            return argument
        if str(argument).isdecimal() and int(argument):
            return int(argument)
        raise ValueError(f"give {', '.join(self._words)}, or a number of at least 1")


def define_step_flag() -> flags.FlagHolder:
    """Define --step, a checkpoint of a run."""
    about = "Checkpoint: best (on held-out images, if any), last, or a step."
    serializer: flags.ArgumentSerializer = flags.ArgumentSerializer()
    parser = NumberParser("best", "last")
    return flags.DEFINE(parser, "step", "best", about, serializer=serializer)


def given_flags(values: flags.FlagValues = flags.FLAGS) -> dict[str, Any]:
    """Return the fields of Config whose flags are on the command line."""
    names = (name for name in FIELDS if name in values)
    return {n: values[n].value for n in names if not values[n].using_default_value}


def refuse_with(subject: str, names: Iterable[str]) -> None:
    """Raise ConfigError if one of these flags is set: `subject` ignores them."""
    for name in names:
        if flags.FLAGS[name].value != flags.FLAGS[name].default:
            what = f"--{name} has no effect with --{subject}"
            raise ConfigError(f"{what}; drop one of the two")


def parse(
    argv: Sequence[str],
    values: flags.FlagValues = flags.FLAGS,
    *,
    takes_paths: bool = False,
) -> Sequence[str]:
    """Give flags the values of a command line; return the program's name and paths.

    ConfigError if a flag is wrong, or there are paths and the program takes none.
    """
    values.set_gnu_getopt(takes_paths)
    known = {*values}
    argv = synonyms.with_our_names(argv, known, lambda name: values[name].boolean)
    try:
        rest = values(argv)
    except (flags.Error, ValueError, RecursionError) as error:
        if missing := _MISSING.findall(str(error)):
            helps = (values[x].help.partition(";")[0].rstrip(".") for x in missing)
            needed = map("--{} ({})".format, missing, helps)  # absl adds "; repeat ..."
            raise ConfigError(f"give {' and '.join(needed)}") from None
        why = one_line(error)
        if isinstance(error, flags.UnrecognizedFlagError):
            name = error.flagname
            if answer := synonyms.answer(name, known):
                why = f"--{name} is not a flag here: {answer}"
            elif meant := synonyms.meant(name, known):
                why = f"Unknown command line flag '{name}'. Did you mean: {meant} ?"
        raise ConfigError(why) from None
    for name, value in values.flag_values_dict().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"--{name}={value}: must be finite")
    if len(rest) > 1 and not takes_paths:
        meant = "flags start with --"
        if os.path.exists(rest[1]):
            is_run = os.path.isfile(os.path.join(rest[1], "config.json"))
            name = "workdir" if is_run else "data_dir"
            meant = f"did you mean --{name}={rest[1]}?" if name in values else meant
        raise ConfigError(f"unexpected argument {rest[1]!r}; {meant}")
    return rest


def start(
    main: Callable[[Sequence[str]], int | None],
    parse: Callable[[Sequence[str]], Sequence[str]] = parse,
    program: str = "",
) -> None:
    """Run a program like `absl.app.run`, but with one line and exit code per mistake.

    `main` gets what `parse` returns; its module has the program's flags and usage. The
    name of the program begins each line.
    """
    _keep_closed_streams()
    program = program or os.path.basename(sys.argv[0])
    module = sys.modules[main.__module__]

    def parse_or_end(argv):
        end = argv.index("--") if "--" in argv else len(argv)  # of another program
        text = None
        sections = [x.partition("=")[2] for x in argv[:end] if x.startswith("--help=")]
        is_asked = {"-h", "--help", "--helpfull", "--helpshort"} & {*argv[:end]}
        try:
            if is_asked or sections:
                text = help_text(module, "" if is_asked else sections[0])
            elif "--version" in argv[:end]:
                text = version_line()
            rest = None if text else parse(argv)
            if rest and "list" in flags.FLAGS and flags.FLAGS.list:
                text = list_text(RECIPES)
            if text:
                print(text, flush=True)
                sys.exit()
            return rest
        except OSError as error:
            end_process(program, ConfigError(f"standard output: {error.strerror}"))
        except ConfigError as error:
            end_process(program, error)

    def main_or_end(argv):
        try:
            check_environment()
            code, reason = main(argv), console.lost_output()
            if reason and getattr(module, "PRINTS_RESULTS", False):
                raise ConfigError(f"standard output: cannot be written: {reason}")
            return code
        except SystemExit:
            raise
        except BaseException as error:  # also from a user's file
            workdir = flags.FLAGS["workdir"].value if "workdir" in flags.FLAGS else ""
            end_process(program, foreseen(error, _more_memory()), workdir or None)

    logging.set_verbosity(logging.WARNING)
    app.run(main_or_end, flags_parser=parse_or_end)


def _keep_closed_streams():
    """Open closed standard streams, so that no other file gets their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            unwritable = os.open(os.devnull, os.O_RDONLY)
            if unwritable != number:
                os.dup2(unwritable, number)
                os.close(unwritable)
            if name != "stdin":  # without a buffer, nothing is left to write at the end
                raw = io.FileIO(number, "wb", closefd=False)
                setattr(sys, name, io.TextIOWrapper(raw, "utf-8", write_through=True))


def _more_memory():
    """Return what to do if no memory is left."""
    if "batch_size" not in flags.FLAGS:
        return "end other programs, or use a larger machine"
    if "accumulate_steps" not in flags.FLAGS:
        return "lower --batch_size, or end other programs"
    return (
        "lower --batch_size (with more --accumulate_steps if the batch must stay), "
        "set --precision=bfloat16, or take a smaller network"
    )
