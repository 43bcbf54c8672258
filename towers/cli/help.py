"""The texts of `--help` and `--list`."""

import ast
import pathlib
import re
import textwrap
import types
from collections.abc import Iterator

from absl import flags

from towers import console
from towers.config import choices
from towers.config.config import FIELDS
from towers.errors import ConfigError
from towers.messages import one_line, with_programs

COMMON = (
    *("config", "workdir", "dataset", "data_dir", "model", "num_epochs", "batch_size"),
    *("optimizer", "learning_rate", "schedule", "weight_decay", "augment", "init_from"),
    *("strategy", "num_towers", "device", "precision", "max_steps", "seed"),
    *("overwrite", "progress", "dry_run", "lr_range_test", "list"),
)

# The first field of Config of each section, and its title.
SECTIONS = {
    "dataset": "Data set, input and augmentation",
    "model": "Network, its arithmetic and compiler",
    "optimizer": "Optimizer, learning rate, weight decay and moving averages",
    "strategy": "Strategy, devices and the size of a batch",
    "init_from": "Start, length, logs, evaluations and checkpoints",
}

_INDENT = 28


def help_text(module: types.ModuleType, section: str = "") -> str:
    """Return the text of `--help`: the docstring of a module, and its flags by subject.

    With a section, the start of a word of a title, return its flags alone.
    """
    own = {flag.name: flag for flag in flags.FLAGS.get_key_flags_for_module(module)}
    groups, title = {"Common flags": [n for n in COMMON if n in own]}, ""
    if len(own) <= len(COMMON):
        groups = {"Flags": list(own)}
    else:
        for name in FIELDS:
            title = SECTIONS.get(name, title)
            groups.setdefault(title, []).append(name)
        groups["Others"] = sorted(own.keys() - FIELDS.keys())
    paragraphs = with_programs(module.__doc__ or "").strip().split("\n\n")
    filled = [
        p if p[0] == " " else textwrap.fill(p, console.columns(80)) for p in paragraphs
    ]
    lines, printed = ["\n\n".join(filled)], set()
    if section:
        titles = [t for t in groups if f" {section}".lower() in f" {t}".lower()]
        if not titles:
            way = f"unknown section; give a word of one of: {'; '.join(groups)}"
            raise ConfigError(f"--help={one_line(section, 60)}: {way}")
        lines, groups = [], {titles[0]: groups[titles[0]]}
    elif len(groups) > 1:
        lines += ["", "--help=WORD prints one section, such as --help=data."]
    for title, names in groups.items():
        left = [n for n in names if n in own and n not in printed]
        printed |= set(left)
        if left:
            lines += ["", f"{title}:", ""]
            for name in left:
                lines += _flag_lines(own[name])
    return "\n".join(lines).lstrip("\n")


def _flag_lines(flag):
    default = flag.default
    if flag.boolean:
        head = f"--[no]{flag.name}"
    elif isinstance(default, list):
        head = f"--{flag.name}={','.join(default)}"
    elif isinstance(default, float):
        head = f"--{flag.name}={default:g}"
    else:
        head = f"--{flag.name}={'' if default is None else default}"
    text = re.sub("^<.*?>: ", "", flag.help)  # by absl
    if isinstance(flag.parser, flags.EnumParser):
        text += f" One of {', '.join(flag.parser.enum_values)}."
    if flag.boolean and default:
        text += " On by default."
    return _columns(head, text)


def _columns(head, text):
    indent, is_long = " " * _INDENT, len(head) + 4 > _INDENT
    lines = textwrap.wrap(
        text,
        console.columns(80),
        initial_indent=indent if is_long else f"  {head:{_INDENT - 2}}",
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [f"  {head}", *lines] if is_long else lines


def list_text(recipes: pathlib.Path) -> str:
    """Return the text of `--list`: every choice by name, and the recipes."""
    lines = []
    for option, table in choices.TABLES.items():
        title = re.split("[,:.]", FIELDS[option].metadata["help"])[0]
        if option == "model":
            title += ", number of parameters for 10 classes"
        lines += [f"{title} (--{option}):", ""]
        for name, row in table.items():
            num_params = getattr(row, "num_params", 0)
            size = f"{num_params / 1e6:5.2f} M  " if num_params else ""
            lines += _columns(name, f"{size}{row.help}")
        lines.append("")
    lines += ["Recipes (--config), with published accuracies, and measured ones:", ""]
    for name, summary, accuracies in _recipes(recipes):
        lines += _columns(name, "; ".join([summary, *accuracies]))
    return "\n".join(lines)


def _recipes(folder: pathlib.Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield name, first line and accuracies of each recipe, without running it."""
    for path in sorted(folder.glob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        pattern = r"^(Published|Measured): [^:]*?\b(0\.\d+)"
        accuracies = re.findall(pattern, doc, re.MULTILINE)
        summary, *_ = doc.splitlines()
        texts = [f"{kind.lower()} {accuracy}" for kind, accuracy in accuracies]
        yield path.stem, summary.rstrip("."), texts
