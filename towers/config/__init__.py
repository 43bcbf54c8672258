"""Config, its checks, its tables and its list options; imports no TensorFlow."""

from towers.config.config import FIELDS as FIELDS
from towers.config.config import Config as Config
from towers.config.config import changed_mathematics as changed_mathematics
from towers.config.config import check_names as check_names
from towers.config.config import from_json as from_json
from towers.config.config import from_values as from_values
from towers.config.config import non_defaults as non_defaults
from towers.config.config import parse_json as parse_json
from towers.config.config import to_json as to_json
