"""An output that gets its name when it is whole: a file, or a folder."""

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

import tensorflow as tf

from towers.errors import ConfigError, ExportError, one_line, out_of_memory
from towers.run import files

# In every folder that may be replaced.
SAVED_MODEL = "saved_model.pb"


def check_output(output: pathlib.Path, suffix: str, overwrite: bool) -> None:
    """Refuses a path where an export may not be written.

    Args:
        output: of the export.
        suffix: of its name; empty for a folder.
        overwrite: whether an earlier export may be replaced.

    Raises:
        ConfigError: something stands there.
    """
    if suffix and output.suffix != suffix:
        raise ConfigError(f"output={output}: its name must end with {suffix}")
    if not output.name:
        raise ConfigError(f"output={output}: names no file; give it a name")
    if suffix in ("", ".tflite") and files.has_pattern(output):
        raise ConfigError(
            f"output={output}: TensorFlow does not read a SavedModel, here or "
            "elsewhere, where a name has a bracket or a backslash; choose another "
            "--output"
        )
    try:
        kind, kind_above = files.kind(output), files.kind(output.parent)
        is_export = kind == ("a file" if suffix else "a folder")
        if is_export and not suffix:
            is_export = files.kind(output / SAVED_MODEL) == "a file"
    except OSError as error:
        raise ConfigError(
            f"output={output}: {error.strerror or error}; choose another --output"
        ) from None
    if kind is None and kind_above not in (None, "a folder", "a symbolic link"):
        raise ConfigError(
            f"output={output}: {output.parent} is {kind_above}; choose another --output"
        )
    if kind is None or (is_export and overwrite):
        return
    if is_export:
        raise ConfigError(
            f"{output} exists; --overwrite replaces it, --output names another"
        )
    raise ConfigError(
        f"{output} is {kind} and no such export, so it is not replaced; move it "
        "away or choose another --output"
    )


@contextlib.contextmanager
def staged(output: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path next to the output, to write to; what stands there at the end without an
    error is flushed to the disk and gets the name of the output.

    It is in a folder `.tmp-NAME-PID`, which is removed in any case, except if the
    process is killed.

    Raises:
        ConfigError: the folder cannot be made.
    """
    folder = output.with_name(f".tmp-{output.name}-{os.getpid()}")
    try:
        files.make_folders(output.parent)
        files.remove(folder)  # of a killed process with the same id
        os.mkdir(folder)
    except OSError as error:
        raise ConfigError(
            f"{output} cannot be written: {error.strerror or error}; choose another "
            "--output"
        ) from None
    path = folder / output.name
    try:
        yield path
        with writing(output):
            _commit(path, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def writing(output: pathlib.Path) -> Iterator[None]:
    """Errors of the disk inside are an ExportError."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        if out_of_memory(error):
            raise
        reason = getattr(error, "strerror", None) or one_line(error, 200)
        raise ExportError(
            f"{output} cannot be written: {reason}; "
            f"{files.free_bytes(output.parent)} bytes are free there"
        ) from None


def _commit(path, output):
    for folder, _, names in os.walk(path):
        for name in names:
            files.sync(pathlib.Path(folder, name))
        files.sync(pathlib.Path(folder))
    if not path.is_dir():
        files.sync(path)
    replaced = path.with_name(f"replaced-{path.name}")
    try:
        if path.is_dir() and files.kind(output) is not None:
            os.rename(output, replaced)  # a folder is not replaced in one piece
        os.rename(path, output)
    except BaseException:
        if files.kind(replaced) is not None and files.kind(output) is None:
            os.rename(replaced, output)
        raise
    files.sync(output.parent)
