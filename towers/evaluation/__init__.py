"""Evaluation of a run's checkpoints: every test image exactly once."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from towers import build, console
from towers.config import Config, checks
from towers.data import arrays
from towers.data.batches import EvalBatches
from towers.errors import ConfigError, data_errors_of_tensorflow
from towers.evaluation.figures import figures, predictions_of
from towers.evaluation.report import (
    accuracies,
    accuracy_line,
    mistakes_csv,
    record_of,
    result_of,
    table,
    to_json,
)
from towers.evaluation.restored import (
    RestoredRun,
    configure_devices,
    evaluated_weights,
    load_run,
    read_checkpoint,
)
from towers.evaluation.run_report import Evaluated, try_to_write, write_report
from towers.optim.epochs import num_images
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.metrics import read_metrics
from towers.run.reports import NoReports, Reports
from towers.run.restore import checkpointer_of, restore_fitting, stopwatch_of

__all__ = ["RestoredRun", "accuracies", "evaluate", "load_run"]


def evaluate(
    workdir: str | os.PathLike,
    config: Config | None = None,
    *,
    data: Any = None,
    step: int | str = "best",
    use_ema: bool | None = None,
    eval_interval_secs: float = 0.0,
    report: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> dict:
    """See `towers.evaluate`; `sleep` waits for some seconds."""
    checks.check_environment()
    if not 0 <= eval_interval_secs <= 1e6:
        raise ConfigError(f"eval_interval_secs={eval_interval_secs}: give 0 to 1000000")
    if isinstance(step, int) and eval_interval_secs:
        raise ConfigError(
            f"step={step} with eval_interval_secs={eval_interval_secs:g}: one "
            "checkpoint is evaluated once; drop one of the two"
        )
    if data is not None and eval_interval_secs:
        raise ConfigError("data is evaluated once; leave eval_interval_secs out")
    # Build.
    folder = RunFolder(workdir)
    step = "last" if eval_interval_secs else step
    config = config or folder.evaluation_config(step)
    weights = evaluated_weights(config, use_ema)
    devices = configure_devices(config, folder)
    info = folder.stored_dataset_info(step)
    # Of other images than those of the run nothing is written.
    is_of_run = data is None or config.choice_of("dataset").is_given
    if data is not None:
        class_names, fitted = info.class_names if info else (), {}
        if info and not is_of_run:
            fitted = {
                "image_shape": info.image_shape,
                "max_pixels": config.max_image_pixels,
                "center_crop": config.center_crop,
            }
        name = arrays.give_test_set(data, class_names, **fitted)
        config = replace(config, dataset=name)
        if report and not is_of_run:
            console.warn("report: of data other than the run's no page is written")
    parts = build.build(
        config,
        device_kind=devices.kind,
        for_training=False,
        dataset_info=info,
        # The end of a run that is followed is counted in epochs of its training images.
        test_only=not eval_interval_secs,
    )
    data = parts.data
    if info is not None and data.train is not None:
        if difference := info.training_difference(DatasetInfo.of(data)):
            console.warn(
                f"the data set is not that of the run: {difference}; test "
                "images that were held out of it may have been trained on"
            )
    trainer = build.create_trainer(config, parts, devices)
    stream = EvalBatches(data.test, parts.augment, config.batch_size).stream()

    if eval_interval_secs:
        checkpoints = _follow(folder, eval_interval_secs, sleep)
    else:
        checkpoints = [read_checkpoint(folder, step)]
    with contextlib.ExitStack() as stack:
        reports = NoReports()
        if is_of_run:
            reports = stack.enter_context(Reports(folder, "eval"))
        for checkpoint in checkpoints:
            # Evaluate.
            trainer.load(restore_fitting(checkpoint.tensors, trainer.state()))
            with data_errors_of_tensorflow():
                predictions = predictions_of(
                    trainer.evaluator.predictions(stream, weights)
                )
            evaluation = predictions.map(lambda x: figures(x, data.class_names))

            # Write.
            trainer_state = checkpoint.trainer_state
            result = result_of(
                evaluation,
                "test",
                step=checkpoint.step,
                images=trainer_state["images_seen"],
                stopwatch=stopwatch_of(trainer_state),
            )
            if best := trainer_state["best"]:
                result["best_step"] = best["step"]
            reported = predictions.reported
            mistakes = mistakes_csv(reported, data.test, data.class_names)
            record = record_of(evaluation, "test")
            curves = {k.removeprefix("test_"): v for k, v in record.items()}
            reports.scalars(checkpoint.step, curves)
            reports.file(folder.result, to_json(result))
            is_written = reports.file(folder.mistakes, mistakes)
            is_best = result.get("best_step") == checkpoint.step
            at = f"step {checkpoint.step}{', the best' if is_best else ''}"
            console.line(accuracy_line(at, evaluation, "test", config))
            if _is_last(result, trainer_state, config, parts):
                break
        for line in table(evaluation):
            console.line(line)
        if is_written and not reported.correct.all():
            console.line(f"the images that are predicted wrongly: {folder.mistakes}")

        # Report.
        def write():
            page = write_report(
                folder,
                config,
                data.class_names,
                read_metrics(folder.metrics)[0],
                Evaluated("test", data.test, predictions),
                step=checkpoint.step,
                images=trainer_state["images_seen"],
                stopwatch=stopwatch_of(trainer_state),
                versions=trainer_state.get("versions", {}),
                is_training=False,
            )
            console.line(f"report: {page}")

        if is_of_run and report:
            try_to_write(write)
    return result


def _follow(folder, interval_secs, sleep):
    """The newest checkpoint, then each newer one as it comes; never ends."""
    checkpointer, awaited = checkpointer_of(folder), "a checkpoint"
    while True:
        if checkpoint := checkpointer.restore():
            yield checkpoint
            awaited = f"a checkpoint after step {checkpoint.step}"
        if awaited:
            is_idle = folder.holder() is None
            words = "; no process trains this run now" if is_idle else ""
            console.line(
                f"waiting for {awaited} in {folder.checkpoints}, looking every "
                f"{interval_secs:g} s{words}. It ends with the run's last step, or "
                "with Ctrl-C"
            )
        awaited = None
        sleep(interval_secs)


def _is_last(result, trainer_state, config, parts):
    """Whether the run ends at the step of the result: images decide, as the batch size
    of the config is that of the evaluation."""
    if 0 < config.patience <= trainer_state["num_worse"]:
        return True
    last_image = num_images(config.num_epochs, parts.num_examples)
    return 0 < config.max_steps <= result["step"] or last_image <= result["images"]
