"""What of a parametrized test is left to `make test-all`."""

import pytest


def slow(*values, id=None):
    """These arguments of a test, in the slow suite."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)
