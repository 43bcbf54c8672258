"""Each row of docs/reliability.md has a test; run as a program, prints which."""

import pathlib
import re
from collections import defaultdict

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARK = re.compile(r"mark\.row\(([\d, ]+)\)")
TEST = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.MULTILINE)


def promises():
    """Number of a row -> its promise."""
    table = (ROOT / "docs" / "reliability.md").read_text().split("## The table")[1]
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE)
    return {int(number): text for number, text in rows}


def marked_tests():
    """Number of a row -> the tests with its mark."""
    tests = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text()
        for mark in MARK.finditer(source):
            name = TEST.search(source, mark.end())[1]
            for number in mark[1].split(","):
                tests[int(number)].append(f"{path.relative_to(ROOT)}::{name}")
    return tests


def test_each_row_has_a_test():
    assert sorted(promises()) == list(range(1, len(promises()) + 1))
    assert marked_tests().keys() == promises().keys()


if __name__ == "__main__":
    for number, text in promises().items():
        print(f"{number}. {text}", *marked_tests()[number], sep="\n    ")
