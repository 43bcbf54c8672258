"""Predictions as lines of text (a table, CSV or JSON), and activations in a file."""

import contextlib
import csv
import errno
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from towers import store
from towers.build.restored import RestoredRun
from towers.data.files.paths import reason
from towers.data.unknown import UNKNOWN
from towers.errors import ConfigError
from towers.messages import MAX_NAME, printable, shown

FORMS = ("table", "csv", "json")

# Takes a batch of n images: their paths, labels [n], -1 if unknown, and the outputs of
# the network, [n, ...].
Write = Callable[[Sequence[str], Sequence[int], np.ndarray], None]


@contextlib.contextmanager
def create_table(path: str, form: str, run: RestoredRun, top: int) -> Iterator[Write]:
    """Yield a function that writes a line for each image to a file or standard output.

    With `top=0` all classes are written in their order. "json" has null for NaN and, of
    label sets, the classes "present". Of a run that rejects images there is also the
    "prediction", a class or UNKNOWN.
    """
    class_names, thresholds = run.class_names, run.thresholds
    digits = "{:.6f}" if top else "{:.6g}"  # small ones too
    in_order, top = not top, min(top or len(class_names), len(class_names))
    names = (*class_names, UNKNOWN) if run.reject_below else class_names
    width = max(len(shown(name, MAX_NAME)) for name in names)

    def line(path, label, answer, best, present):
        answers = [answer] if run.reject_below else []
        if form == "csv":
            numbers = [digits.format(p) for _, p in best]
            if not in_order:
                numbers = [x for name, p in best for x in (name, digits.format(p))]
            csv_file.writerow([path, label or "", *answers, *numbers])
        elif form == "json":
            predictions = []
            for name, p in best:
                number = None if math.isnan(p) else float(digits.format(p))
                predictions.append({"class": name, "probability": number})
            row = {"path": path, "label": label, "predictions": predictions}
            if answers:
                row["prediction"] = answer
            if thresholds is not None:
                row["present"] = [class_names[c] for c in np.flatnonzero(present)]
            stream.write(f"{json.dumps(row)}\n")
        else:
            cells = [f"{shown(x, MAX_NAME):{width}}" for x in answers]
            cells += [f"{shown(x, MAX_NAME):{width}} {p:.4f}" for x, p in best]
            stream.write(f"{'  '.join(cells)}  {printable(path)}\n")

    def write(paths, labels, logits):
        order = np.argsort(-logits, axis=1, kind="stable")[:, :top]
        if in_order:
            order = np.broadcast_to(np.arange(top), order.shape)
        probabilities = run.to_probabilities(logits)
        answers = run.answers(probabilities)
        is_present = probabilities >= (1.0 if thresholds is None else thresholds)
        probabilities = np.take_along_axis(probabilities, order, 1).tolist()
        rows = paths, labels, answers, order.tolist(), probabilities, is_present
        for path, label, answer, classes, values, present in zip(*rows, strict=True):
            best = [(class_names[c], p) for c, p in zip(classes, values, strict=True)]
            name = class_names[label] if label >= 0 else None
            line(path, name, answer, best, present)
        stream.flush()

    with _open_output(path) as stream:
        csv_file = csv.writer(stream, lineterminator="\n")
        if form == "csv":
            numbers = range(1, top + 1)
            columns = [f"{x}_{n}" for n in numbers for x in ("class", "probability")]
            answers = ["prediction"] if run.reject_below else []
            columns = list(class_names) if in_order else columns
            csv_file.writerow(["path", "label", *answers, *columns])
        yield write


@contextlib.contextmanager
def _open_output(path):
    """Open standard output, or a file that gets its name at the end."""
    if not path:
        if hasattr(sys.stdout, "reconfigure"):  # absent in a notebook
            sys.stdout.reconfigure(errors="surrogateescape")
        yield sys.stdout
        return
    path = os.path.realpath(path)
    # A rename would replace /dev/null.
    is_file = os.path.isfile(path) or not os.path.exists(path)
    options = {"encoding": "utf-8", "errors": "surrogateescape"}
    with (
        store.aside(path) if is_file else contextlib.nullcontext(path) as target,
        open(target, "w", **options) as file,
    ):
        yield file


@contextlib.contextmanager
def create_features_file(path: str) -> Iterator[Write]:
    """Yield a function that adds a row per image to an `.npz` file, written at the end.

    The arrays are "features", "labels" and "names". OSError if the path is not of a
    file, such as /dev/null, which a rename would replace.
    """
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "is not a file")
    names: list[str] = []
    all_labels: list[int] = []
    shape: tuple[int, ...] = ()
    dtype = np.dtype(np.float32)
    with tempfile.TemporaryFile(dir=os.path.dirname(path)) as rows:

        def write(paths, labels, features):
            nonlocal shape, dtype
            shape, dtype = features.shape[1:], features.dtype
            names.extend(paths)
            all_labels.extend(labels)
            rows.write(features.tobytes())

        yield write
        if not names:
            return
        rows.flush()
        features = np.memmap(rows, dtype, "r", shape=(len(names), *shape))
        labels = np.array(all_labels, np.int64)
        with store.aside(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, features=features, labels=labels, names=names)


@contextlib.contextmanager
def errors_of_output(output: str) -> Iterator[None]:
    """Report errors of writing in a line; a closed pipe (`| head`) is the end."""
    try:
        yield
    except BrokenPipeError:
        # The exit flushes standard output once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit()
    except (OSError, UnicodeEncodeError) as error:
        path, why = output or "standard output", reason(error)
        raise ConfigError(f"{path}: cannot be written: {why}") from None
