"""Evaluation of a run's checkpoints: every test image exactly once."""

import os
import time
from collections.abc import Callable

from towers import build
from towers.config import Config, checks
from towers.data.batches import EvalBatches
from towers.errors import CheckpointError, ConfigError, data_errors_of_tensorflow
from towers.evaluation import devices
from towers.evaluation.figures import figures, predictions_of
from towers.evaluation.report import (
    NAMES,
    TABLES,
    accuracies,
    accuracy_line,
    mistakes_csv,
    record_of,
    table,
    to_json,
)
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

__all__ = [
    "RestoredRun",
    "accuracies",
    "accuracy_line",
    "evaluate",
    "load_run",
    "record_of",
]


def evaluate(
    workdir: str | os.PathLike,
    config: Config | None = None,
    *,
    step: int = 0,
    use_ema: bool | None = None,
    eval_interval_secs: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
) -> dict:
    """See `towers.evaluate`; `sleep` waits for some seconds."""
    checks.check_environment()
    if step and eval_interval_secs:
        raise ConfigError(
            f"step={step} with eval_interval_secs={eval_interval_secs:g}: one "
            "checkpoint is evaluated once; drop one of the two"
        )
    folder = RunFolder(workdir)
    folder.check()
    config = config or folder.evaluation_config(step)
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
    data = parts.data
    if info is not None and data.train is not None:
        if difference := info.training_difference(DatasetInfo.of(data)):
            say(
                f"warning: the data set is not that of the run: {difference}; test "
                "images that were held out of it may have been trained on"
            )
    trainer = build.create_trainer(config, parts, used)
    stream = EvalBatches(data.test, parts.augment, config.batch_size).stream()
    with Reports(folder, "eval", say) as reports:
        for checkpoint in _checkpoints(folder, step, eval_interval_secs, sleep):
            state = checkpoint_files.restore_fitting(
                checkpoint.tensors, trainer.state()
            )
            trainer.load(state)
            with data_errors_of_tensorflow():
                predictions = predictions_of(
                    trainer.evaluator.predictions(stream, kinds)
                )
            evaluations = {
                kind: figures(predictions[kind], data.class_names) for kind in kinds
            }
            reported = predictions[kinds[-1]]
            result = _result(checkpoint, evaluations)
            reports.scalars(checkpoint.step, record_of(evaluations, "test"))
            reports.file(folder.result, to_json(result))
            reports.file(
                folder.mistakes, mistakes_csv(reported, data.test, data.class_names)
            )
            say(accuracy_line(checkpoint.step, evaluations, "test", config))
            if not eval_interval_secs or _is_last(result, config, parts):
                break
        for line in table(evaluations):
            say(line)
        if not reported.correct.all():
            say(f"the images that are predicted wrongly: {folder.mistakes}")
    return result


def _checkpoints(folder, step, eval_interval_secs, sleep):
    """The checkpoint of a step or the newest one and, with an interval, each newer one
    as it comes, without an end."""
    known, waits = {}, False
    while True:
        checkpoint = find_checkpoint(folder, step, known=known)
        if checkpoint:
            yield checkpoint
        elif not eval_interval_secs:
            raise CheckpointError(
                f"{folder.checkpoints} holds no checkpoint yet; train first, or wait "
                "with --eval_interval_secs"
            )
        if checkpoint or not waits:
            waits = True
            newer = f" after step {checkpoint.step}" if checkpoint else ""
            trains = folder.holder() is not None
            say(
                f"waiting for a checkpoint{newer} in {folder.checkpoints}, looking "
                f"every {eval_interval_secs:g} s"
                + ("" if trains else "; no process trains this run now")
                + ". It ends with the run's last step, or with Ctrl-C"
            )
        sleep(eval_interval_secs)


def _is_last(result, config, parts):
    """True if the run ends at the step of the result.

    Images decide, not steps: the batch size of the config is that of the evaluation.
    """
    if config.max_steps and result["step"] >= config.max_steps:
        return True
    return result["images"] >= num_images(config.num_epochs, parts.num_examples)


def _result(checkpoint, evaluations):
    """The content of `result.json`."""
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
