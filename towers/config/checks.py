"""What a Config must be like, and what of it has no effect; no TensorFlow is needed.

Each check takes a Config, or an option of it, and ends in one line that names the
options and the way out.
"""

import dataclasses
import difflib
import math
import os
from collections.abc import Mapping
from typing import Any

from towers.config.list_options import (
    parse_early_sizes,
    parse_epoch_factors,
    parse_param_rates,
)
from towers.errors import ConfigError

# Any data set that tensorflow-datasets has prepared: tfds:NAME.
TFDS = "tfds:"

# Optimizers whose steps are as long, however long the gradients are.
SCALE_FREE = ("rmsprop", "adamw", "lars", "muon")

# Options -> the optimizers or schedules that read them.
_READ_BY_OPTIMIZERS = {
    ("momentum",): ("sgd", "nesterov", "rmsprop", "lars", "muon"),
    ("muon_momentum",): ("muon",),
    ("beta1", "beta2"): ("adamw",),
    ("rho",): ("rmsprop",),
    ("epsilon",): ("rmsprop", "adamw"),
    ("trust_coefficient",): ("lars",),
}
_READ_BY_SCHEDULES = {
    ("decay_factor", "epochs_per_decay"): ("exponential", "smooth_exponential"),
    ("epoch_factors",): ("piecewise",),
    ("peak_fraction",): ("one_cycle",),
}


def check_option(field: dataclasses.Field, value: Any) -> Any:
    """The value in the field's own type, or a ConfigError that names the field."""
    kind, bounds = field.type, field.metadata
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(
            f"{field.name}={value!r}: must be {kind.__name__}, "
            f"is {type(value).__name__}"
        )
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{field.name}={value}: must be finite")
    choices, prefix = bounds["choices"], bounds["or_prefix"]
    is_prefixed = prefix and value.startswith(prefix) and value != prefix
    if choices and value not in choices and not is_prefixed:
        raise ConfigError(
            f"{field.name}={value!r}: {nearest(value, choices)}must be one of "
            + ", ".join(choices)
            + (f" or {prefix}NAME" if prefix else "")
        )
    for name, wrong in (
        ("at_least", lambda bound: value < bound),
        ("above", lambda bound: value <= bound),
        ("below", lambda bound: value >= bound),
        ("at_most", lambda bound: value > bound),
    ):
        if bounds[name] is not None and wrong(bounds[name]):
            words = name.replace("_", " ")
            raise ConfigError(f"{field.name}={value}: must be {words} {bounds[name]}")
    return value


