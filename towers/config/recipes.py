"""Recipes: Python files whose `get_config()` gives a Config."""

import importlib.util
import os
import pathlib
import re

from towers.config.config import FIELDS, Config
from towers.config.factories import importing_from, line_of_error
from towers.config.synonyms import suggestion
from towers.errors import ConfigError, nearest, one_line


def load_recipe(name: str, folder: pathlib.Path) -> Config:
    """The Config of a recipe: a name in `folder`, or the path of a Python file.

    Raises:
        ConfigError: there is no such recipe, or it gives no Config.
    """
    path = pathlib.Path(name) if name.endswith(".py") else folder / f"{name}.py"
    if not os.path.isfile(path):
        recipes = recipe_names(folder)
        raise ConfigError(
            f"--config={one_line(name, 100)}: there is no such file; "
            f"{nearest(name, recipes)}recipes: {', '.join(recipes)}"
        )
    try:
        # A recipe calls another by importing it from its own folder.
        with importing_from(path.parent.resolve()):
            spec = importlib.util.spec_from_file_location(path.stem, path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            config = module.get_config()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except BaseException as error:  # a recipe may raise what it likes
        raise ConfigError(
            f"{line_of_error(path, error)}: {_with_nearest_option(error)}"
        ) from None
    if not isinstance(config, Config):
        given = one_line(config, 100)
        raise ConfigError(f"{path}: get_config() gave {given}, not a Config")
    return config


def recipe_names(folder: pathlib.Path) -> list[str]:
    return sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_"))


def _with_nearest_option(error):
    text = one_line(error)
    unknown = re.search(r"unexpected keyword argument '(\w+)'", text)
    if not unknown:
        return f"{type(error).__name__}: {text}"
    near = suggestion(unknown[1], FIELDS)
    return f"there is no option {unknown[1]!r}; {near}".rstrip("; ")
