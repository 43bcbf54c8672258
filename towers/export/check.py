"""What an export gives in a new process, compared with the trainer's network."""

import os
import pathlib
import subprocess
import sys

import numpy as np

from towers.errors import ExportError, one_line, printable

SMALLEST_SCALE = 0.01
_PROGRAM = pathlib.Path(__file__).with_name("outside.py")


def predict(
    format: str, path: pathlib.Path, images: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The logits of an export, and the names of the classes in it.

    It is loaded by its own runtime in a new process that imports no towers.

    Args:
        format: in FORMATS.
        path: of the export; images and logits are stored next to it for a moment.
        images: uint8 [n, height, width, channels].

    Returns:
        Floats [n, classes], and the names, `printable`.

    Raises:
        ExportError: it cannot be loaded there.
    """
    given, result = path.with_name("images.npy"), path.with_name("logits.npz")
    np.save(given, images)
    # Without the folder of the program on its path, whose modules are named alike.
    command = [sys.executable, "-P", str(_PROGRAM), format, path, given, result]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        check=False,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["?"]
        raise ExportError(
            f"the {format} export cannot be used, so it is removed; in a new process "
            f"it ends with {one_line(lines[-1], 200)} (exit {done.returncode})"
        )
    with np.load(result, allow_pickle=False) as values:
        logits, names = values["logits"], values["class_names"].tolist()
    for file in (given, result):
        file.unlink()
    return logits, tuple(map(printable, names))


def largest_difference(logits: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference of a logit, as a share of the largest expected one, or of
    SMALLEST_SCALE where that is larger; infinity where one is no number."""
    if logits.shape != expected.shape or not np.all(np.isfinite(logits)):
        return float("inf")
    scale = max(SMALLEST_SCALE, float(np.abs(expected).max(initial=0.0)))
    return float(np.abs(logits - expected).max(initial=0.0)) / scale
