"""The layers of a run's options: a recipe, or the run in its folder, and flags.

A recipe is a Python file whose `get_config()` returns a Config.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

from towers.config.choices import CONTAINERS, find
from towers.config.config import FIELDS, Config, from_json, from_values, non_defaults
from towers.config.factories import function_in_file
from towers.config.options import check_option, check_path
from towers.config.pretrained import find_local_weights, how_to_get_weights
from towers.errors import ConfigError, did_you_mean
from towers.messages import IS_WHEEL, ROOT, one_line

# Recipes of a command without --config: without a data set, and with one of PHOTO_SETS
# from scratch or from trained weights.
DEFAULT_RECIPE = "quickstart"
PHOTO_SETS = ("image_folder", *(CONTAINERS.keys() - {"npz"}))
PHOTO_RECIPE, FINETUNE_RECIPE = "photos", "photos_finetune"

RECIPES = ROOT / ("towers/recipes" if IS_WHEEL else "configs")

# The file of a run's options in its folder.
CONFIG_JSON = "config.json"


class CommandLine(NamedTuple):
    """The config of a command line, and its origins."""

    config: Config
    workdir: pathlib.Path
    # Option that is not a default -> "flags", "run folder", or "recipe" with its name.
    origins: dict[str, str]
    remark: str  # names a recipe that the command does not name; may be empty


def config_of_flags(
    recipe: str | None,
    folder: pathlib.Path,
    given: dict[str, Any],
    workdir: str | None = None,
    stored_config: Callable[[pathlib.Path], Config | None] = lambda workdir: None,
    photo_options: Callable[[str, bool], dict[str, Any]] = lambda data_dir, tuned: {},
    weights_options: Callable[[str, str], dict[str, Any]] = lambda init_from, model: {},
) -> CommandLine:
    """Return the Config of a command line.

    The flags override the recipe, or without --config the config of the run in the run
    folder. If there is none, the recipe is DEFAULT_RECIPE, for a folder of images
    FINETUNE_RECIPE if its network has trained weights on this machine, else
    PHOTO_RECIPE; another data set has the defaults. If no data set is named, the
    content of --data_dir decides.

    Args:
        recipe: the value of --config, or None.
        folder: the folder of the recipes.
        given: `flags.given_flags`.
        workdir: the value of --workdir, or None.
        stored_config: run folder -> the config of the run in it, or None.
        photo_options: (the value of --data_dir, whether a folder of images is
            fine-tuned) -> options for what is there.
        weights_options: (the values of --init_from and --model) -> options.
    """
    for name, value in given.items():
        check_option(FIELDS[name], value)  # before TensorFlow is imported
    if workdir == "":
        raise ConfigError("--workdir is empty; give a folder, or omit it")
    check_path("workdir", workdir or "")
    if recipe and not workdir and _options_file(recipe, folder).name == CONFIG_JSON:
        why = f"--config={recipe} is a run, whose options a new one takes"
        way = "give the folder of the new run as --workdir; without --config, "
        raise ConfigError(f"{why}: {way}--workdir={recipe} continues that run")
    stored = stored_config(pathlib.Path(workdir)) if workdir and not recipe else None
    name, chosen, remark = recipe or "", {}, ""
    if not (recipe or stored):
        name, chosen = _default_recipe(folder, given, photo_options)
    stem = pathlib.Path(name).stem if name else "default"
    path, other = pathlib.Path(workdir or pathlib.Path("runs") / stem), ""
    if not workdir and (not recipe or "data_dir" in given):
        path, continued = _run_of_data(path, given.get("data_dir"), stored_config)
        stored = None if recipe else continued
        if path.name != stem:
            other = f"runs/{stem} is of another --data_dir; this run is in {path}"
    if stored is not None:
        base, layer = stored, "run folder"
    elif name:
        base, layer = load_recipe(name, folder), f"recipe {stem}"
        if not recipe:
            remark = _remark(name, folder, given)
            if "model" in given and name == PHOTO_RECIPE:
                chosen |= {"width": Config.width}  # the recipe's is for its own network
        base = dataclasses.replace(base, **chosen)
    else:
        base, layer = Config(**chosen), "chosen by data_dir"
    values, init_from = {}, given.get("init_from", "")
    if init_from and (stored is None or stored.init_from != init_from):
        values = weights_options(init_from, given.get("model", ""))
    # A size lets --center_crop be given; the run fills in the others.
    kept = {"model", "image_size"} if base.image_size else {"model"}
    values = {k: v if k in kept else FIELDS[k].default for k, v in values.items()}
    base = dataclasses.replace(base, **values)
    origins = dict.fromkeys(non_defaults(base), layer)
    if stored is None:
        for_images = (origins.keys() & chosen) - {"dataset"}
        origins |= dict.fromkeys(for_images, "chosen for the images")
    origins |= {name: "the trained weights" for name in values if name in kept}
    origins |= dict.fromkeys(given, "flags")
    if stored is None and "num_epochs" in given and "warmup_epochs" not in given:
        schedule = given.get("schedule", base.schedule)
        warmup = base.warmup_for(given["num_epochs"], schedule)
        if warmup != base.warmup_epochs:
            given = given | {"warmup_epochs": warmup}
            origins["warmup_epochs"] = "scaled to num_epochs"
    remark = "; ".join(filter(None, (remark, other)))
    return CommandLine(dataclasses.replace(base, **given), path, origins, remark)


def _run_of_data(path, data_dir, stored_config):
    """Return the first of path, path-2, ... without another data set, and its run."""
    place, stored = path, stored_config(path)
    for number in itertools.count(2):
        if stored is None or data_dir is None or _is_same(stored.data_dir, data_dir):
            break
        place = path.with_name(f"{path.name}-{number}")
        stored = stored_config(place)
    return place, stored


def _is_same(*data_dirs):
    return len({x and os.path.realpath(os.path.expanduser(x)) for x in data_dirs}) == 1


def _default_recipe(folder, given, photo_options):
    """Return the recipe of a new run without --config, if any, and options."""
    dataset, data_dir = given.get("dataset"), given.get("data_dir")
    if dataset is None and data_dir is None:
        return DEFAULT_RECIPE, {}
    if dataset not in (None, *PHOTO_SETS):
        return "", {}
    recipe, chosen = photo_recipe(folder, given), {"dataset": dataset}
    if dataset in (None, "image_folder"):
        chosen = photo_options(data_dir or "", recipe == FINETUNE_RECIPE)
    if not {dataset, chosen.get("dataset")} & {*PHOTO_SETS}:
        return "", chosen
    if recipe == FINETUNE_RECIPE and "init_from" not in given:
        _validate_weights(given.get("model"), folder)
    return recipe, chosen


def photo_recipe(folder: pathlib.Path, given: dict[str, Any]) -> str:
    """Return FINETUNE_RECIPE if there are trained weights, else PHOTO_RECIPE."""
    model = given.get("model") or load_recipe(FINETUNE_RECIPE, folder).model
    row = find("model", model)
    is_published = row.has_standardization or ("model" in given and row.pretrained)
    weights = given.get("init_from", is_published or find_local_weights(model))
    return FINETUNE_RECIPE if weights else PHOTO_RECIPE


def _validate_weights(model, folder):
    """Raise ConfigError if the trained weights of --model are not here."""
    needs_none = model is None or find("model", model).has_standardization
    if needs_none or find_local_weights(model):
        return
    way = f"{how_to_get_weights(model)}; or train from scratch with --init_from="
    if find_local_weights(usual := load_recipe(FINETUNE_RECIPE, folder).model):
        way += f"; or omit --model for {usual}, whose weights are here"
    why = "its trained weights, which few photos need, are not on this machine"
    raise ConfigError(f"model={model}: {why}: {way}")


def _remark(name, folder, given):
    if name not in (PHOTO_RECIPE, FINETUNE_RECIPE):
        begin, way = "no --config and no --dataset: ", "--list shows others"
        return f"{begin}training the recipe {name}; {way}"
    begin = "no --config, and --data_dir has images: "
    if name == FINETUNE_RECIPE:
        way = f"--config={PHOTO_RECIPE} trains one from scratch"
        return f"{begin}fine-tuning a trained network with the recipe {name}; {way}"
    model = given.get("model", load_recipe(FINETUNE_RECIPE, folder).model)
    way = f"a trained network learns more from few photos: {how_to_get_weights(model)}"
    if find_local_weights(model):
        way = "omit --init_from= to fine-tune a trained network"
    elif not find("model", model).pretrained:
        way = "without --model a trained network learns more from few photos"
    return f"{begin}training the recipe {name} from scratch; {way}"


def load_recipe(name: str, folder: pathlib.Path) -> Config:
    """Return the Config of a recipe's name, a file, or the folder of a run."""
    path = _options_file(name, folder)
    if path.suffix in (".json", ".yaml", ".yml") and path.is_file():
        read = from_json if path.suffix == ".json" else _from_yaml
        try:
            return read(path.read_bytes())
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from None
    if not os.path.isfile(path):
        recipes = recipe_names(folder)
        way = f"{did_you_mean(name, recipes)}recipes: {', '.join(recipes)}"
        raise ConfigError(f"--config={one_line(name, 100)}: no such file; {way}")
    config = function_in_file(path, "get_config")()
    if not isinstance(config, Config):
        shown = one_line(config, 100)
        raise ConfigError(f"{path}: get_config() gave {shown}, not a Config")
    return config


def _from_yaml(content):
    """Return the Config of YAML, in which the type of an option tells how it reads."""
    import yaml

    try:
        values = yaml.BaseLoader(content).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"not YAML: {one_line(error, 100)}") from None
    for name in FIELDS.keys() & (values if isinstance(values, dict) else {}):
        if FIELDS[name].type is not str:
            read = float if FIELDS[name].type is float else json.loads
            with contextlib.suppress(TypeError, ValueError):  # which Config refuses
                values[name] = read(values[name])
    return from_values(values)


def _options_file(name, folder):
    """Return the path of a recipe, a run folder's config.json, or a named file."""
    check_path("config", name)
    path = pathlib.Path(os.path.expanduser(name))
    if path.suffix in (".py", ".json", ".yaml", ".yml"):
        return path
    recipe, stored = folder / f"{name}.py", path / CONFIG_JSON
    return stored if os.path.isfile(stored) and not recipe.is_file() else recipe


def recipe_names(folder: pathlib.Path) -> list[str]:
    """Return the names of the recipes in a folder."""
    return sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_"))
