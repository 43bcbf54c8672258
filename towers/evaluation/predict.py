"""Predictions for images, without the data set of the run."""

import dataclasses
import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from towers import console
from towers.config import Config
from towers.config.options import check_path
from towers.data.files.paths import is_image_name
from towers.data.files.unlabeled import Images
from towers.errors import ConfigError
from towers.evaluation.heatmaps import Pictures
from towers.evaluation.image_predictor import ImagePredictor
from towers.evaluation.tables import (
    FORMS,
    create_features_file,
    create_table,
    errors_of_output,
)
from towers.run.folder import RunFolder


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Predictions for n images.

    Attributes:
        paths: of the files that were read, or numbers of images in memory.
        labels: the class of each, by the folder that it is in, or None.
        probabilities: float64 [n, classes].
        class_names: in the order of the probabilities.
        failed: path -> why an image cannot be read.
        thresholds: float64 [classes], the probabilities from which classes of label
            sets are predicted; None with one label an image.
        answers: the most probable class of each, or "unknown" below the threshold of
            `towers.reject`.
        heatmaps: float32 [height, width] of each image in its own size, turned upright:
            where the network finds the predicted classes, from 0 to 1, and 0 where a
            crop cuts the image off; empty without `heatmaps` of `predict`.
    """

    paths: list[str]
    labels: list[str | None]
    probabilities: np.ndarray = dataclasses.field(repr=False)
    class_names: Sequence[str] = dataclasses.field(repr=False)
    failed: dict[str, str]
    thresholds: np.ndarray | None = dataclasses.field(default=None, repr=False)
    answers: list[str] = dataclasses.field(default_factory=list, repr=False)
    heatmaps: Sequence[np.ndarray] = dataclasses.field(default=(), repr=False)

    def top(self, k: int = 1) -> list[list[tuple[str, float]]]:
        """Return names and probabilities of the k most likely classes, per image."""
        if k < 1:
            raise ConfigError(f"k={k}: must be at least 1")
        order = np.argsort(-self.probabilities, axis=1, kind="stable")[:, :k].tolist()
        return [
            [(self.class_names[c], float(row[c])) for c in classes]
            for row, classes in zip(self.probabilities, order, strict=True)
        ]

    def present(self) -> list[list[str]]:
        """Return the names of the classes that are predicted for each image."""
        if self.thresholds is None:
            return [[x] if x in self.class_names else [] for x in self.answers]
        is_present = (self.probabilities >= self.thresholds).tolist()
        return [list(itertools.compress(self.class_names, row)) for row in is_present]


def predict(
    workdir: str | os.PathLike,
    images: Images,
    config: Config | None = None,
    *,
    step: int | str = "best",
    use_ema: bool | None = None,
    calibrated: bool = False,
    rank: str = "none",
    heatmaps: bool = False,
) -> Predicted:
    """Predict images, in their order or in the order in which to label them.

    The label of an image file is the class whose name its folder has.

    Args:
        workdir: the run's folder; neither its data set nor its recipe is needed.
        images: one or several image files of any size, or folders of files; or images
            in memory, which are resized as files are: an array of numbers as those of
            the training, [n, height, width, channels] or of one image, images of
            Pillow, a list of either, or a `tf.data.Dataset`, whose labels are ignored.
        config: the run's, with the device, towers, batch size and test-time
            augmentation of the prediction; by default the stored one, on all devices
            that there are.
        step: of the checkpoint, "best" or "last", see `load_run`.
        use_ema: the EMA weights (True) or the raw weights (False); by default the EMA
            weights, if the run keeps them.
        calibrated: use the temperature of `calibrate`, as always after `reject`.
        rank: "uncertain" begins with the smallest margins, "diverse" with images that
            differ most, see `ranking.ranked`; "none" keeps the order.
        heatmaps: also return where the network finds the predicted classes.

    Returns:
        The predictions, see `Predicted`; images in memory have numbers as `paths`.

    Raises:
        TowersError: such as a DataError if no file can be read.
    """
    _exclude("heatmaps", heatmaps, rank=rank)
    maps: list[np.ndarray] = []
    options: dict[str, Any] = {"step": step, "use_ema": use_ema}
    options["calibrated"] = calibrated
    predictor = ImagePredictor(workdir, images, config, rank, **options)
    if heatmaps:
        predictor.take_heatmap = lambda path, pixels, heat: maps.append(heat)
    paths, labels, logits = predictor.all()
    predictor.report(may_fail=True)
    run, names = predictor.run, predictor.run.class_names
    probabilities = run.to_probabilities(logits)
    return Predicted(
        paths,
        [names[label] if label >= 0 else None for label in labels],
        probabilities,
        names,
        predictor.failed,
        run.thresholds,
        run.answers(probabilities),
        maps,
    )


def write_predictions(
    workdir: str | os.PathLike,
    images: Images,
    config: Config | None = None,
    *,
    top: int = 5,
    form: str = "table",
    features: str = "",
    rank: str = "none",
    output: str | os.PathLike = "",
    heatmaps: str | os.PathLike = "",
    **options: Any,
) -> None:
    """Write the predictions for images, batch by batch.

    It takes `step`, `use_ema` and the other arguments of `predict`, and these:

    - `top`: classes of each image; 0 for all, in the order of the classes, which are
      then the columns of "csv".
    - `form`: "table", "csv" or "json", a line for each image.
    - `features`: layer whose activations are written instead, to an `.npz` file with
      "features", "names" and "labels".
    - `rank`: as in `predict`; the PNG file `OUTPUT.png`, or `ranked.png`, shows the
      first images.
    - `output`: path of a file; by default standard output, or `features.npz`.
    - `heatmaps`: new folder for pictures of the images in gray, heat maps in red.

    Raises:
        TowersError: such as a DataError if some files cannot be read: they are named
            on standard error, and the others are predicted.
    """
    if top < 0:
        raise ConfigError(f"top={top}: must be at least 0, for all classes")
    if form not in FORMS:
        raise ConfigError(f"form={form}: must be one of {', '.join(FORMS)}")
    _exclude("features", features, form=form, rank=rank, heatmaps=heatmaps)
    _exclude("heatmaps", heatmaps, rank=rank)
    check_path("output", output)
    path = os.path.expanduser(output) or ("features.npz" if features else "")
    is_of_features = features and path.endswith(".npz")
    if is_image_name(path) and not is_of_features:
        raise ConfigError(f"output={path}: is the name of an image; choose another")
    run_files = {os.path.realpath(x) for x in RunFolder(workdir).files()}
    if path and os.path.realpath(path) in run_files:
        raise ConfigError(f"output={path}: is a file of the run; choose another")
    predictor = ImagePredictor(workdir, images, config, rank, features, **options)
    if heatmaps:
        predictor.take_heatmap = Pictures(heatmaps, predictor.paths)
    if features:
        results = create_features_file(path)
    else:
        results = create_table(path, form, predictor.run, top)
    with errors_of_output(path), results as write:
        if rank == "none":
            for batch in predictor.batches():
                write(*batch)
        else:
            names, labels, logits = predictor.all()
            write(names, labels, logits)
            sheet = f"{path or 'ranked'}.png"
            with errors_of_output(sheet):
                predictor.write_sheet(sheet, names, logits)
            console.remark(f"the first images to label: {sheet}")
    predictor.report()


def _exclude(option, value, **others):
    for name, other in others.items():
        if value and other not in ("", "none", "table"):
            raise ConfigError(f"{option}={value} with {name}={other}: drop one")
