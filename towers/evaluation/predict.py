"""Predictions of a run's network for image files; no data set is needed."""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from towers.config import Config
from towers.config.options import check_path
from towers.data.decoding import Decoding
from towers.data.paths import ENDINGS_TEXT, Paths, check_paths, reason, walk
from towers.data.sources import shown
from towers.data.tta import create_tta
from towers.data.unlabeled import ImageFile, Labels, read_files
from towers.errors import ConfigError, DataError
from towers.evaluation import devices
from towers.evaluation.features import FeaturesFile, cut_off
from towers.evaluation.restored import RestoredRun, kinds_of_parameters, read_run
from towers.evaluation.rows import FORMS, Rows
from towers.output import remark
from towers.parallel.evaluator import RAW, Evaluator, create_predictor
from towers.run import sizes
from towers.run.folder import RunFolder


def predict(
    workdir: str | os.PathLike,
    paths: Paths,
    config: Config | None = None,
    *,
    step: int = 0,
    use_ema: bool | None = None,
    top: int = 5,
    form: str = "table",
    features: str = "",
    output: str | os.PathLike = "",
) -> None:
    """See `towers.predict`.

    The output is written batch by batch, in the order of the files. The label of a file
    in a folder with the name of a class is that class.

    Raises:
        ConfigError, CheckpointError, RunFolderError: as `read_run`; or there is no such
            layer, or the output cannot be written.
        DataError: a path is wrong; there are no images, or some cannot be read: the
            others are done.
    """
    if form not in FORMS:
        raise ConfigError(f"form={form}: must be one of {', '.join(FORMS)}")
    if features and form != "table":
        raise ConfigError(f"features={features} with form={form}: one of the two")
    if top < 1:
        raise ConfigError(f"top={top}: must be at least 1")
    paths = check_paths(paths)
    check_path("output", output)
    output = os.fspath(output) or ("features.npz" if features else "")
    folder = RunFolder(workdir)
    folder.check()
    config = config or folder.prediction_config(step)
    *_, averages = kinds_of_parameters(config, use_ema)
    used = devices.configure(config, folder, remark)
    run = read_run(workdir, step=step, log=remark)
    sizes.check_batch(config, config.batch_size, run.input_shape)
    model = run.model_ema if averages else run.model
    if features:
        model = cut_off(model, features)
        if config.tta != "none":
            remark(f"tta={config.tta} is not used for features")
    tta = create_tta("none" if features else config.tta)
    network = create_predictor(model, used.towers, tta)
    kind = "moving averages of the parameters" if averages else "parameters"
    is_augmented = config.tta != "none" and not features
    views = f", test-time augmentation {config.tta}" if is_augmented else ""
    remark(f"predicting with the {kind} of step {run.step}{views}")

    counts = _Counts(Labels(run.class_names))
    files = read_files(
        walk(paths, counts.fail),
        run.image_shape,
        Decoding(max_pixels=config.max_image_pixels),
    )
    batches = _outputs(run, network, counts.readable(files), config.batch_size)
    with contextlib.ExitStack() as stack:
        with _errors_of_output(output):
            if features:
                sink = stack.enter_context(FeaturesFile(output))
            else:
                stream = stack.enter_context(_open(output))
                sink = Rows(stream, form, run.class_names, top)
        for names, outputs in batches:
            labels = [counts.labels(name) for name in names]
            if not features:
                counts.add(labels, outputs)
            with _errors_of_output(output):
                sink.write(names, labels, outputs)
        with _errors_of_output(output):
            sink.finish()
    counts.finish(paths)


class _Counts:
    """What is said at the end."""

    def __init__(self, labels: Labels):
        self.labels = labels
        self._num_read = self._num_failed = self._num_labeled = self._num_correct = 0

    def fail(self, path: str, reason: str) -> None:
        self._num_failed += 1
        remark(f"{shown(path)}: {reason}")

    def readable(self, files: Iterable[ImageFile]) -> Iterator[ImageFile]:
        for file in files:
            if file.image is None:
                self.fail(file.path, file.fault)
            else:
                self._num_read += 1
                yield file

    def add(self, labels: Sequence[int], logits: np.ndarray) -> None:
        self._num_labeled += sum(label >= 0 for label in labels)
        self._num_correct += int(np.sum(np.argmax(logits, 1) == labels))

    def finish(self, paths: Sequence[str]) -> None:
        if self._num_labeled:
            accuracy = self._num_correct / self._num_labeled
            remark(
                f"{self._num_correct} of {self._num_labeled} labeled images (in "
                f"folders named like a class) predicted correctly ({accuracy:.4f})"
            )
        if self._num_failed:
            total = self._num_read + self._num_failed
            raise DataError(
                f"{self._num_failed} of {total} files cannot be read; each is named "
                "above"
            )
        if not self._num_read:
            raise DataError(
                f"{shown(', '.join(paths))}: no image; of a folder the {ENDINGS_TEXT} "
                "files are taken"
            )


def _outputs(
    run: RestoredRun, network: Evaluator, files: Iterable[ImageFile], batch_size: int
) -> Iterator[tuple[list[str], np.ndarray]]:
    """Per batch the paths and the output of the network for each."""
    is_traced = False
    files = iter(files)
    while batch := list(itertools.islice(files, batch_size)):
        images = np.stack([file.image for file in batch])
        weights = np.ones(len(batch), np.float32)
        missing = batch_size - len(batch) if is_traced else 0
        if missing:  # a batch of another size would be traced anew
            images = np.pad(images, [(0, missing), (0, 0), (0, 0), (0, 0)])
            weights = np.pad(weights, (0, missing))
        is_traced = True
        with tf.device("CPU:0"):
            images, weights = run.preprocess(images), tf.constant(weights)
        inputs = {"images": images, "weights": weights}
        [kinds] = network.predictions([inputs])
        outputs = kinds[RAW]
        result = outputs.get("logits_tta", outputs["logits"])
        if result.dtype.itemsize < 4:  # NumPy has no bfloat16
            result = result.astype(np.float32)
        yield [file.path for file in batch], result


@contextlib.contextmanager
def _open(output: str):
    """The stream of the results, which takes names of files that are no text."""
    if not output:
        stream, reconfigure = sys.stdout, getattr(sys.stdout, "reconfigure", None)
        if reconfigure is None:  # such as a notebook's
            yield stream
            return
        errors = stream.errors
        reconfigure(errors="surrogateescape")
        try:
            yield stream
        finally:
            with contextlib.suppress(OSError):
                reconfigure(errors=errors)
        return
    stream = open(output, "w", encoding="utf-8", errors="surrogateescape")
    try:
        yield stream
    finally:
        with contextlib.suppress(OSError):  # of what could not be flushed before
            stream.close()


@contextlib.contextmanager
def _errors_of_output(output: str):
    """Those of writing as a line. Where nobody reads any more, as of `| head`, there is
    nothing left to do."""
    try:
        yield
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")
        sys.exit()
    except (OSError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"{output or 'standard output'}: cannot be written: {reason(error)}"
        ) from None
