"""Predictions as lines of text: a table, CSV or JSON."""

import csv
import json
import math
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np

from towers.data.sources import shown
from towers.errors import printable
from towers.evaluation.figures import softmax

FORMS = ("table", "csv", "json")

# Of the name of a class in the table.
MOST_CHARACTERS = 24


class Rows:
    """Writes a line for each image, at once for each batch.

    Args:
        stream: takes the text.
        form: "table"; "csv", with a header; "json", an object a line (JSON Lines),
            where a probability that is not a number is null.
        class_names: in the order of the logits.
        top: how many classes of an image, those with the largest logits.
    """

    def __init__(self, stream: TextIO, form: str, class_names: Sequence[str], top: int):
        self._stream, self._form, self._class_names = stream, form, class_names
        self._top = min(top, len(class_names))
        self._width = max(len(shown(name, MOST_CHARACTERS)) for name in class_names)
        self._csv = csv.writer(stream, lineterminator="\n")
        if form == "csv":
            places = range(1, self._top + 1)
            columns = [f"{x}_{n}" for n in places for x in ("class", "probability")]
            self._csv.writerow(["path", "label", *columns])

    def write(
        self, paths: Sequence[str], labels: Sequence[int], logits: np.ndarray
    ) -> None:
        """The lines of a batch.

        Args:
            paths: of the n images.
            labels: [n], -1 where there is none.
            logits: [n, num_classes].
        """
        order = np.argsort(-logits, axis=1, kind="stable")[:, : self._top]
        probabilities = np.take_along_axis(softmax(logits), order, 1)
        for path, label, classes, values in zip(
            paths, labels, order.tolist(), probabilities.tolist(), strict=True
        ):
            name = self._class_names[label] if label >= 0 else None
            names = [self._class_names[x] for x in classes]
            self._write(path, name, list(zip(names, values, strict=True)))
        self._stream.flush()

    def _write(self, path: str, label: str | None, best: list[tuple[str, Any]]):
        if self._form == "json":
            predictions = [
                {"class": x, "probability": None if math.isnan(p) else round(p, 6)}
                for x, p in best
            ]
            row = {"path": path, "label": label, "predictions": predictions}
            self._stream.write(f"{json.dumps(row)}\n")
        elif self._form == "csv":
            cells = [cell for x, p in best for cell in (x, f"{p:.6f}")]
            self._csv.writerow([path, label or "", *cells])
        else:
            cells = [
                f"{shown(x, MOST_CHARACTERS):{self._width}} {p:.4f}" for x, p in best
            ]
            self._stream.write(f"{'  '.join(cells)}  {printable(path)}\n")

    def finish(self) -> None:
        """Nothing is kept back."""
