"""Rows 16, 17 and 30 of the table of faults, and what a resumed run may change."""

import dataclasses
import json
import runpy

import keras
import pytest
from refused import refusal

from towers import config as configuration
from towers.config import FIELDS, Config, checks, from_json, replace, to_json
from towers.errors import ConfigError

# What the first issue asks for at least.
ASKED_FOR = """
    dataset data_dir augment seed model optimizer learning_rate momentum weight_decay
    label_smoothing schedule decay_factor epochs_per_decay warmup_epochs ema_decay
    clip_norm precision strategy num_towers device parameter_device batch_size
    num_epochs max_steps steps_per_loop log_every_steps eval_every_epochs
    checkpoint_every_secs checkpoint_every_steps keep_checkpoints
""".split()

# For each option two values: the first ones make a valid Config without any default.
OTHER = {
    "dataset": ("embedded", "synthetic"),
    "data_dir": ("data", "elsewhere"),
    "image_size": (32, 64),
    "image_cache_mb": (0.0, 100.0),
    "max_image_pixels": (4096, 10_000),
    "bad_images": ("skip", "stop"),
    "validation_fraction": (0.1, 0.2),
    "augment": ("none", "pad_crop_flip"),
    "color_jitter": (0.4, 0.2),
    "random_erasing": (0.25, 1.0),
    "cutout_size": (8, 16),
    "mixup": (0.2, 1.0),
    "cutmix": (1.0, 0.5),
    "seed": (7, 8),
    "width": (0.25, 0.5),
    "precision": ("bfloat16", "float32"),
    "optimizer": ("nesterov", "sgd"),
    "learning_rate": (0.1 + 0.2, 1e-300),
    "momentum": (0.9, 0.5),
    "beta1": (0.8, 0.0),
    "beta2": (0.99, 0.95),
    "rho": (0.99, 0.95),
    "epsilon": (1e-3, 1e-8),
    "trust_coefficient": (0.02, 0.01),
    "muon_momentum": (0.5, 0.7),
    "freeze": ("stem*", "stem*,conv1/*"),
    "param_rates": ("*/bias:2", "*/bias:2,fc1/kernel:0.5:3"),
    "weight_decay": (0.0, 1.0),
    "label_smoothing": (0.1, 0.2),
    "schedule": ("constant", "exponential"),
    "decay_factor": (0.5, 0.25),
    "epochs_per_decay": (1.5, 2.5),
    "early_sizes": ("24:0.5", "16:0.2,24:0.5"),
    "epoch_factors": ("1:0.1", "1:0.1,2:0.01"),
    "peak_fraction": (0.2, 0.5),
    "warmup_epochs": (0.5, 1.0),
    "ema_decay": (0.0, 0.99),
    "clip_norm": (1.0, 2.0),
    "on_nonfinite": ("skip", "stop"),
    "tta": ("mirror", "translate"),
    "optimizer_options": ("beta3:0.5", "beta3:0.25"),
    "input": ("resident", "stream"),
    "strategy": ("replicated", "towers"),
    "num_towers": (4, 8),
    "device": ("gpu", "auto"),
    "parameter_device": ("gpu", "cpu"),
    "async_scale_gradients": (False, True),
    "max_staleness": (1, 2),
    "group_size": (2, 4),
    "device_order": ("0,1,2,3", "3,2,1,0"),
    "device_memory_mb": (900.0, 500.0),
    "batch_norm": ("sync", "local"),
    "all_reduce": ("tree", "ring"),
    "all_reduce_pack_mb": (0.0, 4.0),
    "all_reduce_dtype": ("bfloat16", "float32"),
    "batch_size": (64, 32),
    "init_from": ("runs/a", "runs/b"),
    "accumulate_steps": (2, 3),
    "deterministic": (True, False),
    "num_epochs": (3.0, 4.0),
    "max_steps": (10, 20),
    "steps_per_loop": (5, 7),
    "log_every_steps": (5, 7),
    "summary_every_steps": (0, 7),
    "eval_every_epochs": (0.0, 2.0),
    "checkpoint_every_secs": (0.0, 10.0),
    "checkpoint_every_steps": (5, 7),
    "keep_checkpoints": (1, 2),
    "stuck_after_secs": (0.0, 10.0),
}
ONLY_CHOICE = {"model", "compile"}  # what they exclude is in `unusual`

