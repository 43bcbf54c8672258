"""The command line: three layers of options, and one line per mistake (row 17)."""

import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest
from absl import flags

import towers
from towers.config import FIELDS, Config, synonyms
from towers.config import flags as config_flags
from towers.config.recipes import config_of_flags, load_recipe
from towers.errors import ConfigError

ROOT = pathlib.Path(__file__).resolve().parent.parent


def flag_values(**defaults):
    values = flags.FlagValues()
    config_flags.define_config_flags(values=values, **defaults)
    return values


def given(*arguments):
    """What a command line with these arguments gives."""
    values = flag_values()
    values(["run_train.py", *arguments])
    return config_flags.given_flags(values)


def write_recipe(folder, name, body, header="from towers.config import Config"):
    source = f"{header}\n\n\ndef get_config():\n    return {body}\n"
    (folder / f"{name}.py").write_text(source)


@pytest.fixture
def recipes(tmp_path):
    folder = tmp_path / "configs"
    folder.mkdir()
    body = 'Config(dataset="embedded", batch_size=64, momentum=0.5)'
    write_recipe(folder, "quickstart", body)
    yield folder
    # Recipes import each other as top modules of their folder.
    for path in folder.glob("*.py"):
        sys.modules.pop(path.stem, None)


# Flags.


def test_there_is_one_flag_per_option_with_its_help_and_default():
    values = flag_values()
    assert set(values) == set(FIELDS)
    for name, field in FIELDS.items():
        assert values[name].default == field.default, name
        assert values[name].help.endswith(field.metadata["help"]), name


def test_a_program_may_have_some_flags_and_its_own_defaults():
    values = flags.FlagValues()
    config_flags.define_config_flags(
        ["batch_size", "device"], values=values, batch_size=500
    )
    values(["run_eval.py"])
    assert (values.batch_size, values.device) == (500, "auto")
    assert set(values) == {"batch_size", "device"}
    assert config_flags.given_flags(values) == {}


def test_given_flags_are_those_on_the_command_line_in_the_type_of_their_option():
    found = given(
        "--batch_size=64", "--learning_rate=1", "--deterministic", "--dataset=embedded"
    )
    assert found == {
        "batch_size": 64,
        "learning_rate": 1.0,
        "deterministic": True,
        "dataset": "embedded",
    }
    assert Config(**found).batch_size == 64


def test_a_flag_that_repeats_the_default_is_given():
    assert given("--batch_size=128", "--nodeterministic") == {
        "batch_size": FIELDS["batch_size"].default,
        "deterministic": False,
    }


# The three layers.


def test_flags_override_the_recipe_and_the_recipe_the_defaults(recipes):
    config, *_ = config_of_flags(
        "quickstart", recipes, given("--momentum=0.9", "--num_towers=2")
    )
    assert config == Config(
        dataset="embedded", batch_size=64, momentum=0.9, num_towers=2
    )


def test_a_flag_with_the_default_value_overrides_the_recipe(recipes):
    config, *_ = config_of_flags("quickstart", recipes, given("--batch_size=128"))
    assert config.batch_size == 128


@pytest.mark.parametrize("flag", ["--dataset=mnist", "--data_dir=data"])
def test_flags_that_name_a_data_set_stand_on_the_defaults(recipes, flag):
    command = config_of_flags(None, recipes, given(flag, "--seed=3"))
    assert command.config == Config(**given(flag), seed=3)
    assert (command.workdir, command.remark) == (pathlib.Path("runs/default"), "")


def test_other_flags_alone_stand_on_the_quickstart(recipes):
    command = config_of_flags(None, recipes, given("--num_towers=2"))
    expected, *_ = config_of_flags("quickstart", recipes, given("--num_towers=2"))
    assert command.config == expected
    assert command.config.dataset == "embedded" and command.config.num_towers == 2
    assert command.workdir == pathlib.Path("runs/quickstart")
    assert "quickstart" in command.remark


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


