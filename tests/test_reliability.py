"""The table of docs/reliability.md: every row names tests, and they exist."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text()
ROW = re.compile(r"^\| (\d+) \|.*\|$", re.MULTILINE)
CITED = re.compile(r"(?<![a-z])rows?[_ ](\d+(?:(?:_and_| and |, |_)\d+)*)(?!_column)")


def table_rows(text):
    """Number -> the text of its row; rows of exit codes end at the heading."""
    return {int(row[1]): row[0] for row in ROW.finditer(text.split("## The table")[-1])}


def cited_rows(source):
    """The numbers in docstrings, and in the names of tests."""
    for node in ast.walk(ast.parse(source)):
        texts = []
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            texts.append(node.name.removeprefix("test_"))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            texts.append(ast.get_docstring(node) or "")
        for text in texts:
            for numbers in CITED.findall(text):
                yield from map(int, re.findall(r"\d+", numbers))


def test_every_promised_row_names_tests_that_exist():
    for number, row in table_rows(PAGE).items():
        tests = re.findall(r"`(tests/\w+\.py)::(test_\w+)`", row)
        assert tests, f"row {number} names no test"
        for file, name in tests:
            source = (ROOT / file).read_text()
            assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{file}::{name}"


def test_every_row_that_a_test_cites_is_promised():
    promised = table_rows(PAGE)
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for number in cited_rows(path.read_text()):
            assert number in promised, f"{path.name} cites row {number}"


def test_the_rows_have_no_gap():
    assert sorted(table_rows(PAGE)) == list(range(1, 46))


def test_citations_are_read_in_names_and_docstrings():
    source = 'def test_rows_5_14_and_98_end():\n    """Rows; see row 99."""\n'
    assert list(cited_rows(source)) == [5, 14, 98, 99]
    assert not list(cited_rows("def test_grows_3(): ..."))
