"""What a config says to options that it refuses."""

import pytest

from towers.config import Config
from towers.errors import ConfigError


def refusal(**options):
    """The message, of one line, with which these options are refused."""
    with pytest.raises(ConfigError) as caught:
        Config(**options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
