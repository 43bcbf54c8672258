"""An output that gets its name when it is whole: a file, or a folder."""

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
from towers.evaluation.report import to_json
from towers.exporting.formats import Format
from towers.messages import one_line


def recover(output: pathlib.Path) -> None:
    """Give an export that was being replaced its name again; remove leftovers."""
    with contextlib.suppress(OSError):  # of a folder that cannot be written
        store.recover(output.parent, glob.escape(output.name))
        store.remove_leftovers(store.leftovers(output), "export", console.line)


def validate_output(output: pathlib.Path, format: Format, overwrite: bool) -> None:
    """Raise a ConfigError if an export may not be written at a path."""
    suffix, fault = format.suffix, ""
    is_export = not os.path.islink(output) and _is_export(output, format)
    if suffix and output.suffix != suffix:
        fault = f"its name must end with {suffix}"
    elif suffix in ("", ".tflite") and re.search(r"[\[\\]", str(output)):
        fault = "TensorFlow reads no SavedModel whose path has a bracket or a backslash"
        fault += "; choose another --output"
    elif os.path.isfile(output.parent):
        fault = f"{output.parent} is a file; choose another --output"
    elif is_export and not overwrite:
        fault = "it exists; --overwrite replaces it, --output names another"
    elif os.path.lexists(output) and not is_export:
        fault = "it is no such export; move it away or choose another --output"
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
    """Yield a temporary path that gets the output's name at the end; what no export
    wrote in a folder stays. After a DoubtfulExport it gets a new name in the folder
    `doubtful`, next to its figures. ExportError if the disk fails.
    """
    try:
        store.make_folders(output.parent)
    except OSError as error:
        why = f"{error.strerror}; choose another --output"
        raise ConfigError(f"{output} cannot be written: {why}") from None
    try:
        with store.aside(output) as path:
            try:
                yield path
            except DoubtfulExport as error:
                kept = _keep(path, output, figures | {"fault": str(error)})
                raise DoubtfulExport(f"{error}; kept as {kept}") from None
            validate_output(output, format, overwrite)  # minutes later
            kept = store.keep_others(output, path) if output.is_dir() else []
        for part in kept:
            console.line(f"{part} stays: no export wrote it")
    except (OSError, tf.errors.OpError) as error:
        if out_of_memory(error):
            raise
        reason = getattr(error, "strerror", None) or one_line(error, 200)
        free = store.free_space(output.parent)
        raise ExportError(f"{output} cannot be written: {reason}; {free}") from None


def _keep(path, output, figures):
    """Move a doubtful export to a path of its own; return it."""
    folder = output.parent / "doubtful"
    kept = store.free_name(folder / output.stem, output.suffix)
    store.make_folders(folder)
    store.replace(path, kept)
    store.write_aside(f"{kept}.json", to_json(figures))
    return kept
