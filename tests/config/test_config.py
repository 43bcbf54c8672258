"""Options that contradict each other, and what a resumed run may change."""

import dataclasses
import inspect
import itertools
import json

import pytest
from refused import refusal

from towers.config import FIELDS, Config, changed_mathematics, from_json, to_json
from towers.errors import ConfigError

# Options that some values of an option need.
NEEDED = {"center_crop": {"image_size": 32}, "repeats": {"batch_size": 1_000_000}}
NEEDED["momentum"] = {"optimizer": "sgd"}

NUMBERS = [name for name, field in FIELDS.items() if field.type in (int, float)]


# Types and bounds.


def test_a_wrong_type_is_refused():
    for name, field in FIELDS.items():
        kind = field.type
        word = "int or str" if kind == int | str else kind.__name__
        other = {bool: 1, int: 2.0, float: "0.1", str: 10, int | str: 2.0}[kind]
        for wrong in (other, None, [0]):
            message = refusal(**{name: wrong})
            assert message.startswith(f"{name}=")
            assert f"must be {word}, is {type(wrong).__name__}" in message
    for name in NUMBERS:
        kind = FIELDS[name].type.__name__
        assert f"must be {kind}, is bool" in refusal(**{name: True})


@pytest.mark.parametrize("name", NUMBERS)
def test_bounds_are_where_the_meaning_ends(name):
    kind, bounds = FIELDS[name].type, FIELDS[name].metadata["range"]
    step = 1 if kind is int else 1e-3
    for bound, inward, is_inside in (
        (bounds.at_least, step, True),
        (bounds.above, step, False),
        (bounds.at_most, -step, True),
        (bounds.below, -step, False),
    ):
        if bound is None:
            continue
        best = kind(bound if is_inside else bound + inward)
        assert getattr(Config(**NEEDED.get(name, {}), **{name: best}), name) == best
        bad = kind(bound - inward * (abs(bound) + 1) if is_inside else bound)
        assert refusal(**{name: bad}).startswith(f"{name}={bad}: must be ")
    assert bounds.at_least is not None or bounds.above is not None


@pytest.mark.row(40)
def test_row_40_integers_beyond_64_bits_are_refused_in_a_short_line():
    for name, value in itertools.product(FIELDS, (2**63, -(2**64), 10**400, 10**5000)):
        message = refusal(**{name: value})
        assert message.startswith(f"{name}=") and "must be " in message
        assert len(message) <= 400


def test_a_wrong_choice_names_the_nearest_and_lists_all():
    for name, field in FIELDS.items():
        if names := field.metadata["choices"]:
            near, far = (refusal(**{name: typed}) for typed in (names[-1][1:], "zzz"))
            assert f"did you mean {names[-1]!r}?" in near and "did you mean" not in far
            assert ", ".join(names) in near and ", ".join(names) in far


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "num_towers": 9},
        {"strategy": "model_parallel", "num_towers": 6, "group_size": 4},
        {"parameter_device": "gpu", "device": "cpu"},
        {"optimizer": "nesterov", "momentum": 0.0},
        {"optimizer": "muon", "strategy": "model_parallel"},
        {"schedule": "piecewise", "epoch_factors": ""},
        {"warmup_epochs": 3.0, "num_epochs": 2.0},
        {"image_size": 8, "max_image_pixels": 63},
        {"repeats": 5, "batch_size": 4},
        {"init_from": "imagenet", "model": "cnn"},
        {"augment": "tutorial", "model": "keras:ResNet50"},
        {"compile": "xla", "batch_norm": "sync"},
        {"compile": "xla", "strategy": "model_parallel"},
        *(
            {name: value, "strategy": "async_towers", "async_scale_gradients": False}
            for name, value in (
                ("accumulate_steps", 2),
                ("batch_norm", "sync"),
                ("precision", "float16"),
                ("input", "resident"),
            )
        ),
        *(
            {"optimizer": n, "async_scale_gradients": True, "strategy": "async_towers"}
            for n in ("rmsprop", "adamw", "lars", "muon")
        ),
    ],
    ids="-".join,
)
@pytest.mark.row(16)
def test_options_that_contradict_are_refused_with_both_values(options):
    message = refusal(**options).partition(": ")[0]
    named = dict(text.split("=", 1) for text in message.split(" with "))
    assert (
        len(named) == 2
        and named.items()
        <= {name: str(value) for name, value in options.items()}.items()
    )
    for name in named:
        default = FIELDS[name].default
        if options[name] != default:
            Config(**options | {name: default})


def test_an_image_size_is_an_int_or_a_height_and_a_width():
    for given, value in (("96", 96), ("0", 0), ("96x96", 96), ("96X128", "96x128")):
        config = Config(image_size=given)
        assert config.image_size == value and type(config.image_size) is type(value)
        assert json.loads(to_json(config))["image_size"] == value
        assert from_json(to_json(config)) == config
    for wrong in ("", "x", "96x", "0x96", "96x128x3", "96*128", "9.5", "-96x128"):
        assert "96x128" in refusal(image_size=wrong)
    assert "at least 0" in refusal(image_size="-96")
    Config(image_size="100x101", max_image_pixels=10_100)
    assert "10,100 pixels" in refusal(image_size="100x101", max_image_pixels=10_099)


# Changing and storing.


def test_an_unknown_option_is_answered_with_the_nearest():
    assert "'bach_size'; did you mean 'batch_size'?" in refusal(bach_size=3)
    with pytest.raises(ConfigError, match=r"'lr'; did you mean 'learning_rate'"):
        dataclasses.replace(Config(), lr=3)
    assert list(inspect.signature(Config).parameters) == list(FIELDS)


# Row 9.


def test_a_change_of_the_mathematics_is_reported_with_both_values():
    stored, new = Config(), Config(optimizer="adamw", device="cpu", max_steps=3)
    assert changed_mathematics(stored, new) == {"optimizer": ("nesterov", "adamw")}
    assert from_json(to_json(new)) == new


def test_the_length_may_not_change_where_rates_or_sizes_depend_on_it():
    schedules = ("cosine", "linear", "one_cycle", "a.py:b")
    for options in *({"schedule": x} for x in schedules), {"early_sizes": "16:0.5"}:
        stored = Config(**options, num_epochs=2.0)
        longer = dataclasses.replace(stored, num_epochs=4.0)
        assert changed_mathematics(stored, longer) == {"num_epochs": (2.0, 4.0)}
