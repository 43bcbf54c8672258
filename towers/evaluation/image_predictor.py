"""The network of a run on images that are read batch by batch."""

import collections
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from towers import console
from towers.build.restored import (
    RestoredRun,
    evaluation_devices,
    read_run,
    reported_weights,
)
from towers.config import Config, factories
from towers.data.batches import hold_out
from towers.data.files import image_folder
from towers.data.files import paths as image_paths
from towers.data.files.reading import is_url
from towers.data.files.unlabeled import Images, Labels, paths_or_images, read_files
from towers.data.sources import checksum, location_of
from towers.errors import ConfigError, DataError
from towers.evaluation.heatmaps import Take, give_heatmaps
from towers.evaluation.ranking import MAX_PICTURED, RANKS, ranked, write_sheet
from towers.messages import shown
from towers.metrics.predictions import top_class
from towers.models.create import with_features, without_noise
from towers.parallel.copies import Weights
from towers.parallel.evaluator import create_predictor
from towers.run.folder import RunFolder
from towers.run.stored_config import prediction_config


class ImagePredictor:
    """The network of a run, the images that it predicts, and the files that failed.

    `rank` is of `towers.predict`; `features` is the layer whose activations are the
    outputs, in place of logits; `loading` are arguments of `read_run`. If there is a
    `take_heatmap`, it gets the heat maps.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        images: Images,
        config: Config | None,
        rank: str,
        features: str = "",
        **loading: Any,
    ):
        if rank not in RANKS:
            raise ConfigError(f"rank={rank}: must be one of {', '.join(RANKS)}")
        folder = RunFolder(workdir)
        step = loading.get("step", "best")
        self._config = config = config or prediction_config(folder, step)
        weights = reported_weights(config, loading.get("use_ema"))
        devices = evaluation_devices(config, folder, console.remark)
        self.run = run = read_run(workdir, **loading, log=console.remark)
        self.paths, given = paths_or_images(images, run.pixels.dtype)
        self._images: Any = given if rank == "none" else list(given)  # for the sheet
        self._model = model = without_noise(run.network(weights), features)
        if rank == "diverse":
            model = with_features(model)
        tta = "none" if features else config.tta
        if tta != config.tta:
            console.remark(f"tta={config.tta} is not used for features")
        transforms = factories.create("tta", tta)
        self._predictor = create_predictor(model, devices.towers, transforms)
        name = "EMA" if weights is Weights.EMA else "raw"
        message = f"predicting with the {name} weights of step {run.step}"
        if tta != "none":
            message += f", test-time augmentation {tta}"
        if run.reject_below and not features:
            message += f"; unknown below a probability of {run.reject_below:.4f}"
        console.remark(message)
        self._rank, self._has_classes = rank, not features
        self._counts: collections.Counter[str] = collections.Counter()
        self.take_heatmap: Take | None = None
        self.failed: dict[str, str] = {}

    def all(self) -> tuple[list[str], list[int], np.ndarray]:
        """Return what `batches` yields of all images, ranked; or raise DataError."""
        batches = list(self.batches())
        if not batches:
            self.report()
        columns = zip(*batches, strict=True)
        names, labels, rows = (list(itertools.chain(*column)) for column in columns)
        outputs = np.array(rows)
        if self._rank == "none":
            return names, labels, outputs
        logits, features = np.split(outputs, [len(self.run.class_names)], 1)
        probabilities = self.run.to_probabilities(logits)
        order = ranked(self._rank, probabilities, features, self.run.thresholds)
        return [names[i] for i in order], [labels[i] for i in order], logits[order]

    def batches(self) -> Iterator[tuple[list[str], list[int], np.ndarray]]:
        """Yield paths, labels (-1 if unknown) and outputs.

        With rank="diverse" the features follow the logits.
        """
        paths, counts = self.paths, self._counts
        label_of = Labels(self.run.class_names, paths)
        is_training_image = _training_images(self.run)
        files, size = self._readable_files(), 0
        while batch := list(itertools.islice(files, self._config.batch_size)):
            size = max(size, len(batch))
            outputs = self._outputs(batch, size)
            names = [file.path for file in batch]
            labels = [label_of(name) if paths else -1 for name in names]
            counts["read"] += len(batch)
            if self._has_classes:
                logits = outputs[:, : len(self.run.class_names)]
                counts["trained"] += sum(map(is_training_image, names if paths else ()))
                known = np.array(labels) >= 0
                counts["labeled"] += int(known.sum())
                counts["correct"] += int(np.sum(known & (top_class(logits) == labels)))
            if self.take_heatmap is not None:
                options = self._config.max_image_pixels, self.take_heatmap
                give_heatmaps(self.run, self._model, batch, outputs, *options)
            yield names, labels, outputs

    def write_sheet(self, path: str, names: list[str], logits: np.ndarray) -> None:
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