def check_together(config: Any) -> None:
    """Refuses options that contradict each other, both values in the message."""
    if config.optimizer == "nesterov" and config.momentum == 0:
        raise ConfigError(
            "optimizer=nesterov with momentum=0.0: Nesterov's form needs a momentum; "
            "set --momentum=0.9 or --optimizer=sgd"
        )
    no_factors = parse_epoch_factors(config.epoch_factors) == ()
    if no_factors and config.schedule == "piecewise":
        raise ConfigError(
            "schedule=piecewise with epoch_factors='': set --epoch_factors, such as "
            "30:0.1,60:0.01"
        )
    parse_param_rates(config.param_rates)
    parse_early_sizes(config.early_sizes)
    if config.num_towers > config.batch_size:
        raise ConfigError(
            f"batch_size={config.batch_size} with num_towers={config.num_towers}: "
            "every tower needs an image; raise --batch_size or lower --num_towers"
        )
    if config.num_towers and config.num_towers % config.group_size:
        raise ConfigError(
            f"num_towers={config.num_towers} with group_size={config.group_size}: the "
            "groups do not divide the towers"
        )
    if config.strategy == "model_parallel" and config.optimizer == "muon":
        raise ConfigError(
            "optimizer=muon with strategy=model_parallel: its steps need whole "
            "kernels, which no device holds; choose another --optimizer or --strategy"
        )
    if config.strategy == "async_towers" and config.accumulate_steps > 1:
        raise ConfigError(
            f"accumulate_steps={config.accumulate_steps} with strategy=async_towers: "
            "each tower applies its gradients at once; raise --batch_size or choose a "
            "synchronous strategy"
        )
    if config.strategy == "async_towers" and config.batch_norm == "sync":
        raise ConfigError(
            "batch_norm=sync with strategy=async_towers: its towers do not meet to "
            "share moments; set --batch_norm=local or choose a synchronous strategy"
        )
    if config.strategy == "async_towers" and config.precision == "float16":
        raise ConfigError(
            "precision=float16 with strategy=async_towers: its towers have no common "
            "step that could be passed over where one overflows; set "
            "--precision=bfloat16 or choose a synchronous strategy"
        )
    if config.strategy == "async_towers" and config.input == "resident":
        raise ConfigError(
            "input=resident with strategy=async_towers: its towers draw their shares "
            "from one stream; set --input=stream or choose a synchronous strategy"
        )
    if config.compile == "xla":
        reasons = {
            "strategy=model_parallel": config.strategy == "model_parallel",
            "batch_norm=sync": config.batch_norm == "sync",
        }
        for reason in (name for name, applies in reasons.items() if applies):
            raise ConfigError(
                f"compile=xla with {reason}: what is compiled must not cross devices; "
                "drop one of the two"
            )
        if config.device_memory_mb:
            raise ConfigError(
                f"device_memory_mb={config.device_memory_mb} with compile=xla: what "
                "XLA keeps cannot be accounted; drop one of the two"
            )
    is_scaled = config.strategy == "async_towers" and config.async_scale_gradients
    if is_scaled and config.optimizer in SCALE_FREE:
        raise ConfigError(
            f"optimizer={config.optimizer} with async_scale_gradients=True: its steps "
            "are as long, however long the gradients are; set "
            "--noasync_scale_gradients, and --learning_rate for an update per tower"
        )
    if config.warmup_epochs > config.num_epochs:
        raise ConfigError(
            f"warmup_epochs={config.warmup_epochs} with "
            f"num_epochs={config.num_epochs}: the warm-up is longer than the run"
        )
    if config.device == "cpu" and config.parameter_device == "gpu":
        raise ConfigError(
            "parameter_device=gpu with device=cpu: the towers would run on the CPU and "
            "their variables on a GPU; drop one of the two"
        )


def ignored_options(config: Any) -> list[str]:
    """One line for each option that was set and has no effect in this configuration."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    lines = []

    def ignore(because: str, *names: str) -> None:
        for name in names:
            if getattr(config, name) != defaults[name]:
                value = getattr(config, name)
                lines.append(f"{name}={value} has no effect with {because}")

    for names, readers in _READ_BY_OPTIMIZERS.items():
        if config.optimizer not in readers:
            ignore(f"optimizer={config.optimizer}", *names)
    for names, readers in _READ_BY_SCHEDULES.items():
        if config.schedule not in readers:
            ignore(f"schedule={config.schedule}", *names)
    if config.strategy not in ("towers", "async_towers"):
        ignore(f"strategy={config.strategy}", "parameter_device")
    if config.strategy != "async_towers":
        names = ("async_scale_gradients", "max_staleness")
        ignore(f"strategy={config.strategy}", *names)
    if config.strategy != "model_parallel":
        ignore(f"strategy={config.strategy}", "group_size")
    if config.strategy != "replicated":
        names = ("all_reduce", "all_reduce_pack_mb", "all_reduce_dtype")
        ignore(f"strategy={config.strategy}", *names)
    if config.dataset in ("embedded", "synthetic"):
        ignore(f"dataset={config.dataset}", "data_dir")
    if config.dataset != "image_folder" and not config.dataset.startswith(TFDS):
        ignore(f"dataset={config.dataset}", "image_size", "image_cache_mb")
    return lines


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


def nearest(name: str, names: tuple[str, ...] | list[str]) -> str:
    """'did you mean ...? ' for the nearest of some names, or nothing."""
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]!r}? " if close else ""
