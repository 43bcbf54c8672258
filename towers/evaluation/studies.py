"""Calibration, suspected label errors, ensembles and model soups of trained runs."""

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from towers import console
from towers.build.restored import RunEvaluator, read_checkpoint, reported_weights
from towers.config import Config, to_json
from towers.data.sources import Source, checksum, location_of
from towers.errors import CheckpointError, ConfigError, NumericError
from towers.messages import shown
from towers.metrics.metrics import calibration_error, figures, fit_temperature, loss
from towers.metrics.predictions import (
    LabelSets,
    Predictions,
    predictions_of_logits,
    to_probabilities,
)
from towers.metrics.rejection import (
    Answers,
    choose_threshold,
    rejection_line,
    wish_of,
)
from towers.metrics.results import spreadsheet_csv, table
from towers.parallel.copies import Weights
from towers.parallel.evaluator import Evaluation
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.records import Reports
from towers.run.restore import validate_architecture
from towers.run.stored_config import (
    evaluation_config,
    stored_config,
    stored_dataset_info,
)

# Probabilities that differ by less are equal in a search for label errors.
TOLERANCE = 1e-6

SPLITS = ("test", "validation", "train")

SUSPECT_COLUMNS = (
    *("index", "path", "label", "suggestion"),
    *("probability", "probability_of_suggestion"),
)


class SplitPredictions(NamedTuple):
    """The predictions of a run for all images of a split."""

    step: int
    weights: Weights
    source: Source
    class_names: tuple[str, ...]
    labels: np.ndarray  # integers [n], or of label sets bool [n, classes]
    logits: np.ndarray  # float32 [n, classes]
    unknown: np.ndarray  # float32 [m, classes], logits of the split's m of no class

    @property
    def probabilities(self) -> np.ndarray:
        """The probabilities, float64 [n, classes]."""
        return to_probabilities(self.logits, self.labels.ndim == 2)


def predict_split(
    workdir: str | os.PathLike,
    split: str = "test",
    config: Config | None = None,
    *,
    step: int | str = "best",
    use_ema: bool | None = None,
) -> SplitPredictions:
    """Predict the images of a split with the network of a run.

    `split` is "test", "validation" (images that its training held out) or "train". The
    for other arguments see `predict`. ConfigError if the run has no such images, or
    other images would be held out now than in its training.
    """
    if split not in SPLITS:
        raise ConfigError(f"split={split}: must be one of {', '.join(SPLITS)}")
    folder = RunFolder(workdir)
    config = config or evaluation_config(folder, step)
    weights = reported_weights(config, use_ema)
    info = stored_dataset_info(folder, step)
    evaluator = RunEvaluator(folder, config, info, test_only=split == "test")
    parts = evaluator.parts
    name, held_out = parts.eval_split
    sources = {name: held_out, "test": parts.data.test, "train": parts.train_source}
    if (source := sources.get(split)) is None:
        way = "train with --validation_fraction=0.1, or choose another --split"
        raise ConfigError(f"split={split}: {folder.path} has no such images; {way}")
    if evaluator.difference:
        why = f"{folder.path}: not the data set of the run: {evaluator.difference}"
        if split == "validation":
            way = "held-out images may have been trained on; give the former data"
            raise ConfigError(f"{why}; {way}, or train again")
        console.warn(why)
    checkpoint, names = read_checkpoint(folder, step), parts.data.class_names

    def predicted(images):
        outputs = evaluator.predict(checkpoint, images, [weights])
        batches = [output[weights] for output in outputs]
        labels = np.concatenate([batch["labels"] for batch in batches])
        return labels, np.concatenate([x["logits"].astype(np.float32) for x in batches])

    labels, logits = predicted(source)
    labels = labels > 0 if labels.ndim == 2 else labels.astype(np.int64)
    others, unknown = parts.unknown.get(split), logits[:0]
    if others and others.num_examples:
        _, unknown = predicted(others)
    return SplitPredictions(
        checkpoint.step, weights, source, names, labels, logits, unknown
    )


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
    _write(workdir, "calibration", json.dumps(result, indent=2) + "\n")
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
    wish = wish_of(precision_at, coverage_at)
    splits = [predict_split(workdir, x, **options) for x in ("validation", "test")]
    held_out, _ = splits
    if held_out.labels.ndim == 2:
        raise ConfigError("reject: classes of label sets have their own thresholds")
    result = _fitted(held_out)
    answers, of_test = (
        Answers.of(np.append(x.logits, x.unknown, 0), x.labels, result["temperature"])
        for x in splits
    )
    result["threshold"] = threshold = choose_threshold(answers, *wish)
    result |= answers.figures(threshold) | {"test": of_test.figures(threshold)}
    _write(workdir, "rejection", json.dumps(result, indent=2) + "\n")
    console.line(f"unknown below a calibrated probability of {threshold:.4f}")
    console.line(rejection_line("held-out images", result))
    console.line(rejection_line("test images", result["test"]))
    return result


