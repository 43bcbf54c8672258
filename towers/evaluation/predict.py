"""Predictions for images, without the data set of the run."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from towers import console
from towers.build.restored import (
    RestoredRun,
    evaluation_devices,
    read_run,
    reported_weights,
)
from towers.config import Config
from towers.config.options import check_path
from towers.data.augment.tta import create_tta
from towers.data.batches import hold_out
from towers.data.files import image_folder
from towers.data.files import paths as image_paths
from towers.data.files.reading import is_url
from towers.data.files.unlabeled import Images, Labels, paths_or_images, read_files
from towers.data.sources import checksum, location_of
from towers.errors import ConfigError, DataError
from towers.evaluation.heatmaps import Pictures, Take, give_heatmaps
from towers.evaluation.ranking import MAX_PICTURED, RANKS, ranked, write_sheet
from towers.evaluation.tables import FORMS, create_features_file, create_table
from towers.messages import shown
from towers.metrics.predictions import top_class
from towers.models.create import with_features, without_noise
from towers.parallel.copies import Weights
from towers.parallel.evaluator import create_predictor
from towers.run.folder import RunFolder
from towers.run.stored_config import prediction_config


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
            crop cuts the image off; empty if `predict` was not asked for them.
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
    if heatmaps and rank != "none":
        raise ConfigError(f"heatmaps={heatmaps} with rank={rank}: drop one")
    maps: list[np.ndarray] = []
    prediction = _Prediction(workdir, images, config, step, use_ema, calibrated, rank)
    if heatmaps:
        prediction.take_heatmap = lambda path, pixels, heat: maps.append(heat)
    batches = list(prediction.batches())
    prediction.report(may_fail=bool(batches))
    paths, labels, logits = (
        list(itertools.chain(*column)) for column in zip(*batches, strict=True)
    )
    run, names = prediction.run, prediction.run.class_names
    probabilities = run.to_probabilities(np.array(logits))
    return Predicted(
        paths,
        [names[label] if label >= 0 else None for label in labels],
        probabilities,
        names,
        prediction.failed,
        run.thresholds,
        run.answers(probabilities),
        maps,
    )


def write_predictions(
    workdir: str | os.PathLike,
    images: Images,
    config: Config | None = None,
    *,
    step: int | str = "best",
    use_ema: bool | None = None,
    calibrated: bool = False,
    top: int = 5,
    form: str = "table",
    features: str = "",
    rank: str = "none",
    output: str | os.PathLike = "",
    heatmaps: str | os.PathLike = "",
) -> None:
    """Write the predictions for images, batch by batch.

    It takes the arguments of `predict`, and these:

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
    for name, value, default in (
        ("form", form, "table"),
        ("rank", rank, "none"),
        ("heatmaps", heatmaps, ""),
    ):
        if features and value != default:
            raise ConfigError(f"features={features} with {name}={value}: one of them")
    if heatmaps and rank != "none":
        raise ConfigError(f"heatmaps={heatmaps} with rank={rank}: drop one")
    check_path("output", output)
    path = os.path.expanduser(output) or ("features.npz" if features else "")
    is_of_features = features and path.endswith(".npz")
    if image_paths.is_image_name(path) and not is_of_features:
        raise ConfigError(f"output={path}: is the name of an image; choose another")
    of_run = {os.path.realpath(x) for x in RunFolder(workdir).files()}
    if path and os.path.realpath(path) in of_run:
        raise ConfigError(f"output={path}: is a file of the run; choose another")
    prediction = _Prediction(
        workdir, images, config, step, use_ema, calibrated, rank, features
    )
    if heatmaps:
        prediction.take_heatmap = Pictures(heatmaps, prediction.paths)
    if features:
        results = create_features_file(path)
    else:
        results = create_table(path, form, prediction.run, top)
    with _errors_of_output(path), results as write:
        for batch in prediction.batches():
            write(*batch)
            if rank != "none":  # all images
                sheet = f"{path or 'ranked'}.png"
                with _errors_of_output(sheet):
                    prediction.write_sheet(sheet, *batch)
                console.remark(f"the first images to label: {sheet}")
    prediction.report()


