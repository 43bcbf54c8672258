"""Config as JSON: the `config.json` of a run."""

import dataclasses
import json

from towers.config.config import Config, replace
from towers.errors import ConfigError

# Values of `views`, the former name of `tta`, in older files.
_TTA_OF_VIEWS = {
    "plain": "none",
    "mirror": "mirror",
    "six": "translate",
    "six_unsure": "translate_unsure",
}


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str) -> Config:
    """The Config of a stored `config.json`; fields that it lacks take their default."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not a config.json: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError("not a config.json: an object of options is expected")
    if "views" in values:
        views = values.pop("views")
        values["tta"] = _TTA_OF_VIEWS.get(views, views)
    return replace(Config(), values)
