"""Checks of a Config: contradictions, options without effect, and the environment.

Each check ends in one line that names the options and the way out. None but
`ignored_options` imports TensorFlow.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from towers.config import factories
from towers.config.choices import TABLES, find
from towers.config.list_options import (
    parse_early_sizes,
    parse_epoch_factors,
    parse_freeze,
    parse_optimizer_options,
    parse_param_rates,
)
from towers.errors import ConfigError, one_line

_MOST_OF_KERAS_JSON = 1_000_000
# What Keras accepts in keras.json.
_KERAS_SETTINGS = {
    "floatx": lambda value: value in ("float16", "float32", "float64"),
    "epsilon": lambda value: isinstance(value, float),
    "image_data_format": lambda value: value in ("channels_first", "channels_last"),
}


def check_together(config: Any) -> None:
    """Refuses options that contradict each other, both values in the message."""
    parse_param_rates(config.param_rates)
    parse_freeze(config.freeze)
    parse_early_sizes(config.early_sizes)
    _check_optimizer(config)
    _check_schedule(config)
    _check_devices(config)
    _check_image_size(config)
    _check_standardization(config)
    if _has(config, "strategy", "asynchronous"):
        _check_asynchronous(config)
    if config.compile == "xla":
        _check_xla(config)


def _has(config, option, trait):
    """True if the choice of an option has a trait."""
    return trait in find(option, getattr(config, option)).traits


def _check_optimizer(config):
    if config.optimizer == "nesterov" and config.momentum == 0:
        raise ConfigError(
            "optimizer=nesterov with momentum=0.0: Nesterov's form needs a momentum; "
            "set --momentum=0.9 or --optimizer=sgd"
        )
    needs_kernels = _has(config, "optimizer", "whole_parameters")
    if needs_kernels and _has(config, "strategy", "sharded"):
        raise ConfigError(
            f"optimizer={config.optimizer} with strategy={config.strategy}: its steps "
            "need whole kernels, which no device holds; choose another --optimizer or "
            "--strategy"
        )
    for name in parse_optimizer_options(config.optimizer_options):
        if name in _fields_read_by(config, "optimizer"):
            raise ConfigError(
                f"optimizer_options={config.optimizer_options!r}: {name} has a flag of "
                f"its own; set --{name}"
            )


def _check_schedule(config):
    no_factors = parse_epoch_factors(config.epoch_factors) == ()
    if no_factors and config.schedule == "piecewise":
        raise ConfigError(
            "schedule=piecewise with epoch_factors='': set --epoch_factors, such as "
            "30:0.1,60:0.01"
        )
    if config.warmup_epochs > config.num_epochs:
        raise ConfigError(
            f"warmup_epochs={config.warmup_epochs} with "
            f"num_epochs={config.num_epochs}: the warm-up is longer than the run"
        )


def _check_image_size(config):
    num_pixels = config.image_size**2
    if num_pixels > config.max_image_pixels:
        raise ConfigError(
            f"image_size={config.image_size} with "
            f"max_image_pixels={config.max_image_pixels}: the images have "
            f"{num_pixels:,} pixels; lower the one or raise the other"
        )


def _check_standardization(config):
    own_moments = _has(config, "model", "own_moments")
    if config.init_from == "imagenet" and not own_moments:
        raise ConfigError(
            f"init_from=imagenet with model={config.model}: Keras has weights of its "
            "own networks alone, --model=keras:NAME; give a file or a run folder"
        )
    if own_moments and _has(config, "augment", "by_image"):
        raise ConfigError(
            f"augment={config.augment} with model={config.model}: the one standardizes "
            "each image by itself, the other was made for a mean and a deviation of "
            "its own; choose another --augment, such as pad_crop_flip"
        )


def _check_devices(config):
    if config.num_towers > config.batch_size:
        raise ConfigError(
            f"batch_size={config.batch_size} with num_towers={config.num_towers}: "
            "every tower needs an image; raise --batch_size or lower --num_towers"
        )
    if config.num_towers and config.num_towers % config.group_size:
        raise ConfigError(
            f"num_towers={config.num_towers} with group_size={config.group_size}: the "
            "groups do not divide the towers; set --num_towers to a multiple of "
            f"{config.group_size}, or another --group_size"
        )
    if config.device == "cpu" and config.parameter_device == "gpu":
        raise ConfigError(
            "parameter_device=gpu with device=cpu: the towers would run on the CPU and "
            "their variables on a GPU; drop one of the two"
        )


def _check_asynchronous(config):
    strategy = f"strategy={config.strategy}"
    if config.accumulate_steps > 1:
        raise ConfigError(
            f"accumulate_steps={config.accumulate_steps} with {strategy}: each tower "
            "applies its gradients at once; raise --batch_size or choose a "
            "synchronous strategy"
        )
    if config.batch_norm == "sync":
        raise ConfigError(
            f"batch_norm=sync with {strategy}: its towers do not wait for each other "
            "to share moments; set --batch_norm=local or choose a synchronous strategy"
        )
    if config.precision == "float16":
        raise ConfigError(
            f"precision=float16 with {strategy}: its towers have no common step that "
            "could be skipped where one overflows; set --precision=bfloat16 or choose "
            "a synchronous strategy"
        )
    if config.input == "resident":
        raise ConfigError(
            f"input=resident with {strategy}: its towers draw their shares from one "
            "stream; set --input=stream or choose a synchronous strategy"
        )
    if config.async_scale_gradients and _has(config, "optimizer", "scale_free"):
        raise ConfigError(
            f"optimizer={config.optimizer} with async_scale_gradients=True: its steps "
            "are as long, however long the gradients are; set "
            "--noasync_scale_gradients, and --learning_rate for an update per tower"
        )


def _check_xla(config):
    crosses_devices = {
        f"strategy={config.strategy}": _has(config, "strategy", "sharded"),
        "batch_norm=sync": config.batch_norm == "sync",
    }
    for reason in (name for name, applies in crosses_devices.items() if applies):
        raise ConfigError(
            f"compile=xla with {reason}: the compiled part must not cross devices; "
            "drop one of the two"
        )


def ignored_options(config: Any) -> list[str]:
    """One line for each option that was set and has no effect in this configuration.

    An option is read by a choice if the signature of its target names it. Imports the
    targets, hence TensorFlow.
    """
    lines = []
    for option in TABLES:
        names = _read_by(option, getattr(config, option))
        for name, field in _fields_read_by(config, option).items():
            value = getattr(config, name)
            if value != field.default and names is not None and name not in names:
                because = f"{option}={getattr(config, option)}"
                lines.append(f"{name}={value} has no effect with {because}")
    if _has(config, "strategy", "sharded") and config.group_size == 1:
        lines.append(
            f"strategy={config.strategy} with group_size=1 splits no network; set "
            "--group_size"
        )
    return lines


def _fields_read_by(config, option):
    """Name -> field of the options that only the choice of this option may read."""
    fields = type(config).__dataclass_fields__
    return {n: f for n, f in fields.items() if f.metadata["read_by"] == option}


def _read_by(option, name):
    """The arguments that a choice's signature names; None where it takes any."""
    names = factories.argument_names(factories.resolve(option, name))
    if names and "image_options" in names:
        # Those that `image_options` holds.
        names += ("image_size", "image_cache_mb", "max_image_pixels", "bad_images")
    if names and "asynchronous" in find(option, name).traits:
        names += ("async_scale_gradients", "max_staleness")  # read by its trainer
    return names


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Refuses settings of Keras under which the networks would not be TensorFlow's."""
    backend = environ.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        raise ConfigError(
            f"KERAS_BACKEND={backend}: towers trains with TensorFlow; unset "
            "KERAS_BACKEND or set it to tensorflow"
        )
    if environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true"):
        raise ConfigError(
            "TF_USE_LEGACY_KERAS is set: towers needs Keras 3, which TensorFlow would "
            "then replace by Keras 2; unset it"
        )
    folder = environ.get("KERAS_HOME") or os.path.expanduser("~/.keras")
    _check_keras_json(os.path.join(folder, "keras.json"))


def _check_keras_json(path):
    """Refuses a file with which Keras cannot be imported; towers takes nothing from it.
    Keras itself ignores one that is no JSON."""
    if not os.path.exists(path):
        return
    if not os.path.isfile(path) or os.path.getsize(path) > _MOST_OF_KERAS_JSON:
        raise ConfigError(f"{path}: is not a small file; Keras reads it: remove it")
    try:
        with open(path, "rb") as file:
            values = json.loads(file.read())
    except OSError as error:
        raise ConfigError(f"{path}: Keras cannot read it: {error.strerror}") from None
    except ValueError:
        return
    except RecursionError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: Keras expects an object; correct or remove it")
    for name, is_valid in _KERAS_SETTINGS.items():
        if name in values and not is_valid(values[name]):
            raise ConfigError(
                f"{path}: {name} is {one_line(repr(values[name]), 40)}, which Keras "
                "refuses; correct or remove it"
            )