def _fitted(split):
    """Return the temperature of a split, and the weights that it belongs to."""
    temperature = fit_temperature(split.logits, split.labels)
    result: dict[str, Any] = {"step": split.step, "weights": split.weights.value}
    return result | {"temperature": temperature, "images": len(split.labels)}


def _write(workdir, name, text):
    """Write a file of a run's folder; return whether that is possible."""
    folder = RunFolder(workdir)
    with Reports(folder, "eval") as reports:
        return reports.file(getattr(folder, name), text)


def find_suspects(
    workdir: str | os.PathLike, split: str = "train", **options: Any
) -> list[dict[str, Any]]:
    """Find images whose label is probably wrong, and write `suspects.csv`.

    See `label_errors`.

    Args:
        workdir: the run's folder.
        split: see `predict_split`. A network has learned some of the wrong labels of
            the images that it was trained on, but not of "validation".
        **options: of `predict_split`.

    Returns:
        The rows of the file, the likeliest errors first: "index" in the split, "path",
        "label", "suggestion", and "probability" of the label and of the suggestion,
        "probability_of_suggestion". Of label sets a row is about one class: the name of
        a class that an image lacks, or should lack, begins with "no ".

    Raises:
        ConfigError: the run has no images of the split.
    """
    if split == "train":
        why = "the network has learned some wrong labels of these images"
        console.warn(f"{why}; --split=validation, or --folds, find more")
    predicted = predict_split(workdir, split, **options)
    rows = suspect_rows(predicted)
    text = spreadsheet_csv(SUSPECT_COLUMNS, (row.values() for row in rows))
    if _write(workdir, "suspects", text):
        count = f"{len(rows)} of {len(predicted.labels)} labels"
        path = RunFolder(workdir).suspects
        console.line(f"{count} are suspected to be wrong: {path}")
    return rows


def suspect_rows(predicted: SplitPredictions) -> list[dict[str, Any]]:
    """Return the rows of `find_suspects`."""
    labels, names, rows = predicted.labels, predicted.class_names, []
    probabilities, multi_label = predicted.probabilities, labels.ndim == 2
    find = label_set_errors if multi_label else label_errors
    for index, other in zip(*find(labels, probabilities), strict=True):
        suggested = probabilities[index, other]
        suggestion = names[other]
        if multi_label:
            label, own = f"no {suggestion}", 1 - suggested
            if labels[index, other]:
                label, suggestion, own, suggested = suggestion, label, suggested, own
        else:
            label, own = names[labels[index]], probabilities[index, labels[index]]
        path = shown(location_of(predicted.source, int(index)), most=4096)
        numbers = round(float(own), 6), round(float(suggested), 6)
        cells = int(index), path, label, suggestion, *numbers
        rows.append(dict(zip(SUSPECT_COLUMNS, cells, strict=True)))
    return rows


