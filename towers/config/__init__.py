"""Config, its checks, its flags and its list options; imports no TensorFlow."""

from towers.config.config import (
    FIELDS,
    Config,
    changed_mathematics,
    check_names,
    from_json,
    from_values,
    non_defaults,
    parse_json,
    to_json,
)

__all__ = [
    "FIELDS",
    "Config",
    "changed_mathematics",
    "check_names",
    "from_json",
    "from_values",
    "non_defaults",
    "parse_json",
    "to_json",
]
