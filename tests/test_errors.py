"""The exit codes that FAULTS promises to scripts."""

import inspect

import pytest

from towers import errors

EXIT_CODES = {
    "ConfigError": 2,
    "DataError": 3,
    "CheckpointError": 4,
    "NumericError": 5,
    "StuckError": 6,
    "Preempted": 75,  # EX_TEMPFAIL of sysexits.h
}


def test_exit_codes_are_the_promised_ones():
    found = {
        name: error.exit_code
        for name, error in inspect.getmembers(errors, inspect.isclass)
        if error is not errors.TowersError
    }
    assert found == EXIT_CODES


@pytest.mark.parametrize("name", EXIT_CODES)
def test_every_error_is_told_in_one_line_and_none_is_another(name):
    error = getattr(errors, name)("batch_size=0: must be at least 1")
    assert str(error) == "batch_size=0: must be at least 1"
    assert isinstance(error, errors.TowersError)
    others = [getattr(errors, other) for other in EXIT_CODES if other != name]
    assert not isinstance(error, tuple(others))


def test_a_wrong_option_is_a_value_error():
    assert issubclass(errors.ConfigError, ValueError)