# Row 9: where a run happens, its rhythm and where it stops may change on resume.
FREE = {
    "data_dir",
    "image_cache_mb",
    "max_image_pixels",
    "bad_images",
    "input",
    "strategy",
    "compile",
    "num_towers",
    "device",
    "parameter_device",
    "max_staleness",
    "group_size",
    "device_order",
    "device_memory_mb",
    "all_reduce",
    "all_reduce_pack_mb",
    "deterministic",
    "max_steps",
    "steps_per_loop",
    "log_every_steps",
    "summary_every_steps",
    "eval_every_epochs",
    "checkpoint_every_secs",
    "checkpoint_every_steps",
    "keep_checkpoints",
    "stuck_after_secs",
    "tta",
    "on_nonfinite",
}


def unusual(**changes):
    return Config(**{name: values[0] for name, values in OTHER.items()} | changes)


def test_the_options_that_were_asked_for_are_there():
    assert set(ASKED_FOR) <= set(FIELDS)


def test_every_option_is_explained():
    for name, field in FIELDS.items():
        assert field.metadata["help"].endswith("."), name


def test_defaults_are_those_of_the_tutorial():
    config = Config()
    assert (config.dataset, config.augment, config.model) == (
        "cifar10",
        "tutorial",
        "cnn",
    )
    assert (config.batch_size, config.learning_rate, config.momentum) == (128, 0.1, 0)
    assert (config.schedule, config.decay_factor) == ("exponential", 0.1)
    assert (config.epochs_per_decay, config.ema_decay) == (350, 0.9999)
    assert config.weight_decay == 0.004


def test_a_config_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().seed = 1


def test_other_values_cover_every_option():
    assert set(OTHER) | ONLY_CHOICE == set(FIELDS)
    config = unusual()
    for name, (first, second) in OTHER.items():
        assert FIELDS[name].default != first != second, name
        assert getattr(config, name) == first, name


# Types and bounds.


@pytest.mark.parametrize(
    "options,wanted,found",
    [
        ({"batch_size": 2.0}, "int", "float"),
        ({"batch_size": "2"}, "int", "str"),
        ({"batch_size": True}, "int", "bool"),
        ({"learning_rate": "0.1"}, "float", "str"),
        ({"learning_rate": None}, "float", "NoneType"),
        ({"learning_rate": False}, "float", "bool"),
        ({"deterministic": 1}, "bool", "int"),
        ({"dataset": 10}, "str", "int"),
    ],
)
def test_a_wrong_type_is_refused(options, wanted, found):
    (name,) = options
    message = refusal(**options)
    assert message.startswith(f"{name}=")
    assert f"must be {wanted}, is {found}" in message


@pytest.mark.parametrize("name", [n for n, f in FIELDS.items() if f.type is str])
@pytest.mark.parametrize("wrong", ["\0", "\ud800"])
def test_a_text_that_no_path_can_have_is_refused_and_escaped(name, wrong):
    message = refusal(**{name: f"a{wrong}b"})
    assert message.startswith(f"{name}={f'a{wrong}b'!r}: has a character that no path")
    assert message.isprintable() and len(message) <= 400


def test_a_path_of_bytes_that_are_no_text_is_taken():
    assert Config(data_dir="a\udcffb").data_dir == "a\udcffb"


def test_a_whole_number_is_a_float_where_one_is_wanted():
    learning_rate = Config(learning_rate=1).learning_rate
    assert (learning_rate, type(learning_rate)) == (1.0, float)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_are_finite(value):
    assert "learning_rate" in refusal(learning_rate=value)


