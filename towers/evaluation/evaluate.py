"""Evaluation of a run's checkpoints: every test image exactly once."""

import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from towers import console
from towers.build import restored
from towers.config import Config
from towers.data.sets import arrays
from towers.data.sets.arrays import Split
from towers.errors import ConfigError
from towers.metrics import results
from towers.metrics.metrics import figures, read_thresholds
from towers.metrics.predictions import predictions_of
from towers.optim.schedules import num_images
from towers.report.run_report import Evaluated, try_to_write, write_report
from towers.run.checkpoint import Checkpoint
from towers.run.folder import RunFolder
from towers.run.progress import Progress
from towers.run.records import NoReports, Reports, read_metrics
from towers.run.restore import checkpointer_of
from towers.run.stored_config import evaluation_config, stored_dataset_info


def evaluate(
    workdir: str | os.PathLike,
    config: Config | None = None,
    *,
    data: Split | None = None,
    step: int | str = "best",
    use_ema: bool | None = None,
    eval_interval_secs: float = 0.0,
    report: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Evaluate a checkpoint of a run on all test images.

    Args:
        workdir: the run's folder.
        config: the run's, with the device, towers, strategy and batch size of the
            evaluation; by default the stored one, on all devices that there are.
        data: images and labels (x, y), or a `tf.data.Dataset` of them, in place of the
            test images of the run's data set; see `train`. Nothing is written if the
            run was not trained on arrays.
        step: of the checkpoint, "best" or "last", see `load_run`; the last one if new
            ones are looked for.
        use_ema: only the EMA weights (True) or the raw weights (False); by
            default both, if the run keeps averages.
        eval_interval_secs: look for a new checkpoint this often until the run's last
            step is evaluated; 0 evaluates once.
        report: write a web page about the run, `report/index.html`.
        sleep: waits for some seconds.

    Returns:
        The content of the run's `result.json`: "test_accuracy" of the parameters,
        "test_accuracy_ema" of their moving averages, "reported", which of these two is
        the run's, "test_loss", "step" and so on.

    Raises:
        TowersError: such as a CheckpointError if no checkpoint is valid and fits.
    """
    _validate_arguments(data, step, eval_interval_secs)
    folder = RunFolder(workdir)
    step = "last" if eval_interval_secs else step
    config = config or evaluation_config(folder, step)
    weights = restored.evaluated_weights(config, use_ema)
    info = stored_dataset_info(folder, step)
    # Nothing is written about images that are not the run's.
    is_of_run = data is None or config.choice_of("dataset").is_given
    if data is not None:
        config = _with_test_set(config, data, info, is_of_run)
        if report and not is_of_run:
            console.warn("report: of data other than the run's no page is written")
    # The end of a run that is followed is counted in epochs of its training images.
    evaluator = restored.RunEvaluator(
        folder, config, info, test_only=not eval_interval_secs
    )
    parts = evaluator.parts
    if evaluator.difference:
        why = "test images may have been trained on"
        console.warn(f"not the data set of the run: {evaluator.difference}; {why}")
    test, class_names = parts.data.test, parts.data.class_names

    checkpoints: Iterable[Checkpoint]
    if eval_interval_secs:
        checkpoints = follow(folder, eval_interval_secs, sleep)
    else:
        checkpoints = [restored.read_checkpoint(folder, step)]
    with Reports(folder, "eval") if is_of_run else NoReports() as reports:
        for checkpoint in checkpoints:
            progress = Progress.from_json(checkpoint.run_state)
            predictions = predictions_of(evaluator.predict(checkpoint, test, weights))
            evaluation = predictions.map(
                functools.partial(
                    figures,
                    class_names=class_names,
                    thresholds=read_thresholds(folder.thresholds, class_names),
                )
            )
            result = results.result_of(
                evaluation,
                "test",
                step=checkpoint.step,
                images=checkpoint.run_state["images_seen"],
                stopwatch=progress.stopwatch,
            )
            if progress.best:
                result["best_step"] = progress.best["step"]
            record = results.record_of(evaluation, "test")
            curves = {k.removeprefix("test_"): v for k, v in record.items()}
            reports.scalars(checkpoint.step, curves)
            reports.file(folder.result, results.to_json(result))
            mistakes = results.mistakes_csv(predictions.reported, test, class_names)
            is_written = reports.file(folder.mistakes, mistakes)
            is_best = result.get("best_step") == checkpoint.step
            at = f"step {checkpoint.step}{', the best' if is_best else ''}"
            console.line(results.accuracy_line(at, evaluation, "test", config.tta))
            if _is_last(result, progress, config, parts):
                break
    for line in results.table(evaluation):
        console.line(line)
    if is_written and not predictions.reported.correct.all():
        console.line(f"the images that are predicted wrongly: {folder.mistakes}")
    if is_of_run and report:
        evaluated = Evaluated("test", test, class_names, predictions, evaluation)
        try_to_write(lambda: _report(folder, config, evaluated, checkpoint, progress))
    return result


def _validate_arguments(data, step, eval_interval_secs):
    if not 0 <= eval_interval_secs <= 1e6:
        raise ConfigError(f"eval_interval_secs={eval_interval_secs}: give 0 to 1000000")
    if isinstance(step, int) and eval_interval_secs:
        options = f"step={step} with eval_interval_secs={eval_interval_secs:g}"
        raise ConfigError(f"{options}: drop one of the two")
    if data is not None and eval_interval_secs:
        raise ConfigError("data is evaluated once; omit eval_interval_secs")


def _with_test_set(config, data, info, is_of_run):
    """Return the config with `data` as its data set, resized if it is not the run's."""
    class_names, resized = info.class_names if info else (), {}
    dtype = info.pixels.dtype if info else ""
    if info and not is_of_run:
        resized = {
            "image_shape": info.image_shape,
            "max_pixels": config.max_image_pixels,
            "pixels": info.pixels,
            **config.resize_options,
        }
    multi_label = info is not None and info.multi_label
    name = arrays.give_test_set(
        data, class_names, multi_label=multi_label, dtype=dtype, **resized
    )
    return replace(config, dataset=name)


def _report(folder, config, evaluated, checkpoint, progress):
    run = restored.read_run(folder.path, step=checkpoint.step, log=console.remark)
    page = write_report(
        folder,
        config,
        run.dataset_info,
        read_metrics(folder.metrics)[0],
        evaluated,
        step=checkpoint.step,
        images=checkpoint.run_state["images_seen"],
        stopwatch=progress.stopwatch,
        versions=checkpoint.run_state.get("versions", {}),
        run=run,
    )
    console.line(f"report: {page}")


def follow(
    folder: RunFolder, interval_secs: float, sleep: Callable[[float], None]
) -> Iterator[Checkpoint]:
    """Yield the newest checkpoint, then each newer one as it comes; never end."""
    checkpointer, awaited = checkpointer_of(folder), "a checkpoint"
    while True:
        if checkpoint := checkpointer.read_new():
            yield checkpoint
            awaited = f"a checkpoint after step {checkpoint.step}"
        if awaited:
            idle = "; no process trains this run now" if folder.holder() is None else ""
            period = f"looking every {interval_secs:g} s{idle}"
            end = "It ends with the run's last step, or with Ctrl-C"
            console.line(
                f"waiting for {awaited} in {folder.checkpoints}, {period}. {end}"
            )
        awaited = ""
        sleep(interval_secs)


def _is_last(result, progress, config, parts):
    """Return whether the run ends here, by its images: batch sizes differ."""
    if 0 < config.patience <= progress.num_worse:
        return True
    last_image = num_images(config.num_epochs, parts.num_examples)
    return 0 < config.max_steps <= result["step"] or last_image <= result["images"]