def test_values_are_checked_before_the_folder_is_read(recipes):
    def read(workdir):
        raise AssertionError

    with pytest.raises(ConfigError, match="batch_size=0: must be at least 1"):
        config_of_flags(None, recipes, {"batch_size": 0}, "r2", read)


def test_without_anything_the_quickstart_is_trained_and_that_is_said(recipes):
    write_recipe(recipes, "other", "Config()")
    config, workdir, _, remark = config_of_flags(None, recipes, {})
    assert (config.dataset, config.batch_size) == ("embedded", 64)
    assert workdir == pathlib.Path("runs/quickstart")
    for word in ("quickstart", "other", "--config", "--help"):
        assert word in remark
    assert "\n" not in remark


def test_the_run_is_named_after_the_recipe(recipes):
    path = recipes / "quickstart.py"
    for recipe in ("quickstart", str(path)):
        command = config_of_flags(recipe, recipes, {})
        assert command.workdir == pathlib.Path("runs/quickstart")
        assert command.remark == ""


def test_a_contradiction_between_layers_is_refused(recipes):
    with pytest.raises(ConfigError, match="batch_size=64 with num_towers=65"):
        config_of_flags("quickstart", recipes, given("--num_towers=65"))


def test_layers_are_checked_only_together(recipes):
    arguments = given("--optimizer=nesterov")
    with pytest.raises(ConfigError, match="momentum"):
        config_of_flags(None, recipes, arguments | {"dataset": "mnist"})
    config, *_ = config_of_flags("quickstart", recipes, arguments)
    assert (config.optimizer, config.momentum) == ("nesterov", 0.5)


# Recipes.


def test_a_recipe_is_a_name_or_a_path(recipes, tmp_path):
    elsewhere = tmp_path / "elsewhere.py"
    elsewhere.write_text((recipes / "quickstart.py").read_text())
    for name in ("quickstart", str(recipes / "quickstart.py"), str(elsewhere)):
        assert load_recipe(name, recipes).batch_size == 64


def test_a_recipe_may_call_another_and_change_it(recipes):
    write_recipe(
        recipes,
        "variant",
        "dataclasses.replace(quickstart.get_config(), seed=5)",
        "import dataclasses\n\nimport quickstart",
    )
    path_before = list(sys.path)
    config = load_recipe("variant", recipes)
    assert (config.seed, config.batch_size) == (5, 64)
    assert sys.path == path_before


def test_an_unknown_recipe_names_the_nearest_and_lists_all(recipes):
    write_recipe(recipes, "other", "Config()")
    write_recipe(recipes, "_shared", "Config()")
    with pytest.raises(ConfigError) as caught:
        load_recipe("quikstart", recipes)
    assert "did you mean 'quickstart'?" in str(caught.value)
    assert str(caught.value).endswith("recipes: other, quickstart")


@pytest.mark.parametrize(
    "body,words",
    [
        ("Config(bach_size=3)", ["'bach_size'", "did you mean 'batch_size'"]),
        ("Config(batch_size=0)", ["batch_size=0", "at least 1"]),
        ('Config(batch_size="3")', ["batch_size='3'", "must be int"]),
        ('Config(dataset="cifar")', ["did you mean 'cifar10'"]),
        ("Confg(batch_size=3)", ["Confg"]),
        ("Config(batch_size=3", ["never closed"]),
        ("Config", ["not a Config"]),
        ("None", ["None, not a Config"]),
    ],
)
def test_a_mistake_in_a_recipe_ends_in_one_line_with_its_file(recipes, body, words):
    write_recipe(recipes, "mistaken", body)
    with pytest.raises(ConfigError) as caught:
        load_recipe("mistaken", recipes)
    message = str(caught.value)
    assert message.startswith(str(recipes / "mistaken.py"))
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_typo_in_a_variant_names_the_nearest_option(recipes):
    write_recipe(
        recipes,
        "variant",
        "dataclasses.replace(quickstart.get_config(), lerning_rate=5)",
        "import dataclasses\n\nimport quickstart",
    )
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        load_recipe("variant", recipes)


