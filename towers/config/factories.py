"""Import and call of the function or class of a choice.

The keyword arguments that its signature names are the options that it reads.
"""

import contextlib
import functools
import importlib
import importlib.machinery
import inspect
import os
import pathlib
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any

from towers.config.choices import find, target_of
from towers.errors import ConfigError, TowersError, out_of_memory, with_nearest
from towers.messages import one_line

_loaded_files: set[str] = set()

# (option, name) -> factory of what a Python program gave. They may be large, so only
# the last ones are kept, of data those for a training and an evaluation.
_given: dict[tuple[str, str], Callable] = {}
_MAX_GIVEN = {"dataset": 2, "model": 4}


def given_name(checksum: int) -> str:
    """Return the value of an option for an object with a CRC-32."""
    return f"given:{checksum:08x}"


def give(option: str, name: str, factory: Callable[..., Any]) -> None:
    """Let a value of an option stand for what a factory makes, in this process."""
    _given.pop((option, name), None)  # it becomes the last one
    _given[option, name] = factory
    keys = [key for key in _given if key[0] == option]
    for key in keys[: -_MAX_GIVEN[option]]:
        del _given[key]


def is_given(option: str, name: str) -> bool:
    """Return whether the value of an option stands for an object of this process."""
    return (option, name) in _given


def asks_for(option: str, name: str) -> ConfigError:
    """Return the error if a Python program must give the value of an option again."""
    call = "train(workdir, config, model=...)"
    if option == "dataset":
        call = "train(workdir, config, data=...) or evaluate(workdir, data=...)"
    way = f"give it once more, as in {call}"
    return ConfigError(f"{option}={name}: a Python program gave it; {way}")


def create(option: str, name: str, /, **available: Any) -> Any:
    """Call the target of a choice with the arguments that its signature names."""
    return call(resolve(option, name), **available)


def resolve(option: str, name: str) -> Callable[..., Any]:
    """Import the function of a choice; return it with its row's arguments."""
    choice = find(option, name)
    if choice.is_given:
        if not is_given(option, name):
            raise asks_for(option, name)
        return _given[option, name]
    place, _, attribute = target_of(option, name).rpartition(":")
    if choice.is_in_a_file:
        return function_in_file(pathlib.Path(place), attribute, f"{option}={name}")
    target = getattr(importlib.import_module(f"towers.{place}"), attribute)
    return functools.partial(target, **choice.options)


def function_in_file(path: pathlib.Path, name: str, option: str = "") -> Callable:
    """Return a function in a user's file, whose errors become ConfigErrors."""
    begin = f"{option}: " if option else ""
    if not os.path.isfile(path):
        raise ConfigError(f"{begin}no such file: {path.absolute()}")
    with _errors_in_one_line(begin, path):
        module = _load_file(path.resolve(), path.stat().st_mtime_ns)
        # Also of a module with a `__getattr__` of its own.
        function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, value in vars(module).items() if callable(value)]
        message = f"{begin}{path} has no function {name!r}"
        raise ConfigError(with_nearest(message, name, functions))
    return _errors_in_one_line(begin, path)(function)


def call(target: Callable[..., Any], /, **available: Any) -> Any:
    """Call a function with the available arguments that its signature names."""
    return target(**named_by(target, available))


def named_by(target: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the available arguments that a function's signature names."""
    names = argument_names(target)
    return {k: v for k, v in options.items() if names is None or k in names}


def argument_names(target: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the keyword arguments that a signature leaves open; None for any."""
    parameters = inspect.signature(target).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    fixed = getattr(target, "keywords", {})
    return tuple(p.name for p in parameters if p.name not in fixed)


def required_names(target: Callable[..., Any]) -> set[str]:
    """Return the arguments of a function that have no default."""
    parameters = inspect.signature(target).parameters.values()
    return {p.name for p in parameters if p.default is p.empty}


@functools.cache
def _load_file(path: pathlib.Path, changed_ns: int) -> types.ModuleType:
    """Return the module of a file, executed once per change."""
    name = f"towers_file_{path.stem}_{abs(hash(path)):x}"
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    module = types.ModuleType(name)
    module.__file__ = str(path)
    _loaded_files.add(str(path))
    # Dataclasses look their module up by its name.
    sys.modules[name] = module
    folder = str(path.parent)  # it may import its neighbors
    sys.path.insert(0, folder)
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    finally:
        with contextlib.suppress(ValueError):  # the file may have removed it
            sys.path.remove(folder)
    return module


@contextlib.contextmanager
def _errors_in_one_line(begin, path):
    """Raise errors that name the line of the user's file."""
    try:
        yield
    except TowersError as error:
        where = begin or f"{_line_of_error(path, error)}: "
        error.args = (f"{where}{error}",)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        where, what = _line_of_error(path, error), type(error).__name__
        raise ConfigError(f"{begin}{where}: {what}: {one_line(error)}") from error


def foreseen(error: BaseException, more_memory: str) -> BaseException:
    """Return an error of a user's file, or of memory, as a ConfigError.

    Its message ends with `more_memory`, the way to use less. Others are unchanged.
    """
    if isinstance(error, TowersError):
        return error
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in _loaded_files:
            place = f"{frame.filename}:{frame.lineno}"
            return ConfigError(f"{place}: {type(error).__name__}: {one_line(error)}")
    if isinstance(error, FileNotFoundError) and not os.stat(os.curdir).st_nlink:
        return ConfigError("the current folder was removed; change to another one (cd)")
    if no_memory := out_of_memory(error):
        return ConfigError(f"{no_memory}; {more_memory}")
    return error


def _line_of_error(path: pathlib.Path, error: BaseException) -> str:
    """Return FILE:LINE of a user's file that an error came from, or FILE alone."""
    frames = traceback.extract_tb(error.__traceback__)
    files = (str(path), str(path.resolve()))
    lines = [frame.lineno for frame in frames if frame.filename in files]
    if isinstance(error, SyntaxError) and error.filename in files:
        lines = [error.lineno]
    return f"{path}:{lines[-1]}" if lines else str(path)