@pytest.mark.parametrize(
    "name,best,bad",
    [
        ("validation_fraction", 0.0, -0.01),
        ("validation_fraction", 0.999, 1.0),
        ("color_jitter", 0.0, -0.1),
        ("random_erasing", 0.0, -0.1),
        ("random_erasing", 1.0, 1.01),
        ("cutout_size", 0, -1),
        ("mixup", 0.0, -0.1),
        ("cutmix", 0.0, -0.1),
        ("seed", 0, -1),
        ("seed", 2**63 - 1, 2**63),  # it becomes an int64
        ("width", 0.01, 0.0),
        ("learning_rate", 1e-9, 0.0),
        ("momentum", 0.0, -0.1),
        ("momentum", 0.999, 1.0),
        ("beta1", 0.0, -0.1),
        ("beta1", 0.999, 1.0),
        ("beta2", 0.0, -0.1),
        ("beta2", 0.9999, 1.0),
        ("rho", 0.0, -0.1),
        ("rho", 0.999, 1.0),
        ("epsilon", 1e-12, 0.0),
        ("trust_coefficient", 1e-9, 0.0),
        ("weight_decay", 0.0, -1e-9),
        ("label_smoothing", 0.0, -0.1),
        ("label_smoothing", 0.999, 1.0),
        ("decay_factor", 1e-9, 0.0),
        ("epochs_per_decay", 1e-9, 0.0),
        ("peak_fraction", 0.001, 0.0),
        ("peak_fraction", 0.999, 1.0),
        ("warmup_epochs", 0.0, -0.1),
        ("ema_decay", 0.0, -0.1),
        ("ema_decay", 0.99999, 1.0),
        ("clip_norm", 0.0, -1.0),
        ("num_towers", 0, -1),
        ("batch_size", 1, 0),
        ("accumulate_steps", 1, 0),
        ("max_staleness", 0, -1),
        ("group_size", 1, 0),
        ("all_reduce_pack_mb", -1.0, -1.5),
        ("all_reduce_pack_mb", 1e9, 1e308),
        ("device_memory_mb", 1e9, 1e308),
        ("image_size", 0, -1),
        ("image_cache_mb", 0.0, -1.0),
        ("max_image_pixels", 1, 0),
        ("num_epochs", 0.01, 0.0),
        ("max_steps", 0, -1),
        ("steps_per_loop", 1, 0),
        ("log_every_steps", 1, 0),
        ("summary_every_steps", 0, -1),
        ("eval_every_epochs", 0.0, -1.0),
        ("checkpoint_every_secs", 0.0, -1.0),
        ("checkpoint_every_steps", 0, -1),
        ("keep_checkpoints", 1, 0),
        ("stuck_after_secs", 0.0, -1.0),
    ],
)
def test_bounds_are_where_the_meaning_ends(name, best, bad):
    assert getattr(Config(**{name: best}), name) == best
    message = refusal(**{name: bad})
    assert message.startswith(f"{name}={bad}: must be ")


@pytest.mark.parametrize("name", FIELDS)
def test_row_40_integers_beyond_64_bits_are_refused_in_a_short_line(name):
    for value in (2**63, -(2**64), 10**400, 10**5000):
        message = refusal(**{name: value})
        assert message.startswith(f"{name}=") and "must be " in message
        assert len(message) <= 400


def test_row_40_images_of_more_pixels_than_an_image_may_have_are_refused():
    Config(image_size=7, max_image_pixels=49)
    message = refusal(image_size=8, max_image_pixels=63)
    assert message.startswith("image_size=8 with max_image_pixels=63: ")