def evaluate_ensemble(
    workdirs: Sequence[str | os.PathLike],
    split: str = "test",
    *,
    step: int | str = "best",
    use_ema: bool | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Evaluate the mean probabilities of several runs, and print the figures.

    Args:
        workdirs: their folders, of the same images and classes.
        split: of `predict_split`.
        step: of `predict_split`.
        use_ema: of `predict_split`.
        **changes: options in place of the stored ones of each run, such as `device`.

    Returns:
        The metrics, see `metrics.metrics.figures`.

    Raises:
        ConfigError: the runs differ in classes or images.
        NumericError: a run gives probabilities that are not finite.
    """
    members = []
    for workdir in workdirs:
        config = evaluation_config(RunFolder(workdir), step, **changes)
        members.append(
            predict_split(workdir, split, config, step=step, use_ema=use_ema)
        )
    predictions = mean_predictions(workdirs, members)
    result = figures(predictions, members[0].class_names)
    for line in table(Evaluation({Weights.RAW: result}), {Weights.RAW: "ensemble"}):
        console.line(line)
    return result


def mean_predictions(
    workdirs: Sequence[str | os.PathLike], members: Sequence[SplitPredictions]
) -> Predictions | LabelSets:
    """Return the predictions from the mean probabilities of runs."""
    first, logs = members[0], []
    for workdir, member in zip(workdirs, members, strict=True):
        sums = {checksum(x.source) for x in (first, member)}
        is_same = np.array_equal(member.labels, first.labels)
        is_same &= len(sums) == 1 or None in sums
        if member.class_names != first.class_names or not is_same:
            what = "other classes or images"
            raise ConfigError(f"{workdir} has {what} than {workdirs[0]}")
        logits = member.logits.astype(np.float64)
        if not np.isfinite(logits).all():
            raise NumericError(f"{workdir}: its probabilities are not finite")
        # Logarithms, because probabilities close to 0 or 1 are rounded.
        if first.labels.ndim == 2:
            logs.append(-np.logaddexp(0, [-logits, logits]))
        else:
            logs.append(logits - np.logaddexp.reduce(logits, 1, keepdims=True))
    logits = np.logaddexp.reduce(logs)
    if first.labels.ndim == 2:
        logits = logits[0] - logits[1]
    return predictions_of_logits(logits, first.labels)


def label_errors(
    labels: np.ndarray, probabilities: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Find images that a network confidently assigns to another class than their label.

    It is confident of a class if its probability is at least the mean over the images
    with this label; of several classes the most probable one counts. Images that are
    predicted as their label are left out, as in cleanlab, which has the same tolerance.
    Source: Northcutt et al. 2021, "Confident learning", arXiv:1911.00068.

    Labels are integers [n], probabilities [n, classes]; images and classes come with
    the least probable labels first.
    """
    images = np.arange(len(labels))
    counts = np.bincount(labels, minlength=probabilities.shape[1])
    own = probabilities[images, labels]
    means = np.bincount(labels, own, len(counts)) / np.maximum(counts, 1)
    means[counts == 0] = np.inf
    confident = probabilities >= np.maximum(means, 2 * TOLERANCE) - TOLERANCE
    is_single = confident.sum(1) == 1
    classes = np.where(is_single, confident.argmax(1), probabilities.argmax(1))
    raised = probabilities.copy()
    raised[images, labels] += TOLERANCE
    is_wrong = confident.any(1) & (classes != labels) & (raised.argmax(1) != labels)
    wrong = np.flatnonzero(is_wrong)
    order = np.argsort(own[wrong] - probabilities[wrong, classes[wrong]], kind="stable")
    return wrong[order], classes[wrong][order]


def label_set_errors(
    labels: np.ndarray, probabilities: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return images, and classes that they lack or should lack, as `label_errors`."""
    pairs = []
    for number in range(labels.shape[1]):
        positive = probabilities[:, number]
        both = np.column_stack([1 - positive, positive])
        wrong, _ = label_errors(labels[:, number].astype(np.int64), both)
        pairs += [(image, number) for image in wrong]
    images, classes = np.array(pairs, np.int64).reshape(-1, 2).T
    own = np.where(labels, probabilities, 1 - probabilities)[images, classes]
    order = np.argsort(own, kind="stable")
    return images[order], classes[order]


def average(
    workdirs: Sequence[str | os.PathLike],
    workdir: str | os.PathLike,
    *,
    step: int | str = "best",
) -> None:
    """Write a run folder with the mean parameters, averages and float state of runs.

    It is evaluated, predicts and is exported as any other (model soups, Wortsman et al.
    2022, arXiv:2203.05482).

    Args:
        workdirs: folders of runs of one network on the same classes, which started from
            the same weights; otherwise the mean is of no use.
        workdir: a new folder.
        step: of the checkpoints, see `load_run`.

    Raises:
        ConfigError: the runs differ in classes, preprocessing or network, or the folder
            has a run.
    """
    begin = f"average={','.join(map(str, workdirs))}"
    if len(workdirs) < 2:
        raise ConfigError(f"{begin}: give several runs")
    folders = [RunFolder(x) for x in workdirs]
    checkpoints = [read_checkpoint(folder, step) for folder in folders]
    configs, first = [stored_config(x, step) for x in folders], checkpoints[0]
    infos = [DatasetInfo.from_values(x.run_state["dataset_info"]) for x in checkpoints]
    for folder, checkpoint, info in zip(folders, checkpoints, infos, strict=True):
        both = f"{folder.path} and {folders[0].path}"
        count, checksum_ = infos[0].num_train, infos[0].checksum
        if dataclasses.replace(info, num_train=count, checksum=checksum_) != infos[0]:
            raise ConfigError(f"{both} have other classes or preprocessing")
        try:
            validate_architecture(first.tensors, checkpoint.tensors)
        except CheckpointError as error:
            raise ConfigError(f"{both}: {error}") from None
    # Without weights to start from, the seed draws them.
    if len({os.path.normpath(x.init_from or f"seed/{x.seed}") for x in configs}) > 1:
        raise ConfigError(
            f"{begin}: the runs do not start from the same weights, so the mean of "
            "their parameters is near chance; take --ensemble, or fine-tune runs from "
            "the same --init_from"
        )
    tensors = dict(first.tensors)
    for name, value in first.tensors.items():
        if value.dtype.kind not in "biu":
            each = [x.tensors[name].astype(np.float64) for x in checkpoints]
            tensors[name] = np.mean(each, 0).astype(value.dtype)
    folder = RunFolder(workdir)
    folder.create()
    with folder.lock() as lock:
        check = lock.assert_same_folder
        checkpointer = Checkpointer(folder.checkpoints, assert_same_folder=check)
        if checkpointer.steps():
            raise ConfigError(f"workdir={workdir} has a run; choose another folder")
        with Reports(folder, "eval") as reports:
            reports.file(folder.config, to_json(configs[0]))
            reports.file(folder.dataset_info, infos[0].to_json())
        if folders[0].network.exists():
            folder.write_network(folders[0].network.read_text())
        # Last: without a checkpoint the same command begins again.
        state = first.run_state | {"best": None, "open_record": None}
        checkpointer.save(Snapshot(first.step, tensors, state))
    console.line(f"the mean of {len(folders)} runs is in {folder.path}")
