"""List options: what they mean, and which are refused."""

import pytest
from refused import refusal

from towers.config import Config


@pytest.mark.parametrize(
    "name,text,values",
    [
        ("epoch_factors", "", ()),
        (
            "epoch_factors",
            "0.5:2, 30:1e-1,60:0",
            ((0.5, 2.0), (30.0, 0.1), (60.0, 0.0)),
        ),
        ("crop_scale", "0.35, 1", (0.35, 1.0)),
        ("rand_augment", "1, 30", (1, 30)),
        ("early_sizes", "", ()),
        ("early_sizes", "16:.2,24:.9", ((16, 0.2), (24, 0.9))),
        ("param_rates", "", ()),
        ("param_rates", "*/bias:0", (("*/bias", 0.0, None),)),
        ("param_rates", "fc/*:0.5:3,*:1e-3", (("fc/*", 0.5, 3.0), ("*", 0.001, None))),
        ("freeze", "", ()),
        ("freeze", "stem*, conv1/*", ("stem*", "conv1/*")),
        ("optimizer_options", "", {}),
        ("optimizer_options", "beta3:0.99, warm:-5", {"beta3": 0.99, "warm": -5.0}),
    ],
)
def test_a_list_has_the_values_that_are_written(name, text, values):
    config = Config(**{name: text})
    assert config.lists[name] == values
    assert getattr(config, name) == text


WRONG = {
    "epoch_factors": [
        *("30", "30:0.1,", "30:0.1:5", "thirty:0.1", "30:0.1;60:0.01", "0:0.1"),
        *("30:0.1,20:0.01", "30:0.1,30:0.01", "nan:0.1", "inf:0.1"),
        *("30:-0.1", "30:nan", "30:inf"),
    ],
    "crop_scale": ["", "0.5", "0,1", "0.5,1.1", "0.5,0.4", "0.1,0.2,0.3", "0.1:1"],
    "rand_augment": ["", "2", "0,9", "15,9", "2,31", "2,-1", "2,9,1", "2.5,9", "2:9"],
    "early_sizes": [
        *("24", "24:0.5,", "24.5:0.5", "24:0.5:1", "0:0.5", "24:0", "24:1", "24:nan"),
        *("16:0.5,24:0.5", "24:0.2,24:0.5"),
    ],
    "param_rates": [
        *("*/bias", "*/bias:two", "*/bias:1:2:3", "*/bias:2,", "*/bias:-1"),
        *("*/bias:2:-1", "*/bias:2:0", "*/bias:inf", "*/bias:nan", "stem/*:0:3"),
    ],
    "freeze": [",", "stem*,", "stem*, ,conv1/*"],
    "optimizer_options": ["beta3", "a:b", "a:1:2", "a:1,a:2", "a:nan", "2a:1"],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_list_is_refused_with_its_wrong_part(name):
    for text in WRONG[name]:
        message = refusal(**{name: text})
        assert message.startswith(f"{name}={text!r}: '")
        assert any(f"{part!r} should be " in message for part in text.split(","))
        assert ", such as " in message
