"""The few rules about the source itself: imports, names, programs, recipes."""

import ast
import pathlib
import re

import pytest
from engines import mutants

from towers.cli.recipes import load_recipe, recipe_names
from towers.config import Config

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMANDS = ("train", "eval", "predict", "export")
ENTRY_POINTS = [ROOT / f"run_{name}.py" for name in COMMANDS]
RECIPES = ROOT / "configs"


def test_packages_import_as_pyproject_says():
    linter = pytest.importorskip("importlinter.cli")
    assert linter.lint_imports(str(ROOT / "pyproject.toml"), cache_dir=None) == 0


def test_every_mutant_breaks_one_line():
    for mutant in mutants.read_table():
        mutants.broken(ROOT, mutant)


def test_entry_points_only_parse_and_call():
    assert sorted(ROOT.glob("run_*.py")) == sorted(ENTRY_POINTS)
    commands = (ROOT / f"towers/cli/{name}.py" for name in (*COMMANDS, "main"))
    for path in (*ENTRY_POINTS, *commands):
        assert len(path.read_text().splitlines()) <= 60, path.name


def test_every_recipe_gives_a_config_and_its_command():
    names = recipe_names(RECIPES)
    assert {"cifar10_cnn", "quickstart"} <= set(names)
    for name in names:
        assert type(load_recipe(name, RECIPES)) is Config
        docstring = ast.get_docstring(ast.parse((RECIPES / f"{name}.py").read_text()))
        assert f"python run_train.py --config={name}" in docstring


def test_the_code_says_it_in_plain_words():
    """Names begin with MAX_ and MIN_, comments say what a value is, "not" negates."""
    dialect = (
        r"\b_?(MOST|LEAST|FEWEST)_|# Of |(?<![Tt]here )\b(is|are) no (?!longer|more)"
    )
    files = {x for x in ROOT.rglob("*.py") if ".venv" not in str(x)}
    for path in files - {pathlib.Path(__file__)}:
        assert not re.search(dialect, path.read_text()), path
