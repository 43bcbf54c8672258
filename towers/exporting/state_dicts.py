"""Safetensors files with the names of PyTorch: parameters without a network."""

import json
import pathlib

import keras
import numpy as np

from towers.errors import ConfigError, ExportError, printable
from towers.evaluation.restored import RestoredRun
from towers.exporting import comparison
from towers.models import torch_names
from towers.run.initial import read_variables


def write_safetensors(path: pathlib.Path, trained: keras.Model, run: RestoredRun):
    """Writes the variables of a `comparison.trained_network` under timm's names, in
    float32; the metadata has class names, sides of images, mean and standard deviation
    in units of 0..1, in JSON. ConfigError where there are no such names for the
    network."""
    model = run.config.model
    tables = torch_names.tables(model)
    ours = {variable.path for variable in trained.variables}
    if not tables or torch_names.missing_variables(tables[0], ours):
        raise ConfigError(
            f"format=safetensors: timm has no network like model={model}, whose names "
            "could be written; choose another --format, such as keras"
        )
    from safetensors.numpy import save_file

    metadata = {
        "class_names": run.class_names,
        "input_size": run.input_shape,
        "mean": [value / 255 for value in run.mean],
        "std": [value / 255 for value in run.std],
    }
    save_file(
        torch_names.state_dict(trained, tables[0]),
        path,
        {"format": "pt"} | {name: json.dumps(x) for name, x in metadata.items()},
    )


def predict(
    path: pathlib.Path, run: RestoredRun, images: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Logits of a new network with the variables of a file, and the names of the
    classes in it, `printable`. ExportError where a variable is missing."""
    from safetensors import safe_open

    network = comparison.trained_network(run)
    values = read_variables(str(path), run.config.model, network)
    for variable in network.variables:
        if variable.path not in values:
            raise ExportError(f"the safetensors export lacks {variable.path}")
        variable.assign(values[variable.path])
    with safe_open(path, "numpy") as file:
        class_names = json.loads(file.metadata()["class_names"])
    logits = comparison.logits_of(run, network, images)
    return logits, tuple(map(printable, class_names))