@pytest.mark.parametrize("text", ['{"momentum": 1%s}' % ("0" * 400), "[" * 100_000])
def test_row_40_a_stored_config_of_any_numbers_is_refused_in_one_line(text):
    with pytest.raises(ConfigError) as caught:
        from_json(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 400


@pytest.mark.parametrize(
    "name,typed,meant",
    [
        ("dataset", "cifar", "cifar10"),
        ("augment", "tutorail", "tutorial"),
        ("optimizer", "nestrov", "nesterov"),
        ("schedule", "exponentail", "exponential"),
        ("precision", "float23", "float32"),
        ("device", "gpus", "gpu"),
    ],
)
def test_a_wrong_choice_names_the_nearest_and_lists_all(name, typed, meant):
    message = refusal(**{name: typed})
    assert f"did you mean {meant!r}?" in message
    assert ", ".join(FIELDS[name].metadata["choices"]) in message


@pytest.mark.parametrize("name", ["tfds:mnist", "tfds:imagenet_resized/64x64"])
def test_any_prepared_data_set_may_be_named(name):
    assert Config(dataset=name).dataset == name
    for wrong in ("tfds:", "tfdsmnist"):
        assert "synthetic, tfds:NAME or FILE.py" in refusal(dataset=wrong)


def test_where_nothing_is_near_nothing_is_guessed():
    assert "did you mean" not in refusal(dataset="zzz")


@pytest.mark.parametrize(
    "options,words",
    [
        ({"num_towers": 9, "batch_size": 4}, ["num_towers=9", "batch_size=4"]),
        ({"num_towers": 6, "group_size": 4}, ["num_towers=6", "group_size=4"]),
        (
            {"strategy": "async_towers", "accumulate_steps": 2},
            ["strategy=async_towers", "accumulate_steps=2"],
        ),
        (
            {"strategy": "async_towers", "batch_norm": "sync"},
            ["strategy=async_towers", "batch_norm=sync"],
        ),
        ({"optimizer": "nesterov"}, ["optimizer=nesterov", "momentum=0.0"]),
        ({"schedule": "piecewise"}, ["schedule=piecewise", "epoch_factors=''"]),
        *(
            (
                {"strategy": "async_towers", "optimizer": name},
                [f"optimizer={name}", "async_scale_gradients=True"],
            )
            for name in ("rmsprop", "adamw", "lars")
        ),
        (
            {"warmup_epochs": 3.0, "num_epochs": 2.0},
            ["warmup_epochs=3.0", "num_epochs=2.0"],
        ),
        (
            {"device": "cpu", "parameter_device": "gpu"},
            ["device=cpu", "parameter_device=gpu"],
        ),
    ],
)
def test_options_that_contradict_are_refused_with_both_values(options, words):
    message = refusal(**options)
    for word in words:
        assert word in message


def test_options_at_the_edge_of_a_contradiction_are_taken():
    Config(num_towers=4, batch_size=4)
    Config(num_towers=6, group_size=3)
    Config(warmup_epochs=2.0, num_epochs=2.0)
    Config(device="gpu", parameter_device="gpu")
    Config(schedule="piecewise", epoch_factors="1:0")
    Config(strategy="async_towers", optimizer="lars", async_scale_gradients=False)
    Config(strategy="replicated", optimizer="adamw")


# Changing and storing.


def test_replace_names_the_nearest_option():
    with pytest.raises(ConfigError, match="'bach_size': did you mean 'batch_size'?"):
        replace(Config(), {"bach_size": 3})
    assert replace(Config(), {"batch_size": 3}) == Config(batch_size=3)


def test_a_stored_config_is_the_same_again():
    for config in (Config(), unusual()):
        assert from_json(to_json(config)) == config


def test_a_stored_config_is_plain_json():
    stored = json.loads(to_json(unusual()))
    assert list(stored) == list(FIELDS)
    assert stored["learning_rate"] == 0.1 + 0.2
    assert to_json(unusual()).endswith("}\n")


# As a run before test-time augmentation had its name wrote it, but for most options.
OLD_CONFIG = """{
  "dataset": "cifar10",
  "model": "speedrun",
  "optimizer": "muon",
  "momentum": 0.85,
  "eval_every_epochs": 8.0,
  "views": "%s",
  "checkpoint_every_secs": 600.0
}
"""


@pytest.mark.parametrize(
    "views,tta",
    [
        ("plain", "none"),
        ("mirror", "mirror"),
        ("six", "translate"),
        ("six_unsure", "translate_unsure"),
    ],
)
def test_a_config_stored_with_views_is_read(views, tta):
    stored = from_json(OLD_CONFIG % views)
    assert (stored.tta, stored.momentum) == (tta, 0.85)
    assert from_json(to_json(stored)) == stored


def test_views_that_never_existed_are_refused():
    with pytest.raises(ConfigError, match="tta='seven'"):
        from_json(OLD_CONFIG % "seven")


def test_options_that_a_stored_config_lacks_take_their_default():
    assert from_json('{"seed": 3}') == Config(seed=3)


@pytest.mark.parametrize(
    "text,words",
    [
        ('{"sed": 3}', "'sed': did you mean 'seed'"),
        ('{"seed": "3"}', "seed='3'"),
        ('{"seed": -3}', "seed=-3"),
        ('{"num_towers": 9, "batch_size": 4}', "num_towers=9"),
        ('{"seed": 3', "not a config.json"),
        ("[1, 2]", "not a config.json"),
        ("", "not a config.json"),
    ],
)
def test_a_stored_config_that_is_wrong_is_refused(text, words):
    with pytest.raises(ConfigError) as caught:
        from_json(text)
    assert words in str(caught.value)


# Row 9.


@pytest.mark.parametrize("name", OTHER)
def test_a_change_of_the_mathematics_is_reported_with_both_values(name):
    before, after = OTHER[name]
    stored, new = unusual(), unusual(**{name: after})
    free = name in FREE
    expected = {} if free else {name: (before, after)}
    assert configuration.changed_mathematics(stored, new) == expected


def test_another_network_would_be_another_run():
    assert not FIELDS["model"].metadata["free"]


@pytest.mark.parametrize(
    "schedule,is_free",
    [
        ("constant", True),
        ("exponential", True),
        ("smooth_exponential", True),
        ("piecewise", True),
        ("cosine", False),
        ("linear", False),
        ("one_cycle", False),
    ],
)
def test_the_length_may_change_where_no_rate_depends_on_it(schedule, is_free):
    stored = Config(schedule=schedule, num_epochs=2.0, epoch_factors="1:0.1")
    longer = replace(stored, {"num_epochs": 4.0})
    changed = configuration.changed_mathematics(stored, longer)
    assert changed == ({} if is_free else {"num_epochs": (2.0, 4.0)})


def test_the_length_may_not_change_where_the_size_of_images_depends_on_it():
    stored = Config(num_epochs=2.0, early_sizes="16:0.5")
    longer = replace(stored, {"num_epochs": 4.0})
    changed = configuration.changed_mathematics(stored, longer)
    assert changed == {"num_epochs": (2.0, 4.0)}


def test_all_changes_are_reported_at_once():
    changed = configuration.changed_mathematics(
        Config(), Config(seed=1, batch_size=64, max_steps=5, momentum=0.5)
    )
    assert changed == {"seed": (0, 1), "batch_size": (128, 64), "momentum": (0.0, 0.5)}


# Options that do nothing.


@pytest.mark.parametrize(
    "options,ignored",
    [
        ({}, []),
        ({"decay_factor": 0.5, "epochs_per_decay": 2.0}, []),
        ({"schedule": "cosine"}, []),
        ({"schedule": "cosine", "decay_factor": 0.5}, ["decay_factor=0.5"]),
        (
            {"schedule": "constant", "decay_factor": 0.5, "epochs_per_decay": 2.0},
            ["decay_factor=0.5", "epochs_per_decay=2.0"],
        ),
        ({"schedule": "smooth_exponential", "decay_factor": 0.5}, []),
        ({"schedule": "piecewise", "epoch_factors": "1:0.1"}, []),
        ({"schedule": "linear", "epoch_factors": "1:0.1"}, ["epoch_factors=1:0.1"]),
        ({"schedule": "one_cycle", "peak_fraction": 0.5}, []),
        ({"schedule": "cosine", "peak_fraction": 0.5}, ["peak_fraction=0.5"]),
        ({"optimizer": "adamw", "beta1": 0.5, "beta2": 0.5, "epsilon": 0.1}, []),
        (
            {"optimizer": "adamw", "momentum": 0.5, "rho": 0.5},
            ["momentum=0.5", "rho=0.5"],
        ),
        ({"optimizer": "rmsprop", "momentum": 0.5, "rho": 0.5, "epsilon": 0.1}, []),
        ({"optimizer": "rmsprop", "beta1": 0.5}, ["beta1=0.5"]),
        ({"optimizer": "lars", "momentum": 0.5, "trust_coefficient": 0.5}, []),
        (
            {
                "beta1": 0.5,
                "beta2": 0.5,
                "rho": 0.5,
                "epsilon": 0.1,
                "optimizer": "sgd",
            },
            ["beta1=0.5", "beta2=0.5", "rho=0.5", "epsilon=0.1"],
        ),
        ({"strategy": "replicated", "all_reduce": "ring"}, []),
        ({"strategy": "async_towers", "max_staleness": 2}, []),
        ({"strategy": "replicated", "max_staleness": 2}, ["max_staleness=2"]),
        ({"strategy": "model_parallel", "group_size": 2}, []),
        ({"strategy": "towers", "group_size": 2}, ["group_size=2"]),
        ({"device": "gpu", "parameter_device": "gpu"}, []),
        (
            {"device": "gpu", "strategy": "replicated", "parameter_device": "gpu"},
            ["parameter_device=gpu"],
        ),
        (
            {"strategy": "towers", "all_reduce": "ring", "all_reduce_pack_mb": 2.0},
            ["all_reduce=ring", "all_reduce_pack_mb=2.0"],
        ),
        ({"data_dir": "data"}, []),
        ({"dataset": "embedded"}, []),
        ({"dataset": "embedded", "data_dir": "data"}, ["data_dir=data"]),
        ({"dataset": "synthetic", "data_dir": "data"}, ["data_dir=data"]),
        ({"dataset": "image_folder", "image_size": 32, "image_cache_mb": 1.0}, []),
        ({"dataset": "image_folder", "max_image_pixels": 10}, []),
        ({"dataset": "cifar10", "max_image_pixels": 10}, ["max_image_pixels=10"]),
        ({"dataset": "tfds:mnist", "image_size": 32}, []),
        ({"dataset": "mnist", "image_size": 32}, ["image_size=32"]),
    ],
)
def test_options_without_effect_are_reported_with_the_reason(options, ignored):
    lines = checks.ignored_options(Config(**options))
    assert [line.split(" has no effect with ")[0] for line in lines] == ignored
    reasons = {line.split(" has no effect with ")[1] for line in lines}
    assert reasons <= {f"{name}={value}" for name, value in options.items()}


# Row 30.


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"KERAS_BACKEND": "tensorflow"},
        {"TF_USE_LEGACY_KERAS": "0"},
        {"TF_USE_LEGACY_KERAS": ""},
    ],
)
def test_an_environment_with_keras_3_on_tensorflow_is_taken(environ):
    checks.check_environment(environ)


