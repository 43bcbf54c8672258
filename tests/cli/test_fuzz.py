"""Any content of a small file, any option and any command line gives a result or one
line: rows 17, 34, 37 and 42."""

import decimal
import functools
import json
import pathlib
import typing

import numpy as np
import pytest
from absl import flags as absl_flags
from engines import fuzzing
from engines.corruptions import WRONG_TEXTS
from engines.fuzzing import many_inputs
from hypothesis import strategies as st
from marks import slow

from towers.cli import flags
from towers.cli.recipes import config_of_flags
from towers.config import FIELDS, Config, from_json, to_json
from towers.config.list_options import LISTS, parse

# Some inputs are meant to be as long as that.
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

RECIPES = pathlib.Path(__file__).parents[2] / "configs"


@pytest.fixture
def fuzz(num_inputs):
    """A function that calls another with inputs of a strategy: each call returns or
    raises a TowersError, of one of the exit codes, in bounded time and memory. Some are
    tried always."""
    return functools.partial(fuzzing.fuzz, num_inputs=num_inputs)


# Inputs.

any_text = st.text(st.characters())  # surrogates too
long_text = st.builds(
    lambda text, times: text * times,
    st.text(st.characters(), min_size=1, max_size=4),
    st.sampled_from([100, 3000, 300_000]),
)
texts = st.one_of(any_text, any_text, long_text)
wrong_texts = st.sampled_from([*WRONG_TEXTS.values()])
wrong_bytes = wrong_texts.map(lambda text: text.encode("utf-8", "surrogatepass"))
json_values = st.recursive(
    st.one_of(
        *(st.none(), st.booleans(), st.integers(), st.floats(), any_text),
        st.sampled_from([10**400, -(2**63), 2**63, 0, 1, "", "cpu", "none"]),
    ),
    lambda inner: st.lists(inner) | st.dictionaries(any_text, inner),
    max_leaves=5,
)


def edited(content):
    """The bytes with a few places overwritten, cut or inserted."""
    place = st.integers(0, len(content))
    edit = st.tuples(place, place, st.binary(max_size=8) | wrong_bytes)

    def apply(edits):
        changed = content
        for start, end, new in edits:
            changed = changed[:start] + new + changed[max(start, end - 9 * end // 10) :]
        return changed

    return st.lists(edit, min_size=1, max_size=3).map(apply)


def with_values(values):
    """JSON bytes of an object, some of whose keys have other values."""
    changes = st.dictionaries(st.sampled_from(list(values)) | any_text, json_values)
    return changes.map(lambda change: json.dumps(values | change).encode())


def files_like(values):
    """Bytes in the place of the JSON file of an object."""
    content = json.dumps(values).encode()
    return st.one_of(st.binary(), wrong_bytes, edited(content), with_values(values))


# The files of a run's folder.


@many_inputs
@pytest.mark.row(34)
def test_any_config_json(fuzz):
    values = json.loads(to_json(Config()))
    fuzz(lambda content: to_json(from_json(content)), files_like(values))


# Options.

# What a number in a list option may look like, and what not.
numbers = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["", " 1", "1_0", "٣", "1e400", "nan", "-0", "9" * 5000, "0x1"]),
)
list_texts = st.one_of(
    texts,
    st.text("0123456789.:,eE+-_ naif*/[]!"),
    st.lists(
        st.lists(st.one_of(numbers, any_text, st.just("*/bias")), max_size=4).map(
            ":".join
        )
    ).map(",".join),
    st.sampled_from(["1:1," * 100_000, ":" * 300_000, "a:1," * 30_000]),
)


@many_inputs
@pytest.mark.parametrize("option", LISTS)
@pytest.mark.row(17)
def test_any_list_option(fuzz, option):
    def check(text):
        values = parse(option, text)
        rows = values.items() if isinstance(values, dict) else values
        rows = [row if isinstance(row, tuple) else (row,) for row in rows]
        found = [x for row in rows for x in row if isinstance(x, int | float)]
        assert all(np.isfinite(x) for x in found if x is not None and abs(x) < 1e300)

    fuzz(check, list_texts)


class Unprintable:
    """Of a class whose texts fail."""

    def __repr__(self):
        raise KeyError("no text")

    __str__ = __repr__


class Name(str):
    pass


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


python_values = st.one_of(
    json_values,
    texts,
    list_texts,
    st.binary(),
    st.complex_numbers(),
    st.sampled_from([10**5000, -(10**5000), nested(100_000), Unprintable(), Config]),
    st.sampled_from([Name("cnn"), np.float32(1), np.arange(3), decimal.Decimal("NaN")]),
    st.sampled_from([np.nan, np.inf, -np.inf, 5e-324, 1.8e308, True, object()]),
)


@pytest.mark.parametrize(
    "names,num_inputs",
    [(list(FIELDS), 3 * fuzzing.FEW), *(slow([name], fuzzing.MANY) for name in FIELDS)],
)
@pytest.mark.row(17)
def test_any_value_of_an_option(fuzz, names):
    def check(option):
        name, value = option
        config = Config(**{name: value})
        kinds = typing.get_args(FIELDS[name].type) or (FIELDS[name].type,)
        assert type(getattr(config, name)) in kinds
        assert from_json(to_json(config)) == config

    fuzz(check, st.tuples(st.sampled_from(names), python_values))


# Command lines.

flag_names = st.one_of(
    st.sampled_from([*FIELDS, *(f"no{name}" for name in FIELDS), "views", "undefok"]),
    st.sampled_from(["flagfile", "batchsize", "x" * 3000, "help", ""]),
    any_text,
)
arguments = st.one_of(
    texts,
    flag_names.map(lambda name: f"--{name}"),
    st.builds(lambda name, value: f"--{name}={value}", flag_names, list_texts),
    st.builds(
        lambda name, value: f"-{name}={value}", flag_names, st.integers() | st.floats()
    ),
)


@many_inputs
@pytest.mark.row(17)
def test_any_command_line(fuzz):
    def check(arguments):
        values = absl_flags.FlagValues()
        flags.define_config_flags(values=values)
        flags.parse(["run_train.py", *arguments], values)
        config_of_flags("quickstart", RECIPES, flags.given_flags(values))

    fuzz(check, st.lists(arguments, max_size=4))
