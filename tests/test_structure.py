"""The few rules about the source itself: import order, flags, names, recipes."""

import ast
import pathlib
import subprocess
import sys

import pytest

from towers.config import Config
from towers.config.recipes import load_recipe, recipe_names

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "towers"
ENTRY_POINTS = [
    ROOT / f"run_{name}.py" for name in ("train", "eval", "predict", "export")
]
RECIPES = ROOT / "configs"

# A package imports only packages of lower levels. Packages of one level do not import
# each other; inside of a package, modules may.
LEVELS = {
    "console": 0,
    **dict.fromkeys(["errors", "job_thread", "store"], 1),
    "config": 2,
    **dict.fromkeys(["data", "models", "optim"], 3),
    "parallel": 4,
    "run": 5,
    "build": 6,
    "evaluation": 7,
    **dict.fromkeys(["export", "training"], 8),
    "launch": 9,
    "on_ray": 10,
}

# They start run_train.py in processes of their own, and need TensorFlow in none of
# their own: name -> all that they may import.
LAUNCHERS = {
    "launch": ("errors", "config", "job_thread", "launch", "run.signals"),
    "on_ray": ("errors", "config", "launch", "run.signals", "quiet_imports"),
}

# Where flags are defined: by the programs, which are no part of the library.
COMMAND_LINES = (
    "towers/config/flags.py",
    "towers/config/cluster_spec.py",
    "towers/launch/__main__.py",
    "towers/on_ray.py",
)

# It runs in a process of its own, to show that an export needs nothing of towers.
OUTSIDE = "towers/export/load_in_new_process.py"

# Config is unpacked in build: of its package others know the tables and lists alone.
CONFIG_FREE = ("data", "models", "optim")
TABLES = tuple(
    f"config.{name}" for name in ("choices", "factories", "list_options", "synonyms")
)

# All that parallel/ may import: no data set, no network, no Config.
LAYERS = ("models.convolution", "models.cpu_kernels", "models.layers")
LOWER = ("data.part", "data.tta", "models.variables", *LAYERS)
BELOW_PARALLEL = ("errors", "job_thread", "optim", "parallel", *LOWER)

DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc"}
VAGUE = ("Manager", "Handler", "Helper")


def imported_modules(source, top_only=False):
    """Dotted names of all imports: `a.b` for `from a import b`."""
    tree = ast.parse(source)
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def complaints(path, source):
    """Violations in a module, its path relative to the root of the repository. A
    program may import from all packages."""
    package = pathlib.PurePosixPath(path).with_suffix("").parts[1]
    is_program = path.endswith("/__main__.py")
    for name in imported_modules(source):
        parts = name.split(".")
        if parts[0] == "benchmarks":
            yield f"{name}: the package does not measure itself"
        if name.startswith("."):
            yield "relative import"
        if f"{name}.".startswith("absl.flags.") and path not in COMMAND_LINES:
            yield f"{name}: flags outside of the command line"
        if parts[0] != "towers" or package == "__init__":
            continue
        if path == OUTSIDE:
            yield f"{name}: not for a program outside of towers"
        other = parts[1] if len(parts) > 1 and parts[1] in LEVELS else package
        if other != package and LEVELS[other] >= LEVELS[package] and not is_program:
            yield f"{name} is not below {package}"
        tables = tuple(f"towers.{table}." for table in TABLES)
        if package in CONFIG_FREE and other == "config":
            if not f"{name}.".startswith(tables):
                yield f"{name}: Config is unpacked in build"
        allowed = [f"towers.{known}." for known in BELOW_PARALLEL]
        if package == "parallel" and not f"{name}.".startswith(tuple(allowed)):
            yield f"{name}: not for parallel/"
        allowed = [f"towers.{known}." for known in LAUNCHERS.get(package, ())]
        if package in LAUNCHERS and not f"{name}.".startswith(tuple(allowed)):
            yield f"{name}: a launcher trains nothing itself"
    if pathlib.PurePosixPath(path).stem in DRAWERS:
        yield "a drawer for odds and ends"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name.endswith(VAGUE):
            yield f"{node.name}: a vague name"


@pytest.mark.parametrize("package", ["__init__", *LEVELS])
def test_modules_keep_the_rules(package):
    paths = [*PACKAGE.glob(f"{package}.py"), *PACKAGE.glob(f"{package}/**/*.py")]
    assert paths
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        assert not list(complaints(name, path.read_text())), name


@pytest.mark.parametrize(
    "path,source",
    [
        ("towers/errors.py", "from towers import config"),
        ("towers/data/x.py", "from towers.models.layers import Conv2D"),
        ("towers/data/x.py", "from towers.run.signals import exit_on_signals"),
        ("towers/optim/x.py", "from towers.config import Config"),
        ("towers/run/x.py", "def f():\n    import towers.build"),
        ("towers/optim/x.py", "from towers.parallel.trainer import Trainer"),
        ("towers/evaluation/x.py", "from towers.training import train"),
        ("towers/parallel/x.py", "from towers.config import Config"),
        ("towers/parallel/sharding/x.py", "from towers.data import DataSet"),
        ("towers/parallel/x.py", "from towers.models import MODELS"),
        ("towers/parallel/x.py", "from benchmarks.graphs.memory import step_memory"),
        ("towers/parallel/x.py", "import towers.models.cnn"),
        ("towers/models/x.py", "from . import layers"),
        ("towers/config/x.py", "from absl import flags"),
        ("towers/launch/x.py", "from towers.training import train"),
        ("towers/launch/x.py", "from towers.run.log import say"),
        ("towers/training.py", "from towers.launch.local import launch"),
        ("towers/training/x.py", "from towers.export import export"),
        ("towers/export/x.py", "from towers.training import train"),
        ("towers/evaluation/x.py", "from towers.export import export"),
        ("towers/export/load_in_new_process.py", "from towers.errors import one_line"),
        ("towers/launch/x.py", "from towers.on_ray import run"),
        ("towers/on_ray.py", "from towers.training import train"),
        ("towers/run/utils.py", ""),
        ("towers/data/x.py", "class SourceManager: ..."),
    ],
)
def test_each_rule_can_be_broken(path, source):
    assert list(complaints(path, source))


def test_every_package_has_a_level():
    names = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    assert names - {"__init__", "__pycache__"} == set(LEVELS)


def test_a_command_refuses_wrong_flags_before_it_imports_tensorflow():
    names = [n for p in ENTRY_POINTS for n in imported_modules(p.read_text(), True)]
    modules = {name for name in names if name.startswith("towers")}
    script = "import pkgutil, sys\n"
    script += f"for name in {sorted(modules)}: pkgutil.resolve_name(name)\n"
    script += "print(sorted({'tensorflow', 'keras', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    assert modules and done.stdout.strip() == "[]", done.stderr


def test_entry_points_only_parse_and_call():
    assert sorted(ROOT.glob("run_*.py")) == sorted(ENTRY_POINTS)
    for path in ENTRY_POINTS:
        assert len(path.read_text().splitlines()) <= 60, path.name


@pytest.mark.parametrize("name", recipe_names(RECIPES))
def test_every_recipe_gives_a_config_and_its_command(name):
    assert type(load_recipe(name, RECIPES)) is Config
    docstring = ast.get_docstring(ast.parse((RECIPES / f"{name}.py").read_text()))
    assert f"python run_train.py --config={name}" in docstring


def test_there_are_recipes():
    assert {"cifar10_cnn", "quickstart"} <= set(recipe_names(RECIPES))