def test_a_recipe_without_get_config_or_with_a_missing_import_is_refused(recipes):
    (recipes / "empty.py").write_text("")
    with pytest.raises(ConfigError, match="get_config"):
        load_recipe("empty", recipes)
    write_recipe(recipes, "importing", "Config()", "import nowhere_to_be_found")
    with pytest.raises(ConfigError, match="nowhere_to_be_found"):
        load_recipe("importing", recipes)


@pytest.mark.parametrize(
    "content,message",
    [
        (b"import sys\nsys.exit(3)\n", ":2: SystemExit: 3$"),
        (b"def get_config():\n    return 1 // 0\n", ":2: ZeroDivisionError: "),
        (b"def get_config():\n    return get_config()\n", ":2: RecursionError: "),
        (b"class E(BaseException): pass\nraise E('a\\nb')\n", ":2: E: a b$"),
        (b"x = '\xff'\n", ".*: SyntaxError: .*utf-8"),
        (b"x = (\n", ":1: SyntaxError: "),
        (b"\0", ": SyntaxError: .*null bytes"),
    ],
)
def test_row_42_an_error_in_a_recipe_names_its_line(recipes, content, message):
    (recipes / "defect.py").write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{recipes}/defect.py{message}") as caught:
        load_recipe("defect", recipes)
    assert len(str(caught.value)) < 400


def test_row_42_a_name_that_is_too_long_for_a_file_is_one_line(recipes):
    with pytest.raises(ConfigError, match="there is no such file; recipes: "):
        load_recipe("x" * 300, recipes)


# Mistakes, as a user meets them.