class _Prediction:
    """The network of a run, the images that it predicts, and the files that failed."""

    def __init__(
        self, workdir, images, config, step, use_ema, calibrated, rank, features=""
    ):
        if rank not in RANKS:
            raise ConfigError(f"rank={rank}: must be one of {', '.join(RANKS)}")
        self.take_heatmap: Take | None = None
        self._rank, self._features = rank, []
        folder = RunFolder(workdir)
        self._config = config = config or prediction_config(folder, step)
        weights = reported_weights(config, use_ema)
        devices = evaluation_devices(config, folder, console.remark)
        self.run = read_run(
            workdir,
            step=step,
            calibrated=calibrated,
            use_ema=use_ema,
            log=console.remark,
        )
        dtype = self.run.pixels.dtype
        self.paths, self._images = paths_or_images(images, dtype)
        if rank != "none":  # for the sheet
            self._images = list(self._images)
        self._model = model = without_noise(self.run.network(weights), features)
        if rank == "diverse":
            model = with_features(model)
        tta = "none" if features else config.tta
        if tta != config.tta:
            console.remark(f"tta={config.tta} is not used for features")
        self._predictor = create_predictor(model, devices.towers, create_tta(tta))
        name = "EMA" if weights is Weights.EMA else "raw"
        message = f"predicting with the {name} weights of step {self.run.step}"
        if tta != "none":
            message += f", test-time augmentation {tta}"
        if self.run.reject_below and not features:
            message += f"; unknown below a probability of {self.run.reject_below:.4f}"
        console.remark(message)
        self._has_classes, self._counts = not features, collections.Counter()
        self.failed: dict[str, str] = {}

    def batches(self) -> Iterator[tuple[list[str], list[int], np.ndarray]]:
        """Yield paths, labels (-1 if unknown) and outputs, by batches or ranked."""
        batches = self._batches()
        if self._rank == "none":
            yield from batches
        elif rows := list(batches):
            columns = zip(*rows, strict=True)
            names, labels, outputs = (list(itertools.chain(*x)) for x in columns)
            logits = np.stack(outputs)
            features = np.concatenate(self._features) if self._features else logits
            probabilities = self.run.to_probabilities(logits)
            order = ranked(self._rank, probabilities, features, self.run.thresholds)
            yield [names[i] for i in order], [labels[i] for i in order], logits[order]

    def _batches(self):
        paths, counts = self.paths, self._counts
        label_of = Labels(self.run.class_names, paths)
        is_training_image = _training_images(self.run)
        files, size = self._readable_files(), 0
        while batch := list(itertools.islice(files, self._config.batch_size)):
            size = max(size, len(batch))
            outputs = self._outputs(batch, size)
            if self._rank == "diverse":
                num_classes = len(self.run.class_names)
                self._features.append(outputs[:, num_classes:])
                outputs = outputs[:, :num_classes]
            names = [file.path for file in batch]
            labels = [label_of(name) if paths else -1 for name in names]
            counts["read"] += len(batch)
            if self._has_classes:
                counts["trained"] += sum(map(is_training_image, names if paths else ()))
                known = np.array(labels) >= 0
                counts["labeled"] += int(known.sum())
                counts["correct"] += int(np.sum(known & (top_class(outputs) == labels)))
            if self.take_heatmap is not None:
                options = self._config.max_image_pixels, self.take_heatmap
                give_heatmaps(self.run, self._model, batch, outputs, *options)
            yield names, labels, outputs

    def write_sheet(self, path, names, labels, logits):
        """Write thumbnails of the first predicted images to a PNG file."""
        names = names[:MAX_PICTURED]
        files = names if self.paths else [(i, self._images[int(i)]) for i in names]
        answers = self.run.answers(self.run.to_probabilities(logits[:MAX_PICTURED]))
        write_sheet(path, [file.image for file in self._read(files)], answers)

    def _read(self, files):
        return read_files(
            files,
            self.run.image_shape,
            self._config.max_image_pixels,
            self._config.batch_size,
            pixels=self.run.pixels,
            **self.run.config.resize_options,
        )

    def _readable_files(self):
        files = enumerate(self._images)
        if self.paths:
            files = image_paths.walk(self.paths, self._fail)
        for file in self._read(files):
            if file.image is None:
                self._fail(file.path, file.fault)
            else:
                yield file

    def _fail(self, path, why):
        self.failed[path] = why
        console.error(f"{shown(path)}: {why}")

    def _outputs(self, batch, size):
        """Return the outputs of a batch, padded to `size` to avoid retracing."""
        images = np.zeros((size, *self.run.image_shape), self.run.pixels.dtype)
        images[: len(batch)] = [file.image for file in batch]
        with tf.device("CPU:0"):
            mask = tf.constant(np.arange(size) < len(batch), tf.float32)
            inputs = {"images": self.run.preprocess(images), "mask": mask}
        outputs = next(self._predictor.predictions([inputs]))[Weights.RAW]
        result = outputs.get("logits_tta", outputs["logits"])
        # NumPy has no bfloat16.
        return result if result.dtype.itemsize >= 4 else result.astype(np.float32)

    def report(self, may_fail: bool = False) -> None:
        """Print remarks on the images; DataError if files fail that may not."""
        counts = self._counts
        if counts["trained"]:
            images = f"{counts['trained']} of {counts['read']} images"
            why = "they do not show how well it does on new ones"
            console.error(f"the network was trained on {images}: {why}")
        if counts["labeled"]:
            images = f"{counts['correct']} of {counts['labeled']} labeled images"
            share = f"({counts['correct'] / counts['labeled']:.4f})"
            folders = "(in folders named like a class)"
            console.remark(f"{images} {folders} predicted correctly {share}")
        if self.failed and not may_fail:
            files = f"{len(self.failed)} of {counts['read'] + len(self.failed)} files"
            raise DataError(f"{files} cannot be read; each is named above")
        if not counts["read"]:
            paths = shown(", ".join(self.paths)) or "images"
            way = f"of a folder the {image_paths.FORMATS_TEXT} files are taken"
            raise DataError(f"{paths}: no image; {way}")