@pytest.mark.parametrize(
    "environ,name",
    [
        ({"KERAS_BACKEND": "jax"}, "KERAS_BACKEND=jax"),
        ({"KERAS_BACKEND": "torch"}, "KERAS_BACKEND=torch"),
        ({"TF_USE_LEGACY_KERAS": "1"}, "TF_USE_LEGACY_KERAS"),
        ({"TF_USE_LEGACY_KERAS": "True"}, "TF_USE_LEGACY_KERAS"),
    ],
)
def test_another_keras_is_refused_with_the_way_out(environ, name):
    with pytest.raises(ConfigError, match=f"^{name}.*unset") as caught:
        checks.check_environment(environ)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "content,words",
    [
        ("[]", "expects an object"),
        ("[" * 100_000, "expects an object"),
        ('{"floatx": 1}', "floatx is 1, which Keras refuses"),
        ('{"floatx": []}', "floatx is"),
        ('{"epsilon": 1}', "epsilon is 1"),
        ('{"image_data_format": "NHWC"}', "image_data_format is 'NHWC'"),
        (None, "not a small file"),
        ('{"floatx": "float64", "image_data_format": "channels_first"}', ""),
        ("{", ""),
    ],
)
def test_a_keras_json_is_refused_where_keras_cannot_be_imported(
    tmp_path, monkeypatch, content, words
):
    path = tmp_path / "keras.json"
    path.mkdir() if content is None else path.write_text(content)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    if words:
        with pytest.raises(ConfigError, match=f"^{path}: .*{words}.*remove it"):
            checks.check_environment()
        with pytest.raises(Exception):  # noqa: B017 - any one ends the import
            runpy.run_path(keras.src.backend.config.__file__)
    else:
        checks.check_environment()
        runpy.run_path(keras.src.backend.config.__file__)
