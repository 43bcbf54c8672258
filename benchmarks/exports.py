"""Exports of runs: how far their logits are, how accurate, how large.

    python -m benchmarks.exports --runs=runs/cifar10_cnn,runs/cifar10_resnet20

Each run is exported to every format whose packages are installed. Each export is loaded
by its own runtime in a new process, as `run_export.py` does before it announces one,
and predicts the test images. The first row of a run is the trainer's network; the
differences of logits are from its own.
"""

import contextlib
import dataclasses
import pathlib
import sys
import tempfile

import numpy as np
import tensorflow as tf

from benchmarks import measure
from towers import store
from towers.build import load_data_set
from towers.data.sources import Source
from towers.errors import ConfigError, data_errors_of_tensorflow
from towers.evaluation import RestoredRun, load_run
from towers.export import FORMATS, comparison, export, validate_format

READ_AT_ONCE = 500


def main() -> None:
    parser = measure.create_parser(__doc__, data_dir="")
    parser.add_argument("--runs", type=measure.names, required=True)
    parser.add_argument("--num_images", type=int, default=10_000)
    options = parser.parse_args()
    print(measure.report_head("Exports of trained networks"))
    print(
        measure.table_head(
            "run | format | largest difference of a logit | of the largest logit | "
            "same class | accuracy | bytes"
        )
    )
    for workdir in options.runs:
        run = load_run(workdir)
        images, labels = test_images(run, options.data_dir, options.num_images)
        trained = comparison.trained_network(run)
        expected = comparison.logits_of(run, trained, images)
        name = pathlib.Path(workdir).name
        print_row(name, "(the trainer's)", expected, expected, labels, "")
        for format, row in FORMATS.items():
            for precision in row.precisions:
                try:
                    validate_format(format, precision)
                except ConfigError as error:  # a package is missing
                    print(measure.table_row(name, format, error, *[""] * 4))
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    path = pathlib.Path(folder, f"model{row.suffix}")
                    with contextlib.redirect_stdout(sys.stderr):
                        export(
                            workdir,
                            format,
                            path,
                            precision=precision,
                            data_dir=options.data_dir,
                        )
                    logits, _ = comparison.predict_in_new_process(format, path, images)
                    num_bytes = f"{store.num_bytes(path):,}"
                words = format if precision == "float32" else f"{format} {precision}"
                print_row(name, words, logits, expected, labels, num_bytes)


def test_images(
    run: RestoredRun, data_dir: str, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first test images of the run's data set and their labels."""
    data_dir = data_dir or run.config.data_dir
    data_set = load_data_set(dataclasses.replace(run.config, data_dir=data_dir))
    count = min(most, data_set.test.num_examples)
    firsts = range(0, count, READ_AT_ONCE)
    with data_errors_of_tensorflow():
        pieces = [read(data_set.test, i, min(i + READ_AT_ONCE, count)) for i in firsts]
    return tuple(np.concatenate(x) for x in zip(*pieces, strict=True))


def read(source: Source, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    images, labels = source.read(tf.range(first, end, dtype=tf.int64))
    return images.numpy(), labels.numpy()


def print_row(name, words, logits, expected, labels, num_bytes):
    predicted = logits.argmax(1)
    print(
        measure.table_row(
            name,
            words,
            f"{np.abs(logits - expected).max():.2g}",
            f"{comparison.largest_difference(logits, expected):.2g}",
            f"{np.mean(predicted == expected.argmax(1)):.4f}",
            f"{np.mean(predicted == labels):.4f}",
            num_bytes,
        ),
        flush=True,
    )


if __name__ == "__main__":
    measure.run(main)
