"""A file or folder that gets its name when it is complete."""

import contextlib
import glob
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from towers import console, store
from towers.errors import ConfigError, DoubtfulExport, ExportError, out_of_memory
from towers.exporting.formats import Format
from towers.messages import one_line
from towers.metrics.results import to_json


def recover(output: pathlib.Path) -> None:
    """Restore an export that was being replaced, and remove leftovers."""
    with contextlib.suppress(OSError):
        store.recover(output.parent, glob.escape(output.name))
        store.remove_leftovers(store.leftovers(output), "export", console.line)


def validate_output(output: pathlib.Path, format: Format, overwrite: bool) -> None:
    """Raise a ConfigError if an export may not be written at a path."""
    suffix, fault = format.suffix, ""
    is_export = not os.path.islink(output) and _is_export(output, format)
    if suffix and output.suffix != suffix:
        fault = f"its name must end with {suffix}"
    elif suffix in ("", ".tflite") and re.search(r"[\[\\]", str(output)):
        fault = "TensorFlow cannot read a SavedModel in a path with a bracket or a "
        fault += "backslash; choose another --output"
    elif os.path.isfile(output.parent):
        fault = f"{output.parent} is a file; choose another --output"
    elif is_export and not overwrite:
        fault = "it exists; --overwrite replaces it, --output names another"
    elif os.path.lexists(output) and not is_export:
        fault = "it is not such an export; move it away or choose another --output"
    if fault:
        raise ConfigError(f"output={output}: {fault}")


def _is_export(output, format):
    file = output if format.suffix else output / "saved_model.pb"
    if not os.path.isfile(file):
        return False
    content = file.read_bytes()
    return all(mark in content for mark in format.marks)


@contextlib.contextmanager
def staged(
    output: pathlib.Path, format: Format, overwrite: bool, figures: Mapping[str, Any]
) -> Iterator[pathlib.Path]:
    """Yield a temporary path that gets the output's name at the end."""
    try:
        store.make_folders(output.parent)
    except OSError as error:
        reason = f"{error.strerror}; choose another --output"
        raise ConfigError(f"{output} cannot be written: {reason}") from None
    try:
        with store.aside(output) as path:
            try:
                yield path
            except DoubtfulExport as error:
                kept = _keep(path, output, {**figures, "fault": str(error)})
                raise DoubtfulExport(f"{error}; kept as {kept}") from None
            validate_output(output, format, overwrite)  # again, minutes later
            others = store.keep_others(output, path) if output.is_dir() else []
        for part in others:
            console.line(f"{part} stays: no export wrote it")
    except (OSError, tf.errors.OpError) as error:
        if out_of_memory(error):
            raise
        reason = getattr(error, "strerror", None) or one_line(error, 200)
        free = store.free_space(output.parent)
        raise ExportError(f"{output} cannot be written: {reason}; {free}") from None


def _keep(path, output, figures):
    """Move a doubtful export to a new path; return it."""
    folder = output.parent / "doubtful"
    kept = store.free_name(folder / output.stem, output.suffix)
    store.make_folders(folder)
    store.replace(path, kept)
    store.write_aside(f"{kept}.json", to_json(figures))
    return kept
