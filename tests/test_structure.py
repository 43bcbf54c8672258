"""The house stands as it was drawn: floors, tables, recipes, a test file per module."""

import ast
import dataclasses
import pathlib
import subprocess
import sys

import pytest

from towers import data, models, parallel
from towers.config import config
from towers.config.flags import load_recipe, recipe_names
from towers.data import augment
from towers.optim import optimizers, schedules

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "towers"
ENTRY_POINTS = sorted(ROOT.glob("run_*.py"))

# A module imports only from lower floors. The package itself, which settles how
# TensorFlow starts, lies below them all.
FLOORS = {
    "towers": -1,
    "errors": 0,
    "background": 1,
    "option_texts": 1,
    "rhythm": 1,
    "config_checks": 2,
    "config": 3,
    "losses": 2,
    "schedules": 2,
    "optimizers": 1,
    "update": 2,
    "data": 2,
    "models": 2,
    "parallel": 3,
    "checkpoint_files": 1,
    "checkpoints": 3,
    "summaries": 3,
    "watchdog": 3,
    "run_folder": 4,
    "optimisation": 4,
    "build": 5,
    "banner": 6,
    "evaluate": 6,
    "run": 6,
    "train": 7,
    "config_flags": 8,
}

# Within a sub-package, from the ground up; those of one line do not import each other.
ROOMS = {
    "data": [
        {"decoding", "idx", "indexed", "randomness", "records", "sources", "streams"},
        {"augment", "embedded", "encoded", "synthetic", "tfds"},
        {"distortions", "download", "image_folder", "tfds_source"},
        {"mixing", "official"},
        {"batches", "cifar", "mnist"},
        {"cifar10", "cifar100", "resident"},
        {"__init__"},
        {"check"},
        {"__main__"},
    ],
    "models": [
        {"activations", "layers", "sizes", "whitening", "winograd"},
        {"convolution"},
        {"blocks", "flops"},
        {"alexnet", "cnn", "convmixer", "lenet", "resnet", "speedrun", "wide_resnet"},
        {"__init__"},
    ],
    "parallel": [
        {
            "coordinator",
            "device_tape",
            "devices",
            "gradients",
            "loss_scale",
            "memory",
            "stages",
            "views",
        },
        {
            "all_reduce",
            "slices",
            "split",
            "strategy",
            "sync_batch_norm",
            "tower",
            "variables",
        },
        {"loop", "tower_strategy", "walk"},
        {"walker"},
        {"synchronous"},
        {"async_towers", "model_parallel", "replicated", "towers"},
        {"__init__"},
    ],
}

# What a module may import of the lower floors, where that is not all of them.
ONLY = {
    # Wrong flags are refused before the four seconds that TensorFlow takes.
    "config_flags": {"errors", "config", "config_checks"},
    # It knows no model, no data set and no Config; of layers only how to split them.
    "parallel": {
        "errors",
        "losses",
        "optimizers",
        "update",
        "models.activations",
        "models.convolution",
        "models.layers",
    },
}

# Config is unpacked here; lower floors take plain keyword arguments.
READERS_OF_CONFIG = {
    "optimisation",
    "run_folder",
    "build",
    "banner",
    "evaluate",
    "run",
    "train",
    "config_flags",
}