@pytest.mark.parametrize(
    "program,arguments,words",
    [
        ("run_train.py", ["--bach_size=3"], ["'bach_size'", "batch_size ?"]),
        ("run_train.py", ["--views=six"], ["'views'", "it is called --tta now"]),
        ("run_train.py", ["--lr=0.1"], ["'lr'", "Did you mean: learning_rate ?"]),
        ("run_train.py", ["--batch_size=abc"], ["--batch_size=abc"]),
        ("run_train.py", ["--batch_size=2.5"], ["--batch_size=2.5"]),
        ("run_train.py", ["--dataset=cifar"], ["dataset='cifar'", "'cifar10'?"]),
        ("run_train.py", ["--dataset=tfds:"], ["dataset='tfds:'", "tfds:NAME"]),
        ("run_train.py", ["--deterministic=perhaps"], ["--deterministic=perhaps"]),
        ("run_train.py", ["--learning_rate=nan"], ["learning_rate=nan", "finite"]),
        ("run_train.py", ["quickstart"], ["'quickstart' is no flag"]),
        ("run_train.py", ["--config=quikstart"], ["did you mean 'quickstart'?"]),
        (
            "run_train.py",
            ["--num_towers=9", "--batch_size=4"],
            ["batch_size=4 with num_towers=9"],
        ),
        ("run_predict.py", ["-o", "x.csv"], ["'o'", "Did you mean: output ?"]),
        ("run_export.py", ["--output_dir=x"], ["Did you mean: output ?"]),
        ("run_train.py", ["--output_dir=x"], ["Did you mean: workdir ?"]),
        ("run_eval.py", [], ["--workdir"]),
        ("run_eval.py", ["--workdir=no/such/run"], ["no/such/run holds no run"]),
    ],
)
def test_a_wrong_command_line_ends_in_one_line_and_exit_2(program, arguments, words):
    done = subprocess.run(
        [sys.executable, str(ROOT / program), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{program}: ")
    for word in words:
        assert word in line


def test_another_keras_backend_ends_in_one_line_and_exit_2():
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_train.py")],
        cwd=ROOT,
        env=os.environ | {"KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("run_train.py: KERAS_BACKEND=jax")


@pytest.mark.parametrize(
    "typed,meant",
    [
        ("epochs", "num_epochs"),
        ("lr", "learning_rate"),
        ("bs", "batch_size"),
        ("gpus", "num_towers"),
        ("Batch-Size", "batch_size"),
        ("optimizer-options", "optimizer_options"),
        ("output_dir", None),  # no flag of these
        ("frobnicate", None),
    ],
)
def test_a_name_of_another_program_is_understood(typed, meant):
    assert synonyms.meant(typed, FIELDS) == meant


def test_the_synonyms_are_of_flags_and_of_one_each():
    own = {"workdir", "config", "overwrite", "num_workers"}
    of_others = {"use_ema", "output"}  # such as run_predict.py
    assert set(synonyms.SYNONYMS) <= own | of_others | set(FIELDS)
    of_train = [
        name
        for flag, names in synonyms.SYNONYMS.items()
        if flag not in of_others
        for name in names.split()
    ]
    assert len(of_train) == len(set(of_train))
    assert not set(of_train) & (own | set(FIELDS))


@pytest.mark.parametrize(
    "program",
    [
        ["run_train.py"],
        ["run_eval.py"],
        ["run_predict.py"],
        ["run_export.py"],
        ["-m", "towers.launch"],
        ["-m", "towers.data"],
    ],
)
def test_each_program_has_a_version_and_a_short_help(program):
    versions, help_text = (
        subprocess.run(
            [sys.executable, *program, flag],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
        )
        for flag in ("--version", "-h")
    )
    assert versions.returncode == help_text.returncode == 0, versions.stderr
    assert versions.stdout.startswith(f"towers {towers.__version__}")
    assert len(versions.stdout.splitlines()) == 1
    assert any(
        name in help_text.stdout for name in ("num_workers", "--data_dir", "--features")
    )


def test_help_shows_every_option():
    done = subprocess.run(
        [sys.executable, str(ROOT / "run_train.py"), "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    for name, field in FIELDS.items():
        prefix = "--[no]" if field.type is bool else "--"
        # After the colon absl begins a new line where the choices are many.
        assert f"\n  {prefix}{name}:" in done.stdout, name


# What is said while TensorFlow is imported.

AVX = b"F0000 00:00:17.6 2687 cpu.cc:29] compiled to use AVX, which is not available\n"


def test_chatter_is_held_back_and_the_rest_is_shown(capfdbinary):
    with towers.quiet_imports():
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() ...\n")
        os.write(2, b"I0000 00:00:17.6 2687 port.cc:153] oneDNN is on.\n")
        os.write(2, b"E0000 00:00:17.6 2687 dnn.cc:10] Unable to register cuDNN\n")
        os.write(2, b"To enable the following instructions: AVX2 FMA\n")
        os.write(2, b"W0000 00:00:17.6 2687 dso.cc:9] no libcudnn.so in \xff\n")
    os.write(2, b"afterwards\n")
    shown = b"W0000 00:00:17.6 2687 dso.cc:9] no libcudnn.so in \xff\nafterwards\n"
    assert capfdbinary.readouterr().err == shown


def test_an_import_that_aborts_is_heard():
    script = f"""
import os, towers
with towers.quiet_imports():
    os.write(2, b"I0000 00:00:17.6 2687 port.cc:153] oneDNN is on.\\n")
    os.write(2, {AVX})
    os.abort()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (-signal.SIGABRT, AVX)


def test_imports_in_two_threads_leave_standard_error_as_it_was():
    inside, over = threading.Event(), threading.Event()

    def import_longer():
        with towers.quiet_imports():
            inside.set()
            over.wait()

    before = os.fstat(2)
    other = threading.Thread(target=import_longer)
    with towers.quiet_imports():
        other.start()
        inside.wait(0.2)  # one of the two has to wait for the other
    over.set()
    other.join()
    assert os.path.samestat(os.fstat(2), before)
