"""Temperatures of probabilities, and rejection of images of no class."""

import json
import os
from typing import Any

import numpy as np

from towers import console
from towers.errors import ConfigError
from towers.evaluation.split_predictions import predict_split, write_to_run
from towers.metrics import rejection
from towers.metrics.metrics import calibration_error, fit_temperature, loss
from towers.metrics.predictions import predictions_of_logits


def calibrate(workdir: str | os.PathLike, **options: Any) -> dict[str, Any]:
    """Fit the temperature of a run's probabilities to its held-out images.

    It is written to `calibration.json`, which `predict` and `export` use for the same
    step and weights, if they are called with `calibrated=True`.

    Args:
        workdir: the run's folder.
        **options: of `predict_split`.

    Returns:
        "step", "weights" ("raw" or "ema"), "temperature", "images"; and on these images
        "loss" and "calibration_error", before and after: "loss_calibrated" and
        "calibration_error_calibrated".

    Raises:
        ConfigError: the run has held out no images.
    """
    split = predict_split(workdir, "validation", **options)
    result = _fitted(split)
    for suffix, value in (("", 1.0), ("_calibrated", result["temperature"])):
        predictions = predictions_of_logits(split.logits / value, split.labels)
        result[f"loss{suffix}"] = loss(predictions)
        result[f"calibration_error{suffix}"] = calibration_error(predictions)
    write_to_run(workdir, "calibration", json.dumps(result, indent=2) + "\n")
    console.line(
        "temperature {temperature:.4f} of {images} held-out images: loss {loss:.4f}, "
        "calibrated {loss_calibrated:.4f}; calibration error {calibration_error:.4f}, "
        "calibrated {calibration_error_calibrated:.4f}".format(**result)
    )
    return result


def reject(
    workdir: str | os.PathLike,
    *,
    precision_at: float | None = None,
    coverage_at: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Choose the probability below which images are answered with "unknown".

    The threshold is of the calibrated probability of the most likely class, on held-out
    images; answers for those of no class, see `Config.unknown_class`, are mistakes. It
    is written to `rejection.json` with its temperature, and used by predictions and
    exports of the same step and weights.

    Args:
        workdir: the run's folder.
        precision_at: minimum share of correct answers.
        coverage_at: minimum share of images of the classes that are answered.
        **options: of `predict_split`.

    Returns:
        "step", "weights", "temperature", "threshold"; "precision", "coverage" and
        "unknown_rejected" on the held-out images, with 95 % intervals; "images" and
        "unknown_images", their numbers; "test", these figures of the test images.

    Raises:
        ConfigError: the run has label sets or no held-out images, the precision is not
            reached, or not exactly one wish is given.
    """
    wish = rejection.wish_of(precision_at, coverage_at)
    splits = [predict_split(workdir, x, **options) for x in ("validation", "test")]
    held_out, _ = splits
    if held_out.labels.ndim == 2:
        raise ConfigError("reject: classes of label sets have their own thresholds")
    result = _fitted(held_out)
    answers, test_answers = (
        rejection.Answers.of(
            np.append(x.logits, x.unknown, 0), x.labels, result["temperature"]
        )
        for x in splits
    )
    result["threshold"] = threshold = rejection.choose_threshold(answers, *wish)
    result |= answers.figures(threshold) | {"test": test_answers.figures(threshold)}
    write_to_run(workdir, "rejection", json.dumps(result, indent=2) + "\n")
    console.line(f"unknown below a calibrated probability of {threshold:.4f}")
    console.line(rejection.rejection_line("held-out images", result))
    console.line(rejection.rejection_line("test images", result["test"]))
    return result


def _fitted(split):
    """Return the temperature of a split, and the weights that it belongs to."""
    temperature = fit_temperature(split.logits, split.labels)
    result: dict[str, Any] = {"step": split.step, "weights": split.weights.value}
    return result | {"temperature": temperature, "images": len(split.labels)}
