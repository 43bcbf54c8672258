"""towers: train image classifiers on every GPU of a machine, one tower per GPU.

::

    from towers import Config, evaluate, load_run, train

    result = train("runs/mine", Config(dataset="shapes", num_epochs=2.0))
    print(result.step, result.accuracy)
    evaluate("runs/mine")
    run = load_run("runs/mine")
    run.model(run.preprocess(images))

Importing the package imports neither TensorFlow nor Keras; the first function that is
looked up in it does.
"""

import functools
import gc
import importlib
import os
from typing import TYPE_CHECKING, Any

from towers.messages import VERSION

if TYPE_CHECKING:
    from towers import callbacks as callbacks
    from towers.build.restored import load_run as load_run
    from towers.config import Config as Config
    from towers.evaluation.calibration import calibrate as calibrate
    from towers.evaluation.calibration import reject as reject
    from towers.evaluation.ensembles import average as average
    from towers.evaluation.ensembles import evaluate_ensemble as evaluate_ensemble
    from towers.evaluation.evaluate import evaluate as evaluate
    from towers.evaluation.label_errors import find_suspects as find_suspects
    from towers.evaluation.predict import predict as predict
    from towers.evaluation.predict import write_predictions as write_predictions
    from towers.exporting.export import export as export
    from towers.report.comparison import compare as compare
    from towers.training.cross_validation import cross_validate as cross_validate
    from towers.training.train import train as train
    from towers.training.trial import dry_run as dry_run
    from towers.training.trial import lr_range_test as lr_range_test

__version__ = VERSION
_MODULES = {
    "Config": "config",
    "average": "evaluation.ensembles",
    "calibrate": "evaluation.calibration",
    "compare": "report.comparison",
    "cross_validate": "training.cross_validation",
    "dry_run": "training.trial",
    "evaluate": "evaluation.evaluate",
    "evaluate_ensemble": "evaluation.ensembles",
    "export": "exporting.export",
    "find_suspects": "evaluation.label_errors",
    "load_run": "build.restored",
    "lr_range_test": "training.trial",
    "predict": "evaluation.predict",
    "reject": "evaluation.calibration",
    "train": "training.train",
    "write_predictions": "evaluation.predict",
}
__all__ = list(_MODULES)

# Read by Keras and TensorFlow when they are imported.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if os.uname().machine == "x86_64":
    # TensorFlow 2.21 leaves oneDNN off on processors without VNNI or AMX.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")


def _public(function):
    """Return the function with checks of its arguments and the environment."""
    from towers.config.checks import check_environment
    from towers.config.options import bind_arguments

    @functools.wraps(function)
    def call(*args, **kwargs):
        check_environment()
        bound = bind_arguments(function, args, kwargs)
        try:
            return function(*bound.args, **bound.kwargs)
        finally:
            # Models and graphs are reference cycles: few objects, which hold much.
            gc.collect()

    call.__module__ = __name__  # where pickle finds it
    return call


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*__all__, "__version__", "callbacks"])


if not TYPE_CHECKING:  # a checker refuses names that are not there

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used."""
        if name == "callbacks":
            return importlib.import_module("towers.callbacks")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"towers.{_MODULES[name]}"), name)
        if name != "Config":
            value = _public(value)
        globals()[name] = value
        return value
