"""Writes the tables of docs/flags.md: python -m docs.write_flags."""

import pathlib
import re

from towers.cli import train_flags
from towers.cli.help import SECTIONS
from towers.config import FIELDS
from towers.config.choices import CLOSED, IN_A_FILE

PAGE = pathlib.Path(__file__).with_name("flags.md")
# The tables follow this line.
BEGIN = "<!-- Written by python -m docs.write_flags. -->\n"

# Page, or a part of one -> the flags that it describes.
LINKS = {
    "after_training.md#cross-validation": "folds validation_fold",
    "augmentation.md": "augment crop_scale cutout_size mixup cutmix random_erasing",
    "augmentation.md#policies": "policy rand_augment",
    "augmentation.md#repeated-augmentation": "repeats",
    "cluster.md": "cluster task_index allow_public_address",
    "containers.md": "columns image_dir fold",
    "containers.md#order": "shuffle_buffer_mb",
    "data.md": "dataset data_dir",
    "data.md#classes-with-few-images": "sampler class_weights",
    "data.md#image_folder": "class_level image_size center_crop fit interpolation",
    "data.md#standardization": "standardize",
    "extending.md#an-optimizer-with-its-own-hyperparameter": "optimizer_options",
    "gpus.md#the-batch": "batch_size",
    "input.md": "input image_cache_mb",
    "label_sets.md": "pos_weights",
    "losses.md": "loss label_smoothing focal_gamma target_threshold logit_adjustment",
    "losses.md#distillation": "teacher distillation_weight distillation_temperature",
    "memory.md#recomputation": "recompute",
    "networks.md": "model width",
    "networks.md#dropout-and-stochastic-depth": "dropout stochastic_depth",
    "networks.md#freeze-parameters": "freeze",
    "networks.md#start-from-trained-parameters": "init_from",
    "optimizers.md": "optimizer learning_rate momentum weight_decay param_rates "
    "layer_decay",
    "python.md#callbacks": "track",
    "report.md": "report",
    "runs.md#before-a-run": "dry_run lr_range_test minutes",
    "runs.md#the-best-step": "validation_fraction patience best_by min_delta",
    "runs.md#what-a-run-shows": "profile_steps progress",
    "schedules.md": "schedule warmup_epochs warmup_start_factor min_rate_factor",
    "speed.md": "precision compile early_sizes",
    "strategies.md": "strategy",
}
LINKS = {name: page for page, names in LINKS.items() for name in names.split()}


def tables() -> str:
    """The flags of run_train.py, a table for each section of its help."""
    lines, values = [], train_flags.flags.FlagValues()
    for name, field in FIELDS.items():
        if name in SECTIONS:
            lines += _head(SECTIONS[name])
        lines.append(_row(name, field.default, _meaning(name, field)))
    train_flags.define_train_flags(values)
    train_flags.define_cluster_flags(values)
    lines += _head("Others")
    lines += [_row(name, values[name].default, values[name].help) for name in values]
    return "\n".join(lines) + "\n"


def _meaning(name, field):
    """The help of an option, and the names of its choices."""
    table, choices = field.metadata["table"], field.metadata["choices"]
    text = field.metadata["help"]
    if choices:
        names = " ".join(f"`{x}`" for x in choices)
        file = f", or a function of your own as `{IN_A_FILE}`"
        text += f" One of {names}{file * (table not in ('', *CLOSED))}."
    return text


def _head(title):
    return [
        "",
        f"## {title}",
        "",
        "| flag | default | meaning |",
        "| --- | --- | --- |",
    ]


def _row(name, default, meaning):
    flag = f"[`--{name}`]({LINKS[name]})" if name in LINKS else f"`--{name}`"
    default = "" if default in (None, "", []) else f"`{default}`"
    meaning = re.sub("^<.*?>: ", "", meaning)  # by absl
    meaning = re.sub("([*<])", r"\\\1", meaning)
    return f"| {flag} | {default} | {meaning} |"


if __name__ == "__main__":
    text, begin, _ = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(text + begin + tables())
