"""The flags of run_eval.py, and those that have no effect on what is done."""

from absl import flags

from towers.cli import flags as config_flags
from towers.errors import ConfigError
from towers.run.stored_config import EVALUATION_BATCH_SIZE

flags.disclaim_key_flags()  # they are of the program that defines them

_RUN_FLAGS = ("tta", "report", "eval_interval_secs")
TARGETS = ("precision_at", "coverage_at")
_STUDIES = ("average", "calibrate", "suspects", "reject", *TARGETS)
_CHECKPOINT_FLAGS = ("split", "step", "use_ema", *_RUN_FLAGS)
_DEVICE_FLAGS = ("data_dir", "device", "num_towers", "strategy", "batch_size")
# What is done instead of an evaluation -> flags that have no effect then.
_WITHOUT_EFFECT = {
    "compare": (*_STUDIES, *_CHECKPOINT_FLAGS, *_DEVICE_FLAGS),
    "ensemble": (*_STUDIES, *_RUN_FLAGS),
    "calibrate": ("suspects", "reject", *TARGETS, "split", *_RUN_FLAGS),
    "reject": ("suspects", "split", *_RUN_FLAGS),
    "suspects": _RUN_FLAGS,
}


def define_flags() -> None:
    """Define the program's flags."""
    flags.DEFINE_string("workdir", None, "Folder of the run.")
    flags.DEFINE_list("compare", None, "Folders of runs to compare instead.")
    about = "Runs whose average probabilities are evaluated."
    flags.DEFINE_list("ensemble", None, about)
    flags.register_multi_flags_validator(
        ["workdir", "compare", "ensemble"],
        lambda given: list(given.values()).count(None) == 2,
        "give --workdir, --compare or --ensemble",
    )
    about = "Runs whose parameters are averaged into --workdir first."
    flags.DEFINE_list("average", None, about)
    about = "Fit a calibration temperature to held-out images."
    flags.DEFINE_bool("calibrate", False, about)
    about = "Choose a threshold below which images are unknown (--precision_at)."
    flags.DEFINE_bool("reject", False, about)
    about = "Precision of the answers that --reject grants on held-out images."
    flags.DEFINE_float("precision_at", None, about, 0.0, 1.0)
    about = "Share of held-out images that --reject answers, in place of a precision."
    flags.DEFINE_float("coverage_at", None, about, 0.0, 1.0)
    about = "List images of --split with suspected label errors."
    flags.DEFINE_bool("suspects", False, about)
    splits = ("test", "validation", "train")
    flags.DEFINE_enum("split", "test", splits, "Split of --suspects and --ensemble.")
    config_flags.define_step_flag()
    flags.DEFINE_bool("use_ema", None, "Only EMA weights, or only raw weights.")
    about = "Seconds between checks for new checkpoints; 0 for one check."
    flags.DEFINE_float("eval_interval_secs", 0.0, about, 0.0, 1e6)
    flags.DEFINE_bool("report", False, "Write report/index.html of the run.")
    # An evaluation may use other devices than the training.
    config_flags.define_config_flags(["data_dir", "device", "num_towers", "strategy"])
    config_flags.define_config_flags(
        ["group_size", "batch_size", "tta"], batch_size=EVALUATION_BATCH_SIZE
    )


def validate_flags():
    """Raise ConfigError if a flag has no effect on what is done."""
    values = flags.FLAGS
    if any(values[name].value is not None for name in TARGETS):
        values["reject"].value = True
    study = next((name for name in _WITHOUT_EFFECT if values[name].value), None)
    if study:
        config_flags.refuse_with(study, _WITHOUT_EFFECT[study])
    elif values.split != "test":
        why = "an evaluation is of the test images; add --suspects, or omit it"
        raise ConfigError(f"--split={values.split}: {why}")
