"""The pages agree with the code: strategies, links, flags, commands and pictures."""

import ast
import pathlib
import re
import shlex

import pytest
from absl import flags

from docs import write_flags
from towers.cli import train_flags
from towers.cli.flags import define_config_flags, given_flags
from towers.cli.recipes import config_of_flags
from towers.config import FIELDS, synonyms
from towers.config.choices import STRATEGIES
from towers.config.metrics import METRICS
from towers.exporting.formats import LIMITS

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TABLE = (DOCS / "strategies.md").read_text()
COMING_FROM = DOCS / "coming_from.md"
MAP = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
SCRIPTS = ("run_train.py", "run_eval.py", "run_predict.py", "run_export.py")

FLAG = re.compile(r"(?<![\w-])--([a-z]\w*(?:-\w+)*)(?:=([\w./]+))?")

# Flags of other programs that the pages mention.
OTHERS = set(
    "epochs require-hashes no-deps disable-pip strict logdir load_fast check upgrade "
    "file_format only row sections strategies towers group_sizes data-binary build-arg "
    "rest_api_port model_name model_base_path for timeout prefix tail max-log-requests "
    "nodes signal requeue exclusive head port address".split()
)

# Source of the other programs of towers.
LAUNCHERS = "".join(
    (ROOT / "towers" / path).read_text()
    for path in ("launch.py", "on_ray.py", "check/program.py")
)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
each_strategy = pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"auto"}))


def flags_of(script):
    """The names of a script's flags: its own, and those of Config that it takes."""
    found = {"help", "version"}
    path = ROOT / "towers/cli" / script.removeprefix("run_")
    if path.name == "eval.py":
        path = path.with_name("eval_flags.py")
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        kind = node.func.attr
        if kind == "define_config_flags":
            names = ast.literal_eval(node.args[0]) if node.args else FIELDS
            found |= {*names, *(f"no{n}" for n in names if FIELDS[n].type is bool)}
        elif kind in ("define_cluster_flags", "define_train_flags"):
            values = flags.FlagValues()
            getattr(train_flags, kind)(values=values)
            found |= set(values)
        elif kind == "define_step_flag":
            found.add("step")
        elif kind.startswith("DEFINE_"):
            name = ast.literal_eval(node.args[0])
            found |= {name, f"no{name}"} if kind == "DEFINE_bool" else {name}
    return found


FLAGS = {script: flags_of(script) for script in SCRIPTS}


def commands(page):
    """The arguments of each command in a page's blocks of code that runs a script."""
    text = page.read_text().replace("\\\n", " ")
    lines = re.findall(r"^(?:    )?(python run_.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def heading_anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in words}


# Pages.


@each_strategy
def test_every_strategy_has_a_page_a_picture_and_a_row(name):
    page = (DOCS / f"{name}.md").read_text()
    assert f"# `{name}`" in page.splitlines()[0]
    assert f"]({name}.svg)" in page and (DOCS / f"{name}.svg").is_file()
    assert f"--strategy={name} " in page
    assert f"\n| [`{name}`]({name}.md)" in TABLE


@each_page
def test_relative_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in heading_anchors(file), target


@each_page
def test_flags_exist_and_take_the_values_that_are_named(page):
    text = page.read_text().replace("\\\n", " ")
    if page == COMING_FROM:  # the first column is of other programs
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    for flag in FLAG.finditer(text):
        name, value = flag.groups()
        if name in OTHERS or f'"{name}"' in LAUNCHERS:
            continue
        if page.name == "export.md" and name == "precision":
            assert value in LIMITS  # that of run_export.py
            continue
        assert any(name in known for known in FLAGS.values()), f"--{name}"
        choices = name in FIELDS and FIELDS[name].metadata["choices"]
        if choices and value and value != value.upper() and ".py" not in value:
            assert {value, f"{value}:NAME"} & {*choices}, f"--{name}={value}"


def test_an_option_of_another_program_is_answered_with_ours_that_the_page_names():
    typed = 0
    for theirs, ours in re.findall(
        r"^\| (`[^|]*)\|([^|]*--[^|]*)\|", COMING_FROM.read_text(), re.MULTILINE
    ):
        named = [flag for flag, _ in FLAG.findall(ours)]
        for flag in re.findall(r"`(?:--)?([a-z][\w-]*)`", theirs):
            answer = synonyms.answer(flag, FLAGS["run_train.py"]) or ""
            meant = synonyms.meant(flag, FLAGS["run_train.py"])
            assert {meant, *re.findall(r"--(\w+)", answer)} & {*named}, flag
            typed += 1
    assert typed > 50


@each_page
def test_commands_can_be_given(page):
    for script, *arguments in commands(page):
        for argument in arguments:
            if script == "run_predict.py" and not argument.startswith("-"):
                continue  # a path
            assert FLAG.match(argument)[1] in FLAGS[script], argument
        if script != "run_train.py":
            continue
        values = flags.FlagValues()
        define_config_flags(values=values)
        flags.DEFINE_string("config", None, "", flag_values=values)
        ours = [a for a in arguments if FLAG.match(a)[1] in {"config", *FIELDS}]
        values([script, *ours])
        config_of_flags(values.config, ROOT / "configs", given_flags(values))


def texts_of(path):
    """The strings of a module, with a NUL character for each value in them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = (getattr(part, "value", "") for part in node.values)
            yield "".join(x if isinstance(x, str) else "\0" for x in parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_messages_of_troubleshooting_are_those_of_the_package():
    texts = {x for path in (ROOT / "towers").rglob("*.py") for x in texts_of(path)}
    page = (DOCS / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`|]*)` \|", page, re.MULTILINE)
    assert len(messages) > 15
    for message in messages:
        parts = [part.strip() for part in message.split("...") if len(part) > 3]
        fits = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        assert any(map(fits.search, texts)), message


def test_tests_that_are_named_exist():
    tests = {path.name: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    known = set(re.findall(r"^def (test_\w+)", "\n".join(tests.values()), re.MULTILINE))
    names = {"images", "correct", "classes", "confusion_matrix", *METRICS}
    metrics = {f"test_{name}{end}" for name in names for end in ("", "_interval")}
    for page in PAGES:
        for name in re.findall(
            r"`(?:tests/)?(?:\w+/)?(test_[\w.]+)`", page.read_text()
        ):
            is_metric = name.removesuffix("_ema") in metrics
            assert is_metric or name in known | set(tests), name


def test_the_tables_of_flags_are_written_by_their_program():
    """python -m docs.write_flags writes them anew."""
    text = write_flags.PAGE.read_text()
    assert text.partition(write_flags.BEGIN)[2] == write_flags.tables()
    assert write_flags.LINKS.keys() <= FLAGS["run_train.py"]


def test_the_tree_lists_the_package():
    paths = (ROOT / "towers").iterdir()
    names = {p.name for p in paths if p.suffix == ".py" or any(p.glob("*.py"))}
    names = {n if "." in n else f"{n}/" for n in names if not n.startswith("__")}
    listed = re.findall(r"^      (\w+(?:/|\.py)) {2,}\S", MAP, re.MULTILINE)
    assert sorted(listed) == sorted(names)
    for path in re.findall(r"`(towers/[\w/]+\.py)`", MAP):
        assert (ROOT / path).is_file(), path
