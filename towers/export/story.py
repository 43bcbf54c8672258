"""The export of a run from beginning to end."""

import dataclasses
import importlib
import pathlib

import keras
import numpy as np
import tensorflow as tf

from towers.build import match_parameters
from towers.data.paths import Paths
from towers.errors import ConfigError, ExportError, printable
from towers.evaluation.restored import RestoredRun, read_run, without_noise
from towers.export import FORMATS, TOLERANCES, check, examples, staging
from towers.export.stock import stock_network
from towers.output import say
from towers.parallel.devices import show_gpus
from towers.run import files

BATCH_SIZE = 32


def export(
    workdir: pathlib.Path,
    format: str,
    output: pathlib.Path,
    *,
    precision: str,
    step: int,
    data_dir: str,
    images: Paths,
    overwrite: bool,
) -> pathlib.Path:
    """See `towers.export.export`."""
    row, tolerance = FORMATS[format], TOLERANCES[precision]
    staging.check_output(output, row.suffix, overwrite)

    show_gpus()  # none: they may be training
    run = read_run(workdir, step=step)
    averages = "the moving averages of " if run.config.ema_decay else ""
    say(f"exporting {averages}the parameters of step {run.step} of {run.path}")
    trained = trained_network(run)

    compared, calibration, words = examples.images_of(
        run, data_dir=data_dir, paths=images, calibrate=precision == "int8"
    )
    if precision == "int8" and calibration is None:
        raise ConfigError(
            "precision=int8 learns the ranges of activations from images, and the "
            "run's data set cannot be read; name it with --data_dir, or files with "
            "--images"
        )

    # The same network of stock layers, written and loaded by another process.
    writer = importlib.import_module(f"towers.export.{row.writer}")
    with staging.staged(output) as path:
        with staging.writing(output):
            writer.write(path, stock_network(trained), run, precision, calibration)
            logits, class_names = check.predict(format, path, compared)
        difference = check.largest_difference(logits, logits_of(run, trained, compared))
        if class_names != tuple(map(printable, run.class_names)):
            raise ExportError(
                f"the {format} export is removed: its class names are not those of the "
                "run"
            )
        if not difference <= tolerance:
            raise ExportError(
                f"the {format} export is removed: its logits differ from those of the "
                f"run by {difference:.2g} of the largest on {len(compared)} {words}, "
                f"and {tolerance:g} is allowed for {precision}"
            )
        num_bytes = files.num_bytes(path)
        staging.check_output(output, row.suffix, overwrite)  # minutes later
    say(
        f"{output}: {num_bytes:,} bytes. Loaded in a new process, its logits differ "
        f"from those of the run by at most {difference:.2g} of the largest "
        f"({tolerance:g} is allowed), on {len(compared)} {words}"
    )
    return output


def trained_network(run: RestoredRun) -> keras.Model:
    """`RestoredRun.network` in float32, whatever precision it was trained in, with the
    moving averages of the parameters where the run keeps them. Layers whose parameters
    are all frozen are not `trainable`."""
    config = dataclasses.replace(run.config, precision="float32")
    in_float32 = dataclasses.replace(run, config=config)
    network = in_float32.network("averages" if config.ema_decay else "params")
    _, frozen = match_parameters(config, network)
    for layer in network.layers:
        names = {variable.path for variable in layer.trainable_variables}
        if names and names <= frozen:
            layer.trainable = False
    return network


def logits_of(run: RestoredRun, trained: keras.Model, images: np.ndarray) -> np.ndarray:
    """The logits of the trainer's network, float32 [n, classes].

    Args:
        trained: `RestoredRun.network`.
        images: uint8 [n, *run.image_shape].
    """
    model = without_noise(trained)

    @tf.function(input_signature=[tf.TensorSpec([None, *run.image_shape], tf.uint8)])
    def predict(images):
        with tf.device("CPU:0"):  # a GPU may round to TF32
            return model(run.preprocess(images), training=False)

    pieces = (images[i : i + BATCH_SIZE] for i in range(0, len(images), BATCH_SIZE))
    return np.concatenate([predict(piece).numpy() for piece in pieces])
