"""towers: train image classifiers on every GPU of a machine, one tower per GPU.

    from towers import Config, evaluate, load_run, train

    result = train("runs/mine", Config(dataset="embedded", num_epochs=2.0))
    print(result.step, result.accuracy)
    evaluate("runs/mine")
    run = load_run("runs/mine")
    run.model(run.preprocess(images))

Importing the package imports neither TensorFlow nor Keras.
"""

import contextlib
import functools
import gc
import importlib
import os
import pathlib
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from towers import console

if TYPE_CHECKING:
    import keras
    import numpy as np
    import PIL.Image
    import tensorflow as tf

    from towers.callbacks import Callback
    from towers.config import Config
    from towers.data.paths import Paths
    from towers.evaluation import RestoredRun
    from towers.evaluation.predict import Predicted
    from towers.run.cluster_spec import Cluster
    from towers.training.lr_range import LrRange
    from towers.training.result import TrainResult

    Array = np.typing.ArrayLike
    Split = tuple[Array, Array] | tuple[Array, Array, Array] | tf.data.Dataset
    Image = PIL.Image.Image | np.typing.ArrayLike
    Images = Image | Sequence[Image] | tf.data.Dataset
    Data = Split | tuple[Split, Split] | tuple[Split, Split, Split]

__version__ = "0.1.0"
__all__ = [
    "Config",
    "compare",
    "dry_run",
    "evaluate",
    "export",
    "load_run",
    "lr_range_test",
    "predict",
    "train",
]

# Read by Keras and TensorFlow when they are imported.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# Of TensorFlow 2.21 and its converter to TFLite, as an extended regular expression.
_CHATTER = (
    "^(WARNING: All log messages before absl|I0000 |To enable the |fully_quantize: "
    "|[WE]0000 .*(Unable to register cu|omputation placer .*already registered))"
)
_ONE_FILTER = threading.RLock()  # descriptor 2 belongs to the whole process

_Function = TypeVar("_Function", bound=Callable)


def _implemented_in(module: str) -> Callable[[_Function], _Function]:
    """The function of the same name in a module, which is imported when it is called,
    with the signature and the docstring of the one that is decorated. The types of its
    arguments are checked."""

    def decorate(function):
        names = dict.fromkeys(function.__annotations__)
        console.ARGUMENTS |= names | (function.__kwdefaults__ or {})

        @functools.wraps(function)
        def call(*args, **kwargs):
            from towers.config.options import bind_arguments

            with quiet_imports():
                implementation = importlib.import_module(module)
            implementation = getattr(implementation, function.__name__)
            bound = bind_arguments(implementation, args, kwargs)
            try:
                return implementation(*bound.args, **bound.kwargs)
            finally:
                # Models and graphs are reference cycles: few objects, which hold much.
                gc.collect()

        return call

    return decorate


@_implemented_in("towers.training")
def train(
    workdir: str | os.PathLike,
    config: "Config",
    *,
    model: "keras.Model | None" = None,
    data: "Data | None" = None,
    class_names: Sequence[str | int] = (),
    overwrite: bool = False,
    allow_change: tuple[str, ...] = (),
    cluster: "Cluster | None" = None,
    allow_public_address: bool = False,
    origins: Mapping[str, str] = MappingProxyType({}),
    progress: str = "auto",
    profile_steps: Sequence[int] = (),
    report: bool = True,
    callbacks: "Sequence[Callback]" = (),
) -> "TrainResult":
    """Trains a run to its end, from its last checkpoint or from the start: the same
    call continues a run that was interrupted.

    It may be called in any thread; in the main one Ctrl-C, SIGTERM and SIGHUP save
    first.

    Args:
        workdir: the run's folder; made where it is missing.
        config: of the run.
        model: a Keras model, Functional or Sequential, that is trained in place of
            `config.model`, beginning with its weights; the object itself stays as it
            is. The run's folder keeps its architecture.
        data: images and labels in place of `config.dataset`: (x, y), of which a tenth
            is held out for testing, ((x, y), (x_test, y_test)), or three pairs, the
            second for validation. x are images [n, height, width, channels] from 0 to
            255, y integers [n]; a `tf.data.Dataset` of known length may be in place of
            a pair, and is read into memory. (x, y, sample_weight) has factors [n] on
            the losses of training images, at least 0.
        class_names: of `data`, in the order of the labels.
        overwrite: start again; the files of an earlier run there are removed.
        allow_change: fields that may differ from the stored config although their
            change makes it another run.
        cluster: the workers of the run, of which this process is one; by default those
            that TF_CONFIG or Slurm describe, if any. The chief alone uses the folder.
        allow_public_address: whether workers may have public addresses; their server
            knows no passwords.
        origins: option -> the layer of a command that set it, for the start banner,
            which lists the others under "config".
        progress: "live" for bars at the end of a terminal, "plain" for lines by the
            clock, "off" for none; "auto" is live where standard output is a terminal.
        profile_steps: the steps before and after a part of the run that is traced for
            TensorBoard's profile plugin; a summary is printed.
        report: write a web page about the run at its end, `report/index.html`.
        callbacks: see `towers.callbacks`; only the chief calls them.

    Returns:
        The run's `path`, the last `step`, the `accuracy` of the last evaluation (None
        if there was none), the `state`, name -> array, the `history` of its metrics,
        name -> (steps, values), and the trained networks `model` and `model_ema`.

    Raises:
        TowersError: see `towers.errors`; what was saved stays as it is.
    """


