"""The JSON of a run's files, and Config in that form."""

import dataclasses
import json
from typing import Any

from towers.config.config import Config
from towers.errors import ConfigError


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str | bytes) -> Config:
    """The Config of a stored `config.json`; fields that it lacks take their default."""
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"not a config.json: {error}") from None
    return from_values(values)


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text; a ValueError where it is none, or nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def from_values(values: Any) -> Config:
    """The Config of a stored object of options."""
    if not isinstance(values, dict):
        raise ConfigError("not a config.json: an object of options is expected")
    return Config(**values)