# Modules whose tests lie in another file than test_<module>.py, and why.
GROUPED = {
    "optimisation.py": "test_build",  # a part of it
    "update.py": "test_optimizers",  # every optimizer is tested inside of it
    "__init__.py": "test_config_flags",  # how a command starts
    "config_checks.py": "test_config",  # what a Config refuses
    "checkpoint_files.py": "test_checkpoints",
    "banner.py": "test_train",  # what a run says and saves is seen in a run
    "data/__init__.py": "test_structure",  # a table
    "data/__main__.py": "test_check",  # the command that checks
    # What the data sets of one layout, or of all, share is seen in each of them.
    "data/cifar.py": "test_cifar10",
    "data/decoding.py": "test_encoded",  # images are read and decoded in one
    "data/idx.py": "test_mnist",
    "data/indexed.py": "test_tfds_source",
    "data/official.py": "test_cifar10",
    "data/records.py": "test_cifar10",
    "models/__init__.py": "test_models",
    # Rows in a table of networks, and what only networks are made of.
    "models/alexnet.py": "test_models",
    "models/blocks.py": "test_models",
    "models/cnn.py": "test_models",
    "models/convmixer.py": "test_models",
    "models/lenet.py": "test_models",
    "models/resnet.py": "test_models",
    "models/sizes.py": "test_models",
    "models/speedrun.py": "test_models",
    "models/whitening.py": "test_models",
    "models/wide_resnet.py": "test_models",
    "parallel/__init__.py": "test_structure",  # a table
    # Strategies meet one contract, and one file of tests asks it of all of them.
    "parallel/loop.py": "test_strategies",
    "parallel/model_parallel.py": "test_strategies",
    "parallel/replicated.py": "test_strategies",
    "parallel/strategy.py": "test_strategies",
    "parallel/synchronous.py": "test_strategies",
    "parallel/tower_strategy.py": "test_strategies",
    "parallel/towers.py": "test_strategies",
    "parallel/variables.py": "test_strategies",
    # What the walker alone is made of.
    "parallel/device_tape.py": "test_walker",
    "parallel/slices.py": "test_walker",
    "parallel/split.py": "test_walker",
    "parallel/sync_batch_norm.py": "test_walker",
    "parallel/walk.py": "test_walker",
}

MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}


