"""The tables of choices, their targets, and choices in files of the user."""

import pytest
import tensorflow as tf

from towers.build import builder
from towers.config import Config, checks, choices, factories, list_options
from towers.config.choices import TABLES
from towers.errors import ConfigError
from towers.optim import optimizers

# The tables.


def test_every_target_can_be_imported():
    for option, table in TABLES.items():
        assert all(callable(factories.resolve(option, name)) for name in table)


def test_rows_of_optimizers_say_what_they_show():
    for name, row in choices.OPTIMIZERS.items():
        optimizer = factories.create("optimizer", name, momentum=0.9)
        assert optimizer.elementwise == (not row.whole_parameters), name
        sums = optimizer.needs_norms or not optimizer.elementwise
        assert sums == row.sums, name


# What is passed to a target.


def test_a_target_gets_the_arguments_that_its_signature_names():
    def create(*, rho, beta1=0.5):
        return rho, beta1

    assert factories.call(create, rho=1, beta2=3) == (1, 0.5)
    assert factories.call(lambda **all_of_them: all_of_them, rho=1) == {"rho": 1}


@pytest.mark.parametrize(
    "dataset, ignored",
    [
        ("image_folder", ["columns", "image_dir", "fold"]),
        ("webdataset", ["image_dir", "fold"]),
        ("table", []),
    ],
)
def test_options_of_tables_are_called_ignored_elsewhere(dataset, ignored):
    options = {"columns": "label:x", "image_dir": "x", "fold": 0, "image_size": 9}
    lines = checks.ignored_options(Config(dataset=dataset, **options))
    assert lines == [
        f"{name}={options[name]} has no effect with dataset={dataset}"
        for name in ignored
    ]


# Choices in a file.


def test_an_open_table_takes_a_function_in_a_file_without_reading_it():
    name = "no/such/file.py:create"
    for option in TABLES.keys() - choices.CLOSED:
        extra = {"async_scale_gradients": False} if option == "optimizer" else {}
        assert getattr(Config(**{option: name}, **extra), option) == name


def write(folder, body, name="mine.py"):
    (folder / name).write_text(body)
    return str(folder / name)


@pytest.mark.parametrize(
    "body,words",
    [
        (None, "no such file"),
        ("def creat(): pass", "has no function 'create'; did you mean 'creat'?"),
        ("create = 3", "has no function 'create'"),
        ("import nowhere_to_be_found", "mine.py:1: ModuleNotFoundError: No module"),
        ("def create(:", "mine.py:1: SyntaxError: invalid syntax"),
        ("\ndef create():\n    1 / 0", "mine.py:3: ZeroDivisionError: division by"),
        ("class E(BaseException): pass\nraise E", "mine.py:2: E: "),
        ("def create(images): pass", "mine.py: TypeError: .* 'images'"),
    ],
)
def test_a_mistake_in_a_file_is_told_in_one_line_with_the_option(tmp_path, body, words):
    path = write(tmp_path, body) if body else str(tmp_path / "mine.py")
    with pytest.raises(ConfigError, match=words) as caught:
        factories.create("model", f"{path}:create")
    assert str(caught.value).startswith(f"model={path}:create: ")
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


@pytest.mark.parametrize("option", ["dataset", "augment", "optimizer"])
def test_a_function_that_gives_something_else_is_refused(tmp_path, option):
    path = write(tmp_path, "def create(): return 3")
    options = {"dataset": "synthetic", "augment": "none"} | {option: f"{path}:create"}
    with pytest.raises(ConfigError, match=f"{option}={path}:create: gave int; return"):
        builder.build(Config(**options, width=0.1))


# Hyperparameters without a flag.

OPTIMIZER = """
from towers.optim import optimizers
from towers.optim.optimizers import Optimizer
from towers.optim.schedules import Schedule

def create(*, momentum, strength=1.0):
    def update(param, slots, gradient, context):
        return param - strength * context.rate * gradient, {}
    return Optimizer((), update)
"""


def optimizer_of(path, text):
    options = list_options.parse("optimizer_options", text)
    return optimizers.create_optimizer(path, options, momentum=0.5, rho=0.1)


def test_an_optimizer_gets_the_options_that_have_no_flag(tmp_path):
    path = write(tmp_path, OPTIMIZER) + ":create"
    context = optimizers.UpdateContext(tf.constant(0.5), None)
    for text, expected in (("", 0.5), ("strength:2", 0.0)):
        optimizer = optimizer_of(path, text)
        param, _ = optimizer.update(tf.constant(1.0), {}, tf.constant(1.0), context)
        assert float(param) == expected
    words = "takes no 'strengthx'; did you mean 'strength'. it takes momentum, strength"
    with pytest.raises(ConfigError, match=words):
        optimizer_of(path, "strengthx:2")


@pytest.mark.parametrize("part", ["train", "evaluate"])
def test_an_augmentation_with_a_state_is_refused(tmp_path, part):
    body = f"""
import dataclasses, keras
from towers.data.augment import augmentation

def create(image_shape, mean, std):
    plain = augmentation.none(image_shape, mean, std)
    flip = keras.layers.RandomFlip("horizontal", seed=1)
    flipped = lambda images, *draw: flip(plain.evaluate(images), training=True)
    return dataclasses.replace(plain, {part}=flipped)
"""
    path = write(tmp_path, body) + ":create"
    with pytest.raises(ConfigError, match=f"^augment={path}: its {part} gives other"):
        builder.build(Config(dataset="synthetic", augment=path, width=0.1))
