"""Cross-validation: a run for each part of the training images, which it holds out."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from towers import console, store
from towers.cluster.agreement import refuse_workers
from towers.cluster.spec import find_cluster
from towers.config import Config
from towers.config.metrics import METRICS
from towers.data.sets.arrays import Data
from towers.data.sources import location_of
from towers.errors import ConfigError
from towers.evaluation.split_predictions import predict_split
from towers.metrics.metrics import figures
from towers.metrics.predictions import predictions_of_logits
from towers.metrics.results import spreadsheet_csv
from towers.training.train import train

OUT_OF_FOLD = "out_of_fold.csv"


def cross_validate(
    workdir: str | os.PathLike,
    config: Config,
    folds: int = 5,
    *,
    data: Data | None = None,
    class_names: Sequence[str | int] = (),
    **options: Any,
) -> dict[str, Any]:
    """Train a run for each of several equal parts of the training images.

    Each run holds out one part, in `fold-0`, `fold-1` and so on. The same call
    continues. The folder also gets `folds.json`, the result, and `out_of_fold.csv` with
    the probabilities of every training image by the run that held it out.

    Args:
        workdir: a folder for the runs.
        config: the Config of the runs, without `validation_fraction`.
        folds: number of parts, at least 2.
        data: as in `train`.
        class_names: as in `train`.
        **options: further arguments of `train`.

    Returns:
        Name of a metric on held-out images at the best step -> "mean" and "std" over
        the runs, and "values", one per run.

    Raises:
        ConfigError: there are too few folds, the config holds out other images, or
            there are several workers.
    """
    if folds < 2:
        raise ConfigError(f"folds={folds}: must be at least 2")
    if config.validation_fraction or config.validation_fold:
        way = "leave out validation_fraction and validation_fold"
        raise ConfigError(f"folds={folds} holds out images of its own; {way}")
    # Their server would hold its port after the first fold.
    reads_slurm = config.choice_of("strategy").processes
    cluster = options.get("cluster") or find_cluster(reads_slurm=reads_slurm)
    refuse_workers(cluster, f"folds={folds}")
    folder = pathlib.Path(os.path.expanduser(workdir))
    rows: list[list[Any]] = []
    values: dict[str, list[float]] = {}
    store.make_folders(folder)
    for number in range(folds):
        fold = dataclasses.replace(config, validation_fold=f"{number}/{folds}")
        path = folder / f"fold-{number}"
        train(path, fold, data=data, class_names=class_names, **options)
        predicted = predict_split(path, "validation")
        predictions = predictions_of_logits(predicted.logits, predicted.labels)
        result = figures(predictions, predicted.class_names)
        for name in filter(result.__contains__, METRICS):
            values.setdefault(name, []).append(result[name])
        rows += _rows(predicted, number)
    table: dict[str, dict[str, Any]] = {
        name: {"mean": np.mean(x), "std": np.std(x, ddof=1), "values": x}
        for name, x in values.items()
    }
    store.write_aside(folder / "folds.json", json.dumps(table, indent=2) + "\n")
    head = ["index", "path", "fold", "label", *predicted.class_names]
    rows.sort(key=lambda row: row[0])
    store.write_aside(folder / OUT_OF_FOLD, spreadsheet_csv(head, rows))
    for name, row in table.items():
        each = " ".join(f"{x:.4f}" for x in row["values"])
        console.line(f"{name:18} {row['mean']:.4f} +- {row['std']:.4f}  ({each})")
    console.line(f"out-of-fold predictions: {folder / OUT_OF_FOLD}")
    return table


def _rows(predicted, fold):
    """Yield rows of `out_of_fold.csv`: numbers of the images, labels by name."""
    multi_label = predicted.labels.ndim == 2
    names, source = np.array(predicted.class_names), predicted.source
    for index, row in enumerate(predicted.probabilities):
        label = predicted.labels[index]
        label = ";".join(names[label]) if multi_label else names[label]
        location = location_of(source, index)
        number = int(source.indices[index])
        yield [number, location, fold, label, *(f"{p:.6g}" for p in row)]