def dotted(name):
    """data/augment.py -> towers.data.augment; a package is called by its own name."""
    parts = ["towers", *pathlib.PurePosixPath(name).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


ALL_NAMES = {dotted(name) for name in MODULES}


def imports(source):
    """The modules of towers that a source imports, at its top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in ALL_NAMES else node.module)
    return {name for name in found if name.split(".")[0] == "towers"}


def floor_name(module):
    """towers.data.augment -> data"""
    return (module.split(".") + ["towers"])[1] if "." in module else "towers"


def room_index(package, module):
    """The line of ROOMS on which a module of a sub-package stands."""
    stem = module.removeprefix(f"towers.{package}").lstrip(".") or "__init__"
    return next(i for i, names in enumerate(ROOMS[package]) if stem in names)


def is_allowed(floor, other):
    """Whether a floor that may import only a few of the lower ones may import this."""
    parts = other.split(".")[1:]
    return floor not in ONLY or bool({parts[0], ".".join(parts)} & ONLY[floor])


def objections(module, imported):
    """What is wrong with a module that imports these."""
    here, found = floor_name(module), []
    for other in sorted(imported - {module}):
        there = floor_name(other)
        if here == there:
            if room_index(here, other) >= room_index(here, module):
                found.append(f"{module} imports its neighbour {other}")
        elif FLOORS[there] >= FLOORS[here]:
            found.append(f"{module} imports {other} of a floor that is not lower")
        elif there != "towers" and not is_allowed(here, other):
            found.append(f"{module} imports {other}, which it should not know")
        elif there == "config" and here not in READERS_OF_CONFIG:
            found.append(f"{module} imports Config: it takes plain arguments")
    return found


@pytest.mark.parametrize("name", sorted(MODULES))
def test_modules_import_lower_floors_only(name):
    assert not objections(dotted(name), imports(MODULES[name].read_text()))


@pytest.mark.parametrize(
    "module,source",
    [
        ("towers.errors", "from towers import config"),
        ("towers.losses", "from towers import update"),
        ("towers.optimizers", "from towers import update"),
        ("towers.losses", "def f():\n    import towers.parallel.tower"),
        ("towers.data.augment", "from towers.data import batches"),
        ("towers.data.augment", "from towers.data.tfds import download"),
        ("towers.data.sources", "from towers.data import DataSet"),
        ("towers.models.cnn", "from towers.models import initialize"),
        ("towers.models.cnn", "from towers.data.sources import Source"),
        ("towers.parallel.tower", "from towers.models import IMAGES"),
        ("towers.parallel.gradients", "from towers.parallel import tower"),
        ("towers.checkpoints", "from towers.summaries import say"),
        ("towers.optimizers", "from towers.config import Config"),
        ("towers.evaluate", "from towers.train import train"),
        ("towers.config_flags", "from towers import schedules"),
        ("towers.config_flags", "from towers.data import DATASETS"),
    ],
)
def test_the_walk_objects_to_forbidden_imports(module, source):
    assert objections(module, imports(source))


def test_every_module_stands_on_a_floor():
    assert set(FLOORS) == {floor_name(module) for module in ALL_NAMES}
    for package, rooms in ROOMS.items():
        found = sorted(path.stem for path in (PACKAGE / package).glob("*.py"))
        assert found == sorted(stem for names in rooms for stem in names), package


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_has_tests(name):
    test = GROUPED.get(name, f"test_{MODULES[name].stem}")
    assert (ROOT / "tests" / f"{test}.py").is_file()


def test_no_module_is_a_drawer_for_odds_and_ends():
    stems = {path.stem for path in MODULES.values()}
    assert not stems & {"utils", "util", "common", "helpers", "helper", "misc"}
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                vague = ("Manager", "Handler", "Helper")
                assert not node.name.endswith(vague), f"{path.name}: {node.name}"


def test_flags_appear_only_at_the_command_line():
    users = set()
    for path in [*MODULES.values(), *ENTRY_POINTS, *ROOT.glob("configs/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            else:
                continue
            if any(f"{name}.".startswith("absl.flags.") for name in names):
                users.add(path.name)
    assert users == {"config_flags.py", "run_train.py", "run_eval.py"}


def test_what_a_command_imports_before_its_flags_are_checked_is_not_tensorflow():
    # The same modules that run_train.py imports at its top.
    modules = "config_flags, quiet_imports, run_folder, rhythm, watchdog"
    script = f"import sys\nfrom towers import {modules}\n"
    script += "print({'tensorflow', 'keras', 'numpy'} & set(sys.modules) or 'neither')"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.strip() == "neither", done.stderr


def test_entry_points_only_parse_and_call():
    assert [path.name for path in ENTRY_POINTS] == ["run_eval.py", "run_train.py"]
    for path in ENTRY_POINTS:
        assert len(path.read_text().splitlines()) <= 60, path.name


@pytest.mark.parametrize(
    "choices,table",
    [
        (config.DATASETS, data.DATASETS),
        (config.AUGMENTS, augment.AUGMENTS),
        (config.MODELS, models.MODELS),
        (config.OPTIMIZERS, optimizers.OPTIMIZERS),
        (config.SCHEDULES, schedules.SCHEDULES),
        (config.STRATEGIES, parallel.STRATEGIES),
    ],
    ids=["datasets", "augments", "models", "optimizers", "schedules", "strategies"],
)
def test_choices_are_the_keys_of_their_table(choices, table):
    assert sorted(choices) == sorted(table)


@pytest.mark.parametrize("table", [data.DATASETS, parallel.STRATEGIES])
def test_entries_of_a_table_can_be_called(table):
    assert table and all(callable(entry) for entry in table.values())


@pytest.mark.parametrize("name", recipe_names(ROOT / "configs"))
def test_every_recipe_gives_a_config_and_its_command(name):
    recipe = load_recipe(name, ROOT / "configs")
    assert dataclasses.is_dataclass(recipe) and type(recipe) is config.Config
    docstring = ast.get_docstring(
        ast.parse((ROOT / "configs" / f"{name}.py").read_text())
    )
    assert f"python run_train.py --config={name}" in docstring


def test_there_are_recipes():
    assert {"cifar10_cnn", "quickstart"} <= set(recipe_names(ROOT / "configs"))
