"""Evaluation of a run's checkpoints: every test image exactly once."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from towers import build
from towers.config import Config, checks
from towers.data.batches import EvalBatches
from towers.errors import CheckpointError, ConfigError, data_errors_of_tensorflow
from towers.evaluation import devices
from towers.evaluation.figures import Outcomes, figures
from towers.evaluation.report import mistakes_csv, table, to_json
from towers.evaluation.restored import (
    RestoredRun,
    find_checkpoint,
    kinds_of_parameters,
    load_run,
)
from towers.optim.epochs import num_images
from towers.output import say
from towers.run import checkpoint_files
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.reports import Reports
from towers.run.restore import stopwatch_of

# Results of `accuracy` or `figures` by whether they are of the moving averages.
Evaluations = Mapping[bool, Mapping[str, Any]]

# The figures in `result.json`, in their order.
NAMES = (
    "accuracy",
    "accuracy_interval",
    "accuracy_tta",
    "top5_accuracy",
    "top5_accuracy_interval",
    "loss",
    "correct",
    "macro_f1",
    "calibration_error",
)
TABLES = ("classes", "confusion_matrix")

# Between two looks for a new checkpoint; `time.sleep` takes no number of any size.
MOST_INTERVAL_SECS = 1e6

__all__ = ["RestoredRun", "accuracies", "evaluate", "load_run"]


def accuracies(counts_of_kinds: Mapping[bool, Mapping[str, float]]) -> Evaluations:
    """Counts of the trainer's `evaluate`, per kind with "accuracy" and the mean "loss",
    and "accuracy_tta" where it uses test-time augmentation."""
    results = {}
    for use_averages, counts in counts_of_kinds.items():
        num_images = counts["images"]
        results[use_averages] = {
            "accuracy": counts["correct"] / num_images,
            "loss": counts["loss"] / num_images,
            "correct": int(counts["correct"]),
            "images": int(num_images),
        }
        if "correct_tta" in counts:
            results[use_averages]["accuracy_tta"] = counts["correct_tta"] / num_images
    return results


def record_of(
    evaluations: Evaluations,
    split: str,
    names: Sequence[str] = ("accuracy", "accuracy_tta", "loss"),
) -> dict[str, Any]:
    """Results of evaluations under their names in `metrics.jsonl`, `result.json` and
    TensorBoard, such as "test_accuracy", and "test_accuracy_ema" for the moving
    averages."""
    return {
        f"{split}_{name}{'_ema' if use_averages else ''}": counts[name]
        for use_averages, counts in evaluations.items()
        for name in names
        if name in counts
    }


def accuracy_line(
    step: int, evaluations: Evaluations, split: str, config: Config
) -> str:
    """The line about the accuracies of a step."""
    parts = []
    for use_averages, counts in evaluations.items():
        words = "with moving averages of the parameters " if use_averages else ""
        words += "{accuracy:.4f} ({correct} of {images})".format(**counts)
        if "accuracy_tta" in counts:
            words += f", {counts['accuracy_tta']:.4f} by tta={config.tta}"
        parts.append(words)
    return f"step {step}: {split} accuracy {'; '.join(parts)}"


def evaluate(
    workdir: str | os.PathLike,
    config: Config | None = None,
    *,
    step: int = 0,
    use_ema: bool | None = None,
    eval_interval_secs: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
) -> dict:
    """See `towers.evaluate`.

    Args:
        sleep: waits for some seconds.

    Raises:
        CheckpointError: there is no checkpoint, or none that is valid and fits.
        ConfigError: the data set has other classes than that of the run, for example.
    """
    checks.check_environment()
    if not 0 <= eval_interval_secs <= MOST_INTERVAL_SECS:
        raise ConfigError(
            f"eval_interval_secs={eval_interval_secs:g}: must be at least 0 and at "
            f"most {MOST_INTERVAL_SECS:g}"
        )
    if step and eval_interval_secs:
        raise ConfigError(
            f"step={step} with eval_interval_secs={eval_interval_secs:g}: one "
            "checkpoint is evaluated once; drop one of the two"
        )
    folder = RunFolder(workdir)
    folder.check()
    if config is None:
        config = folder.evaluation_config(step)
    kinds = kinds_of_parameters(config, use_ema)
    used = devices.configure(config, folder, say)
    info = folder.stored_dataset_info(step)
    parts = build.build(
        config,
        device_kind=used.kind,
        for_training=False,
        dataset_info=info,
        # The end of a run that is followed is counted in epochs of its training images.
        test_only=not eval_interval_secs,
    )
    if info is not None and parts.data.train is not None:
        if words := info.training_difference(DatasetInfo.of(parts.data)):
            say(
                f"warning: the data set is not that of the run: {words}; test images "
                "that were held out of it may have been trained on"
            )
    trainer = build.create_trainer(config, parts, used)
    stream = EvalBatches(parts.data.test, parts.augment, config.batch_size).stream()
    result, waits_after, known = {}, -1, {}
    with Reports(folder, "eval", say) as reports:
        while True:
            checkpoint = find_checkpoint(folder, step, known=known)
            if checkpoint is None and not eval_interval_secs:
                raise CheckpointError(
                    f"{folder.checkpoints} holds no checkpoint yet; train first, or "
                    "wait with --eval_interval_secs"
                )
            if checkpoint:
                tensors = checkpoint_files.restore_fitting(
                    checkpoint.tensors, trainer.state()
                )
                trainer.load(tensors)
                evaluations, mistakes = _compute(trainer, stream, kinds, parts.data)
                result = _result(checkpoint, evaluations)
                reports.scalars(checkpoint.step, record_of(evaluations, "test"))
                reports.file(folder.result, to_json(result))
                reports.file(folder.mistakes, mistakes)
                say(accuracy_line(checkpoint.step, evaluations, "test", config))
            if eval_interval_secs == 0 or (result and _is_last(result, config, parts)):
                for line in table(evaluations):
                    say(line)
                *_, last = evaluations.values()
                if last["correct"] < last["images"]:
                    say(f"the images that are predicted wrongly: {folder.mistakes}")
                return result
            if waits_after != result.get("step"):
                waits_after = result.get("step")
                say(_waiting_line(folder, waits_after, eval_interval_secs))
            sleep(eval_interval_secs)


def _compute(trainer, stream, kinds, data):
    """The figures by whether they are of the moving averages, and the text of
    `mistakes.csv`, of the last of them."""
    with data_errors_of_tensorflow():
        outcomes = Outcomes.of_kinds(trainer.evaluator.predictions(stream, kinds))
    evaluations = {kind: figures(x, data.class_names) for kind, x in outcomes.items()}
    last = outcomes[kinds[-1]]
    return evaluations, mistakes_csv(last, data.test, data.class_names)


def _waiting_line(folder, step, secs):
    """Says that a followed run is waited for, and how that ends."""
    newer = "a checkpoint" if step is None else f"a checkpoint after step {step}"
    line = f"waiting for {newer} in {folder.checkpoints}, looking every {secs:g} s"
    if folder.holder() is None:
        line += "; no process trains this run now"
    return f"{line}. It ends with the run's last step, or with Ctrl-C"


def _is_last(result, config, parts):
    """True if the run ends at the step of the result.

    Images decide, not steps: the batch size of the config is that of the evaluation.
    """
    if config.max_steps and result["step"] >= config.max_steps:
        return True
    return result["images"] >= num_images(config.num_epochs, parts.num_examples)


def _result(checkpoint, evaluations):
    trainer_state = checkpoint.trainer_state
    stopwatch = stopwatch_of(trainer_state)
    images_per_step = trainer_state["images_seen"] / max(checkpoint.step, 1)
    of_run = {
        "step": checkpoint.step,
        "images": trainer_state["images_seen"],
        "test_images": next(iter(evaluations.values()))["images"],
        "train_secs": stopwatch.train_secs,
        "start_secs": trainer_state.get("start_secs"),
        "images_per_sec": stopwatch.timed_steps * images_per_step / stopwatch.timed_secs
        if stopwatch.timed_secs
        else None,
    }
    *_, reported = record_of(evaluations, "test", ["accuracy"])
    tables = record_of(evaluations, "test", TABLES)
    return (
        {"reported": reported} | record_of(evaluations, "test", NAMES) | of_run | tables
    )
