"""Networks passed to Python functions as Keras models."""

import collections
import json
import pathlib
import re
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np

from towers import console
from towers.config import factories
from towers.errors import ConfigError
from towers.keras_internals import layers_of
from towers.messages import one_line
from towers.models.keras.applications import REGULARIZERS
from towers.models.keras.networks import IMAGES, is_network

# Automatic names, which Keras numbers through a process, of parts `rebuild` flattens.
_NUMBERED = re.compile(r'"(functional|sequential|input_layer)(_[0-9]+)?"')

# Values of --model whose weights are only in checkpoints.
_without_weights: set[str] = set()


def give(model: keras.Model) -> tuple[str, str]:
    """Register a copy of a model; return its value of `--model` and its JSON."""
    if not isinstance(model, keras.Model) or not is_network(model):
        way = "give a Functional model, keras.Model(inputs, outputs), or a Sequential"
        raise ConfigError(f"model is {type(model).__name__}; {way}")
    weights = {id(x): x.get_weights() for x in layers_of(model)}

    def create(regularizer=None):
        return _copy(model, regularizer, lambda layer: weights[id(layer)])

    with ThreadPoolExecutor(1) as thread:  # in a new thread numbers begin anew
        network = thread.submit(create).result()
    architecture = json.loads(_numbered_anew(network.to_json()))
    architecture = json.dumps(architecture, sort_keys=True)
    try:
        _from_json(architecture)
    except (KeyError, TypeError, ValueError) as error:
        way = "register its class with keras.saving.register_keras_serializable"
        why = f"only this program can use the network: {_first_sentence(error)}"
        console.warn(f"{why}; {way}")
    name = factories.given_name(zlib.crc32(architecture.encode()))
    factories.give("model", name, create)
    _without_weights.discard(name)
    return name, architecture


def _from_json(text):
    with warnings.catch_warnings():  # layers may create their variables when called
        warnings.filterwarnings("ignore", ".*does not have a `build")
        return keras.models.model_from_json(text)


def _numbered_anew(text):
    names, counts = {}, collections.Counter()
    for match in _NUMBERED.finditer(text):
        if match[0] not in names:
            stem, count = match[1], counts[match[1]]
            names[match[0]] = f'"{stem}_{count}"' if count else f'"{stem}"'
            counts[stem] += 1
    return _NUMBERED.sub(lambda match: names[match[0]], text)


def give_stored(name: str, path: pathlib.Path) -> None:
    """Register the architecture in a file as a network, unless the name is known."""

    def create(regularizer=None):
        try:
            model = _from_json(path.read_text())
        except OSError as error:
            raise ConfigError(f"model={name}: {path}: {error.strerror}") from None
        except (KeyError, TypeError, ValueError) as error:
            way = "Import the module that registers it before"
            raise ConfigError(f"{path}: {_first_sentence(error)}. {way}") from None
        return _copy(model, regularizer, lambda layer: [])

    if not factories.is_given("model", name):
        factories.give("model", name, create)
        _without_weights.add(name)


def has_weights(name: str) -> bool:
    """Return whether the model of this name was registered in this process."""
    return factories.is_given("model", name) and name not in _without_weights


def _copy(model, regularizer, weights_of):
    """Copy a model, with a regularizer for kernels that have none, and new numbers."""
    copies = []

    def copy(layer):
        ours = _copy_layer(layer, regularizer)
        if isinstance(layer, keras.Layer):
            copies.append((layer, ours))
        return ours

    def images(x):
        return keras.Input(x.shape[1:], dtype=x.dtype, name=IMAGES)

    inputs = None
    if getattr(model, "built", False) and len(model.inputs) == 1:
        is_sequential = isinstance(model, keras.Sequential)
        inputs = model.inputs[0] if is_sequential else model.input
        inputs = keras.tree.map_structure(images, inputs)
    ours = keras.models.clone_model(model, inputs, clone_function=copy, recursive=True)
    for layer, its_copy in copies:  # some create their variables when they are called
        values = weights_of(layer)
        if values and not isinstance(layer, keras.layers.Normalization):
            _set_weights(its_copy, layer, values)
    return ours


def _copy_layer(layer, regularizer):
    """Copy a layer by its configuration or by the arguments that Keras has recorded."""
    try:
        settings = _settings(layer, layer.get_config(), regularizer)
        return type(layer).from_config(settings)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        recorded = getattr(layer, "_auto_config", None)
        if recorded is None:
            raise _refusal(layer, error) from None

    settings = {"name": layer.name} | recorded.config
    settings = _settings(layer, settings, regularizer)
    try:
        ours = type(layer)(**settings)
    except (TypeError, ValueError) as error:
        raise _refusal(layer, error) from None
    ours.get_config = lambda: settings  # for the stored architecture
    return ours


def _refusal(layer, error):
    hint = "give it a get_config with the arguments of its constructor"
    if isinstance(layer, keras.layers.Lambda):
        hint = "write the function as a layer of your own, or with keras.ops"
    # Keras puts the whole configuration before the reason.
    return _uncopied(layer, str(error).rpartition("Exception encountered: ")[2], hint)


def _uncopied(layer, error, hint):
    begin = f"model: layer {layer.name!r} ({type(layer).__name__}) cannot be copied"
    return ConfigError(f"{begin}, {_first_sentence(error)}; {hint}")


def _set_weights(ours, layer, values):
    """Set the weights of a layer's copy, which may not have been called."""
    try:
        if not ours.built:
            ours.build_from_config(layer.get_build_config())
        ours.set_weights(values)
    except ValueError as error:
        hint = "have its constructor or build create its variables, and the same ones "
        raise _uncopied(layer, error, f"{hint}for the same arguments") from None


def _settings(layer, settings, regularizer):
    class_name = type(layer).__name__.lower()
    automatic = re.sub(r"_[0-9]+$", "", layer.name).replace("_", "")
    if automatic == class_name:
        settings.pop("name", None)
    policy = getattr(layer, "dtype_policy", None)  # an operation has none
    if policy and policy.name == "float32":
        settings.pop("dtype", None)
    is_normalization = isinstance(layer, keras.layers.Normalization)
    if is_normalization and layer.built and layer.input_mean is None:  # it was adapted
        settings["mean"] = np.array(layer.adapt_mean)
        settings["variance"] = np.array(layer.adapt_variance)
    for key in REGULARIZERS:
        if regularizer and key in settings and settings[key] is None:
            settings[key] = regularizer
    return settings


def _first_sentence(error):
    return one_line(error).partition(". ")[0]
