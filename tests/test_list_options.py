"""Lists of numbers in an option: what they mean, and which are refused."""

import re

import pytest
from refused import refusal

from towers.config import Config, list_options


@pytest.mark.parametrize(
    "text,pairs",
    [
        ("", ()),
        ("30:0.1", ((30.0, 0.1),)),
        ("0.5:2, 30:1e-1,60:0", ((0.5, 2.0), (30.0, 0.1), (60.0, 0.0))),
    ],
)
def test_epoch_factors_are_pairs(text, pairs):
    assert list_options.parse_epoch_factors(text) == pairs
    assert Config(epoch_factors=text).epoch_factors == text


@pytest.mark.parametrize(
    "text,rates",
    [
        ("", ()),
        ("*/bias:2", (("*/bias", 2.0, None),)),
        ("*/bias:0", (("*/bias", 0.0, None),)),
        ("fc/*:0.5:3,*:1e-3", (("fc/*", 0.5, 3.0), ("*", 0.001, None))),
    ],
)
def test_param_rates_are_patterns_with_one_number_or_two(text, rates):
    assert list_options.parse_param_rates(text) == rates
    assert Config(param_rates=text).param_rates == text


@pytest.mark.parametrize(
    "text,sizes",
    [("", ()), ("24:0.5", ((24, 0.5),)), ("16:.2,24:.9", ((16, 0.2), (24, 0.9)))],
)
def test_early_sizes_are_pixels_and_a_part_of_the_run(text, sizes):
    assert list_options.parse_early_sizes(text) == sizes
    assert Config(early_sizes=text).early_sizes == text


@pytest.mark.parametrize(
    "text,words",
    [
        ("24", "'24' should be pixels and a part of the run, such as 24:0.5"),
        ("24:0.5,", "'' should be"),
        ("24.5:0.5", "'24.5:0.5' should be"),
        ("24:0.5:1", "'24:0.5:1' should be"),
        ("0:0.5", "'0:0.5' should have more than 0 pixels"),
        ("24:0", "'24:0' should .* and end between 0 and 1, parts of the run"),
        ("24:1", "'24:1' should"),
        ("24:nan", "'24:nan' should"),
        ("16:0.5,24:0.5", "'24:0.5' should .* between 0.5 and 1"),
        ("24:0.2,24:0.5", "'24:0.5' should have more than 24 pixels"),
    ],
)
def test_early_sizes_that_are_wrong_are_refused(text, words):
    message = refusal(early_sizes=text)
    assert message.startswith(f"early_sizes={text!r}: ")
    assert re.search(words, message)


@pytest.mark.parametrize(
    "text,words",
    [
        ("*/bias", ["'*/bias' should be", "such as */bias:2"]),
        ("*/bias:two", ["'*/bias:two' should be"]),
        ("*/bias:1:2:3", ["'*/bias:1:2:3' should be"]),
        ("*/bias:2,", ["'' should be"]),
        ("*/bias:-1", ["'*/bias:-1' must have a finite factor of at least 0"]),
        ("*/bias:2:-1", ["finite number of epochs above 0"]),
        ("*/bias:2:0", ["finite number of epochs above 0"]),
        ("*/bias:inf", ["must have a finite factor"]),
        ("*/bias:nan", ["must have a finite factor"]),
        ("*/bias:2,stem/*:0:3", ["'stem/*:0:3' is 0 from the start"]),
    ],
)
def test_param_rates_that_are_wrong_are_refused(text, words):
    message = refusal(param_rates=text)
    assert message.startswith(f"param_rates={text!r}: ")
    assert all(word in message for word in words)


@pytest.mark.parametrize(
    "text,words",
    [
        ("30", ["'30'", "such as 30:0.1"]),
        ("30:0.1,", ["''", "such as 30:0.1"]),
        ("30:0.1:5", ["'30:0.1:5'"]),
        ("thirty:0.1", ["'thirty:0.1'"]),
        ("30:0.1;60:0.01", ["'30:0.1;60:0.01'"]),
        ("0:0.1", ["epoch 0 must be finite and above 0"]),
        ("30:0.1,20:0.01", ["epoch 20 must be finite and above 30"]),
        ("30:0.1,30:0.01", ["epoch 30 must be finite and above 30"]),
        ("nan:0.1", ["epoch nan"]),
        ("inf:0.1", ["epoch inf must be finite"]),
        ("30:-0.1", ["factor -0.1"]),
        ("30:nan", ["factor nan"]),
        ("30:inf", ["factor inf"]),
    ],
)
def test_epoch_factors_that_are_wrong_are_refused_whatever_the_schedule(text, words):
    for schedule in ("piecewise", "constant"):
        message = refusal(epoch_factors=text, schedule=schedule)
        assert message.startswith(f"epoch_factors={text!r}: ")
        for word in words:
            assert word in message


def test_optimizer_options_are_names_with_numbers():
    parsed = list_options.parse_optimizer_options("beta3:0.99, warm:5")
    assert parsed == {"beta3": 0.99, "warm": 5.0}
    assert list_options.parse_optimizer_options("") == {}


@pytest.mark.parametrize("text", ["beta3", "a:b", "a:1:2", "a:1,a:2", "a:nan", "2a:1"])
def test_optimizer_options_written_in_another_way_are_refused(text):
    message = refusal(optimizer_options=text)
    assert message.startswith(f"optimizer_options={text!r}: ")
    assert "beta3:0.99" in message