@_implemented_in("towers.training.dry_run")
def dry_run(
    workdir: str | os.PathLike,
    config: "Config",
    *,
    model: "keras.Model | None" = None,
    data: "Data | None" = None,
    class_names: Sequence[str | int] = (),
    overwrite: bool = False,
    allow_change: tuple[str, ...] = (),
    cluster: "Cluster | None" = None,
    allow_public_address: bool = False,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Prints what `train`, with the same arguments, would do and need, and tries some
    steps. A run in the folder is continued in this process alone: nothing is written.

    Raises:
        TowersError: that of `train`, as far as it is known before a run.
    """


@_implemented_in("towers.training.lr_range")
def lr_range_test(
    workdir: str | os.PathLike,
    config: "Config",
    *,
    model: "keras.Model | None" = None,
    data: "Data | None" = None,
    class_names: Sequence[str | int] = (),
    cluster: "Cluster | None" = None,
    allow_public_address: bool = False,
    origins: Mapping[str, str] = MappingProxyType({}),
    progress: str = "auto",
) -> "LrRange":
    """Takes the first steps of a run with a learning rate that grows until the loss
    diverges, and suggests one. The run itself is not begun, nor one in the folder
    touched: `lr_range_test.png` is written there.

    Args:
        workdir, config: of the run.
        model, data, class_names, cluster, allow_public_address, origins, progress: as
            of `train`.

    Returns:
        `rates`, `losses` and `smoothed`, float64 [steps], and the `suggestion`, None
        where the loss does not fall.

    Raises:
        TowersError: such as a ConfigError where the folder cannot be written.
    """


@_implemented_in("towers.evaluation")
def evaluate(
    workdir: str | os.PathLike,
    config: "Config | None" = None,
    *,
    data: "Split | None" = None,
    step: int | str = "best",
    use_ema: bool | None = None,
    eval_interval_secs: float = 0.0,
    report: bool = False,
) -> dict[str, Any]:
    """Evaluates a checkpoint of a run on all test images and reports it.

    Args:
        workdir: the run's folder.
        config: the run's, with the device, towers, strategy and batch size of the
            evaluation; by default the stored one, on all devices that there are.
        data: images and labels (x, y), or a `tf.data.Dataset` of them, in place of the
            test images of the run's data set; as of `train`. Of a run that was not
            trained on arrays nothing is written then.
        step: of the checkpoint, "best" or "last", see `load_run`; the last where new
            ones are looked for.
        use_ema: only the moving averages (True) or the raw parameters (False); by
            default both, where the run keeps averages.
        eval_interval_secs: look for a new checkpoint this often until the run's last
            step is evaluated; 0 evaluates once.
        report: write a web page about the run, `report/index.html`.

    Returns:
        The content of the run's `result.json`: "test_accuracy" of the parameters,
        "test_accuracy_ema" of their moving averages, "reported", which of these two is
        the run's, "test_loss", "step" and so on.

    Raises:
        TowersError: such as a CheckpointError where no checkpoint is valid and fits.
    """


@_implemented_in("towers.evaluation.comparison")
def compare(workdirs: Sequence[str | os.PathLike]) -> pathlib.Path:
    """Prints a table of runs, and writes a web page with their results, curves and the
    options that differ.

    Where the runs are two groups that differ in more than the seed, and have the same
    seeds, also the mean difference in accuracy with its standard error.

    Args:
        workdirs: folders of two or more runs.

    Returns:
        The path of the page, `report/compare.html` in the first folder.

    Raises:
        TowersError: such as a ConfigError where a folder holds no run.
    """


@_implemented_in("towers.evaluation.predict")
def predict(
    workdir: str | os.PathLike,
    images: "Paths | Images",
    config: "Config | None" = None,
    *,
    step: int | str = "best",
    use_ema: bool | None = None,
    top: int = 5,
    form: str = "",
    features: str = "",
    output: str | os.PathLike = "",
) -> "Predicted | None":
    """The predictions for images, in their order. The label of an image file is the
    class whose name its folder has.

    With `form`, `features` or `output` they are written batch by batch, and nothing is
    returned.

    Args:
        workdir: the run's folder; neither its data set nor its recipe is needed.
        images: one or several image files of any size, or folders of files; or images
            in memory, which are fitted to the network as files are: an array of numbers
            from 0 to 255, [n, height, width, channels] or of one image, images of
            Pillow, a list of either, or a `tf.data.Dataset`, whose labels are ignored.
        config: the run's, with the device, towers, batch size and test-time
            augmentation of the prediction; by default the stored one, on all devices
            that there are.
        step: of the checkpoint, "best" or "last", see `load_run`.
        use_ema: the moving averages (True) or the raw parameters (False); by default
            the averages, where the run keeps them.
        top: classes of each image; 0 for all, in the order of the classes, which are
            then the columns of "csv".
        form: "table", "csv" or "json", a line for each image; by default none, or
            "table" where there is an output.
        features: layer whose activations are written instead, to an `.npz` file with
            "features", "names" and "labels".
        output: path of a file; by default standard output, or `features.npz`.

    Returns:
        `paths` (of images in memory their numbers), `labels`, `probabilities`, float
        [n, classes], and `class_names`; `failed`, path -> why it cannot be read;
        `top(k)`, the names and probabilities of the best classes of each image.

    Raises:
        TowersError: such as a DataError where no file can be read; and where results
            are written, where some cannot: they are named on standard error, and the
            others are done.
    """


@_implemented_in("towers.exporting")
def export(
    workdir: str | os.PathLike,
    format: str,
    output: str | os.PathLike | None = None,
    *,
    precision: str = "float32",
    step: int | str = "best",
    data_dir: str = "",
    images: "Paths" = (),
    overwrite: bool = False,
) -> pathlib.Path:
    """Writes the network of a run, with its preprocessing and its class names, in the
    format of another program.

    The moving averages of the parameters are taken where the run keeps them. What is
    written is loaded in a new process and compared with the trained network in float32
    before it gets its name. It uses no GPU, and where TensorFlow has made no devices in
    this process, it gets none.

    Args:
        workdir: the run's folder.
        format: "saved_model", "keras", "tflite", "onnx" or "safetensors".
        output: by default `export/saved_model`, `export/model.keras` and so on in the
            run's folder.
        precision: "float32"; with "tflite" also "float16" or "int8".
        step: of the checkpoint, "best" or "last", see `load_run`.
        data_dir: where the run's data set is, whose test images are compared.
        images: image files, and folders of them, in place of these.
        overwrite: replace an earlier export.

    Returns:
        The path of the export.

    Raises:
        TowersError: such as a ConfigError where something stands at the path, or an
            ExportError where it cannot be written or its logits differ.
    """


@_implemented_in("towers.evaluation")
def load_run(workdir: str | os.PathLike, *, step: int | str = "best") -> "RestoredRun":
    """The network of a run with its trained parameters; needs no data set, no recipe.

    Where TensorFlow has made no devices in this process, it gets the first GPU, or none
    while a training of the run holds the GPUs.

    Args:
        workdir: the run's folder.
        step: of the checkpoint; "best" for the best evaluation on held-out images, see
            `Config.best_by`, or the last step of a run without them; "last" for the
            newest valid one.

    Returns:
        `model` and `model_ema`, Keras models with the raw parameters and their moving
        averages from preprocessed images to logits; `preprocess`, from uint8 images to
        their input; `class_names`, in the order of the logits; `config`, `step`.

    Raises:
        TowersError: such as a CheckpointError where no checkpoint is valid, or a
            ConfigError where the run's network is in a file that is missing.
    """


@contextlib.contextmanager
def quiet_imports():
    """Imports TensorFlow inside without the lines that its libraries log before they
    read TF_CPP_MIN_LOG_LEVEL; with TF_CPP_MIN_LOG_LEVEL=0 they are shown. Another
    process filters, so that the last line of an import that aborts is shown."""
    with _ONE_FILTER, contextlib.ExitStack() as stack:
        if os.environ.get("TF_CPP_MIN_LOG_LEVEL") != "0":
            with contextlib.suppress(OSError):  # there is no standard error, or no grep
                stderr = stack.enter_context(open(os.dup(2), "wb"))
                command = ["grep", "--line-buffered", "-aEv", _CHATTER]
                grep = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=stderr,
                    start_new_session=True,  # Ctrl-C is not for it
                )
                # A process that was started inside may keep the pipe open.
                stack.enter_context(contextlib.suppress(subprocess.TimeoutExpired))
                stack.callback(grep.wait, 1.0)
                stack.callback(os.dup2, stderr.fileno(), 2)
                with grep.stdin:
                    os.dup2(grep.stdin.fileno(), 2)
        yield


def __dir__() -> list[str]:
    """What is public."""
    return sorted([*__all__, "__version__", "callbacks"])


if not TYPE_CHECKING:  # a checker refuses names that are not there

    def __getattr__(name: str) -> Any:
        """Config and callbacks, imported when they are first used: a program catches
        signals before that."""
        if name == "Config":
            from towers.config import Config

            return Config
        if name == "callbacks":
            return importlib.import_module("towers.callbacks")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
