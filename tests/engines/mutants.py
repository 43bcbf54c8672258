"""Breaks lines of the package, and says which tests see it.

    python -m tests.engines.mutants [--only NAME ...] [--root CHECKOUT]

Each mutant of mutants.txt is made in a scratch copy of the checkout, where its tests
then run. A break that none of them sees is a promise without a test; the exit code is
then 1. NAME is that of a mutant or of a section. A mutant whose old text is not found
exactly once is an error.
"""

import argparse
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
from typing import NamedTuple

import keras  # noqa: F401  (for the children)
import pytest
import tensorflow  # noqa: F401

TABLE = pathlib.Path(__file__).with_suffix(".txt")
ROOT = TABLE.parents[2]
# File name -> path of a test, from the checkout.
FILES = {x.name: x.relative_to(ROOT) for x in (ROOT / "tests").rglob("test_*.py")}
LONGEST_SECS = 900  # of the tests of one mutant; a break that hangs them is seen
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__")


class Mutant(NamedTuple):
    """`old` stands once in `towers/SECTION`, and `new` replaces it."""

    section: str
    name: str
    tests: list[str]
    old: str
    new: str


def read_table() -> list[Mutant]:
    """All mutants."""
    mutants, section = [], ""
    lines = [x for x in TABLE.read_text().splitlines() if x and x[0] != "#"]
    while lines:
        if lines[0][0] == "[":
            section = lines.pop(0)[1:-1]
        head, old, new, *lines = lines
        name, tests = head.split(" | ")
        assert (old[0], new[0]) == ("-", "+"), name
        paths = (test.partition("::") for test in tests.split())
        tests = [f"{FILES[file]}{mark}{test}" for file, mark, test in paths]
        mutants.append(Mutant(section, name, tests, old[2:], new[2:]))
    return mutants


def main() -> int:
    """Makes the breaks one after the other; 1 where one is not seen."""
    parser = argparse.ArgumentParser(prog="tests.engines.mutants")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--root", default=".", type=pathlib.Path)
    args = parser.parse_args()
    chosen, names = read_table(), set(args.only)
    if unknown := names - {
        x for mutant in chosen for x in (mutant.section, mutant.name)
    }:
        raise SystemExit(f"no mutant or section is called {', '.join(unknown)}")
    if names:
        chosen = [x for x in chosen if names & {x.section, x.name}]
    num_seen = 0
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "checkout"
        shutil.copytree(args.root, root, ignore=NOT_COPIED, symlinks=True)
        for mutant in chosen:
            broken(root, mutant)
        for mutant in chosen:
            started = time.monotonic()
            seen_by = first_failure(root, mutant)
            secs = time.monotonic() - started
            words = seen_by or "UNSEEN"
            print(f"{mutant.section:10} {mutant.name:44} {secs:4.0f} s  {words}")
            sys.stdout.flush()
            num_seen += bool(seen_by)
    print(f"{num_seen} of {len(chosen)} are seen")
    return num_seen < len(chosen)


def broken(root: pathlib.Path, mutant: Mutant) -> tuple[pathlib.Path, str]:
    """The file of a break, and its new text."""
    texts = {x: x.read_text() for x in (root / "towers" / mutant.section).rglob("*.py")}
    found = [path for path, text in texts.items() if mutant.old in text]
    if sum(texts[path].count(mutant.old) for path in found) != 1:
        names = [path.name for path in found]
        raise SystemExit(f"{mutant.name}: not once in {mutant.section}, but in {names}")
    return found[0], texts[found[0]].replace(mutant.old, mutant.new)


def first_failure(root: pathlib.Path, mutant: Mutant) -> str:
    """The first test that fails with the break; empty where none does."""
    path, text = broken(root, mutant)
    whole, log = path.read_text(), root.parent / "log"
    path.write_text(text)
    try:
        code = run_tests(root, mutant.tests, log)
    finally:
        path.write_text(whole)
    if code is None:
        return "it hangs"
    lines = log.read_text(errors="replace").splitlines()
    failed = [x for x in lines if x.startswith(("FAILED ", "ERROR ")) and "::" in x]
    if code > 1 or (code and not failed):
        print(f"{mutant.name}: pytest cannot run", *lines[-30:], sep="\n")
    return failed[0].split(" - ")[0] if failed and code == 1 else ""


def run_tests(root: pathlib.Path, tests: list[str], log: pathlib.Path) -> int | None:
    """The exit code of pytest, in a child of this process, which has imported what
    takes long; None where it does not end."""
    child = os.fork()
    if not child:
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(root)
        sys.path[0] = str(root)
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
        sys.stdout.flush()
        os._exit(int(code))
    end = time.monotonic() + LONGEST_SECS
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


if __name__ == "__main__":
    sys.exit(main())
