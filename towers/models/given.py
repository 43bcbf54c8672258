"""Networks that a Python program gives as Keras models."""

import json
import pathlib
import re
import zlib
from concurrent.futures import ThreadPoolExecutor

import keras

from towers.config import factories
from towers.errors import ConfigError
from towers.models.keras_networks import IMAGES, is_network

# Names that Keras numbers through a process, of what `rebuild` takes apart.
_NUMBERED = re.compile(r'"(functional|sequential|input_layer)_[0-9]+"')

_REGULARIZERS = "kernel_regularizer", "depthwise_regularizer", "pointwise_regularizer"


def give(model: keras.Model) -> tuple[str, str]:
    """Makes a Keras model, Functional or Sequential, a network of `--model`.

    The network has the weights of the model, which itself stays as it is.

    Returns:
        The value of the option, and the architecture in JSON, for `give_stored`.

    Raises:
        ConfigError: it is no such model.
    """
    if not isinstance(model, keras.Model) or not is_network(model):
        raise ConfigError(
            f"model is {type(model).__name__}; give a Functional model, "
            "keras.Model(inputs, outputs), or a keras.Sequential"
        )
    # A Sequential without an Input may hold layers with weights before it has any.
    weights = [layer.get_weights() for layer in model.layers]

    def create(regularizer=None):
        network = _copy(model, regularizer)
        for layer, ours, values in zip(
            model.layers, network.layers, weights, strict=True
        ):
            if values and not ours.built:
                ours.build_from_config(layer.get_build_config())
            ours.set_weights(values)
        return network

    with ThreadPoolExecutor(1) as thread:  # where Keras' numbers begin anew
        network = thread.submit(create).result()
    settings = json.loads(_NUMBERED.sub(r'"\1"', network.to_json()))
    architecture = json.dumps(settings, sort_keys=True)
    name = factories.given_name(zlib.crc32(architecture.encode()))
    factories.give("model", name, create)
    return name, architecture


def give_stored(name: str, path: pathlib.Path) -> None:
    """Makes an architecture in a file a network, without weights, where no model was
    given by this name."""

    def create(regularizer=None):
        try:
            model = keras.models.model_from_json(path.read_text())
        except OSError as error:
            raise ConfigError(f"model={name}: {path}: {error.strerror}") from None
        except (KeyError, TypeError, ValueError) as error:
            words = str(error).partition(". ")[0]
            raise ConfigError(
                f"{path}: {words}. Import the module that registers it before"
            ) from None
        return _copy(model, regularizer)

    if not factories.is_given("model", name):
        factories.give("model", name, create)


def _copy(model, regularizer):
    """A copy whose layers take the regularizer for kernels that have none, the policy
    of types of the process, and names without the numbers that Keras gives."""

    def copy(layer):
        settings = layer.get_config()
        name = keras.src.utils.naming.to_snake_case(type(layer).__name__)
        if re.fullmatch(rf"{name}(_\d+)?", settings.get("name", "")):
            del settings["name"]
        policy = getattr(layer, "dtype_policy", None)  # an operation has none
        if policy and policy.name == "float32":
            settings.pop("dtype", None)
        for key in _REGULARIZERS:
            if regularizer and key in settings and settings[key] is None:
                settings[key] = regularizer
        return type(layer).from_config(settings)

    def images(x):
        return keras.Input(x.shape[1:], dtype=x.dtype, name=IMAGES)

    inputs = None
    if getattr(model, "built", False) and len(model.inputs) == 1:
        is_sequential = isinstance(model, keras.Sequential)
        inputs = model.inputs[0] if is_sequential else model.input
        inputs = keras.tree.map_structure(images, inputs)
    return keras.models.clone_model(model, inputs, clone_function=copy, recursive=True)