def _training_images(run: RestoredRun) -> Callable[[str], bool]:
    """Return a function that is True for paths of the network's training images.

    It is False if that is unknown, as with a folder of images that has changed since.
    """
    config, folder_of = run.config, functools.cache(os.path.realpath)
    if config.dataset != "image_folder" or is_url(config.data_dir):
        return lambda path: False
    root = folder_of(os.path.expanduser(config.data_dir or "data"))

    def place(path):
        folder, name = os.path.split(path)
        return folder_of(folder), name

    @functools.cache
    def trained():
        try:
            train = image_folder.training_images(
                config.data_dir, run.image_shape, config.class_level
            )
        except DataError:
            return ()
        if checksum(train) != run.dataset_info.checksum:
            return ()
        if config.holds_out:
            fraction, fold = config.validation_fraction, config.fold_of_images
            train, _ = hold_out(train, fraction, fold)
        return {place(location_of(train, i)) for i in range(train.num_examples)}

    return lambda path: place(path)[0].startswith(root) and place(path) in trained()


@contextlib.contextmanager
def _errors_of_output(output):
    """Report errors of writing in a line; a closed pipe (`| head`) is the end."""
    try:
        yield
    except BrokenPipeError:
        # The exit flushes standard output once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit()
    except (OSError, UnicodeEncodeError) as error:
        path, why = output or "standard output", image_paths.reason(error)
        raise ConfigError(f"{path}: cannot be written: {why}") from None
