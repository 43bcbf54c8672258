"""Evaluation of a run's checkpoints: every test image exactly once."""

import json
import os
import time
from collections.abc import Callable, Iterable

from towers import build
from towers.config import Config, checks
from towers.data.batches import evaluation_stream
from towers.errors import CheckpointError, ConfigError, data_errors_of_tensorflow
from towers.evaluation.restored import RestoredRun, find_checkpoint, load_run
from towers.parallel import devices as parallel_devices
from towers.parallel.trainer import Trainer
from towers.run import checkpoint_files
from towers.run.folder import RunFolder
from towers.run.log import say
from towers.run.reports import Reports
from towers.run.restore import stopwatch_of

__all__ = ["RestoredRun", "accuracy", "evaluate", "load_run"]


def accuracy(
    trainer: Trainer, batches: Iterable, use_averages: bool
) -> dict[str, float]:
    """Counts of the trainer's `evaluate`, with "accuracy" and the mean "loss", and
    "accuracy_tta" where it uses test-time augmentation."""
    counts = trainer.evaluate(batches, use_averages)
    num_images = counts["images"]
    result = {
        "accuracy": counts["correct"] / num_images,
        "loss": counts["loss"] / num_images,
        "correct": int(counts["correct"]),
        "images": int(num_images),
    }
    if "correct_tta" in counts:
        result["accuracy_tta"] = counts["correct_tta"] / num_images
    return result


def record_of(counts: dict[str, float], split: str, suffix: str = "") -> dict:
    """The accuracies of `accuracy`, with their names in records and on boards."""
    kinds = ("accuracy", "accuracy_tta")
    return {f"{split}_{k}{suffix}": counts[k] for k in kinds if k in counts}


def tta_remark(counts: dict[str, float], config: Config) -> str:
    """The end of a line about an accuracy: that by test-time augmentation, if any."""
    if "accuracy_tta" not in counts:
        return ""
    return f"; {counts['accuracy_tta']:.4f} by tta={config.tta}"


def evaluate(
    workdir: str | os.PathLike,
    config: Config | None = None,
    *,
    step: int = 0,
    use_ema: bool | None = None,
    eval_interval_secs: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
) -> dict:
    """Evaluates the last checkpoint of a run on all test images and reports it.

    Args:
        workdir: the run's folder.
        config: the run's, with the device, towers, strategy and batch size of the
            evaluation; by default `RunFolder.evaluation_config`.
        step: evaluate this checkpoint instead of the last.
        use_ema: moving averages (True) or raw parameters (False); by default averages
            where the run keeps them.
        eval_interval_secs: look for a new checkpoint this often until the run's last
            step is evaluated; 0 evaluates once.
        sleep: waits for some seconds.

    Returns:
        The content of `result.json`.

    Raises:
        CheckpointError: there is no checkpoint, or none that is valid and fits.
        ConfigError: the data set has other classes than that of the run, for example.
    """
    checks.check_environment()
    if step and eval_interval_secs:
        raise ConfigError(
            f"step={step} with eval_interval_secs={eval_interval_secs:g}: one "
            "checkpoint is evaluated once; drop one of the two"
        )
    folder = RunFolder(workdir)
    folder.check()
    if config is None:
        config = folder.evaluation_config()
    if use_ema is None:
        use_ema = config.ema_decay > 0
    if use_ema and config.ema_decay == 0:
        raise ConfigError(
            "use_ema, but this run keeps no averages: its ema_decay is 0; evaluate the "
            "parameters with --nouse_ema"
        )
    devices = parallel_devices.configure(
        _free_device(config.device, folder),
        config.num_towers,
        config.device_order,
        config.device_memory_mb,
    )
    for remark in devices.remarks:
        say(remark)
    parts = build.build(
        config, for_training=False, dataset_info=folder.stored_dataset_info()
    )
    trainer = build.create_trainer(config, parts, devices)
    stream = evaluation_stream(parts.data.test, parts.augment, config.batch_size)
    result = {}
    with Reports(folder, "eval", say) as reports:
        while True:
            checkpoint = find_checkpoint(folder, step)
            if checkpoint is None and not eval_interval_secs:
                raise CheckpointError(
                    f"{folder.checkpoints} holds no checkpoint yet; train first, or "
                    "wait with --eval_interval_secs"
                )
            if checkpoint and checkpoint.step != result.get("step"):
                tensors = checkpoint_files.restore_fitting(
                    checkpoint.tensors, trainer.state()
                )
                trainer.load(tensors)
                with data_errors_of_tensorflow():
                    counts = accuracy(trainer, stream, use_ema)
                result = _result(checkpoint, counts)
                suffix = "_averaged" if use_ema else ""
                reports.scalars(checkpoint.step, record_of(counts, "test", suffix))
                reports.file(folder.result, json.dumps(result, indent=2) + "\n")
                say(
                    f"step {checkpoint.step}: accuracy {counts['accuracy']:.4f} "
                    f"({counts['correct']} of {counts['images']})"
                    + tta_remark(counts, config)
                )
            if eval_interval_secs == 0 or (result and _is_last(result, config, parts)):
                return result
            sleep(eval_interval_secs)


def _is_last(result, config, parts):
    """True if the run ends at the step of the result.

    Images decide, not steps: the batch size of the config is that of the evaluation.
    """
    if config.max_steps and result["step"] >= config.max_steps:
        return True
    return result["images"] >= config.num_epochs * parts.num_examples


def _free_device(device, folder):
    """The device, or the CPU where a training run holds the GPUs."""
    holder = folder.holder()
    if device == "auto" and holder and holder.get("device") == "GPU":
        say(
            f"process {holder.get('pid', '?')} trains this run on the GPUs, so the "
            "evaluation runs on the CPU"
        )
        return "cpu"
    return device


def _result(checkpoint, counts):
    trainer_state = checkpoint.trainer_state
    stopwatch = stopwatch_of(trainer_state)
    images_per_step = trainer_state["images_seen"] / max(checkpoint.step, 1)
    return record_of(counts, "test") | {
        "step": checkpoint.step,
        "images": trainer_state["images_seen"],
        "test_correct": counts["correct"],
        "test_images": counts["images"],
        "test_loss": counts["loss"],
        "train_secs": stopwatch.train_secs,
        "start_secs": trainer_state.get("start_secs"),
        "images_per_sec": stopwatch.timed_steps * images_per_step / stopwatch.timed_secs
        if stopwatch.timed_secs
        else None,
    }
