"""The networks of `keras.applications`, rebuilt so that any strategy trains them.

Keras' own function builds a network; `_Clone` builds it again, layer by layer, with
layers of ours where Keras' would break a rule: batch normalization (synchronized or
not), dropout (whose noise is an input), and what has no name that stays the same. The
variables keep the names that they have in Keras, where those are explicit.
"""

import inspect
import sys
import warnings
from collections.abc import Callable

import keras
import numpy as np
from keras import layers

from towers.errors import ConfigError, nearest, one_line
from towers.models.automatic_names import snake_case, split_number
from towers.models.layers import BatchNormalization, Dropout, GroupedConv2D
from towers.models.stock_layers import LayerScale, ReverseChannels

REGULARIZERS = ("kernel_regularizer", "depthwise_regularizer", "pointwise_regularizer")


def create_model(
    *,
    name: str,
    image_shape: tuple[int, int, int],
    num_classes: int,
    regularizer: keras.regularizers.Regularizer | None,
) -> keras.Model:
    """A network of `keras.applications` with a head of so many classes, and without the
    softmax; its parameters are drawn.

    All kernels are marked for decay. Images come standardized by `pixel_moments`; what
    else the network does to pixels is part of it.

    Args:
        name: such as ResNet50.

    Raises:
        ConfigError: there is no such network, or it does not take the images, or it has
            a layer that breaks a rule.
    """
    function = find_function(name)
    check_channels(name, image_shape)
    try:
        stock = function(
            weights=None,
            input_shape=image_shape,
            classes=num_classes,
            classifier_activation=None,
        )
    except ValueError as error:
        raise ConfigError(f"model=keras:{name}: {one_line(error)}") from None
    images = keras.Input(image_shape, name="images")
    x = images
    if _moments(function)[2]:
        x = ReverseChannels(name="reverse_channels")(images)
    return _Clone(f"model=keras:{name}", stock, regularizer).build(images, x)


def find_function(name: str) -> Callable[..., keras.Model]:
    """The function of `keras.applications` that builds a network.

    Raises:
        ConfigError: there is none.
    """
    functions = dict(inspect.getmembers(keras.applications, inspect.isfunction))
    if name not in functions:
        raise ConfigError(
            f"model=keras:{name}: {nearest(name, functions)}keras.applications has "
            + ", ".join(functions)
        )
    return functions[name]


def check_channels(name: str, image_shape: tuple[int, int, int]) -> None:
    """Raises ConfigError where the images have no colors."""
    if image_shape[-1] != 3:
        raise ConfigError(
            f"model=keras:{name} takes images of 3 channels, not {image_shape[-1]}"
        )


def pixel_moments(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, red first, with which a network's images
    are standardized: the `preprocess_input` that Keras has for it.

    They are (0, 0, 0) and (1, 1, 1) where the network takes pixels as they are, which
    its own layers then rescale.

    Raises:
        ConfigError: there is no such network.
    """
    return _moments(find_function(name))[:2]


def pretrained(name: str) -> dict[str, np.ndarray]:
    """The variables that Keras has trained on ImageNet, with the head of 1000 classes,
    by their names in `create_model`. Keras fetches them once, into its own folder, and
    checks them.

    Raises:
        OSError: they are not there and cannot be fetched.
    """
    function = find_function(name)
    try:
        with warnings.catch_warnings():
            # Keras warns of the default size, which is meant.
            warnings.filterwarnings("ignore", "`input_shape` is undefined")
            stock = function(weights="imagenet")
    except Exception as error:  # that of a download, of no class of its own
        raise OSError(
            f"init_from=imagenet with model=keras:{name}: {one_line(error)}; give the "
            "file of the weights, --init_from=FILE.h5"
        ) from error
    names = _explicit_names(stock)
    return {
        f"{names[id(layer)]}/{_variable_name(layer, variable)}": variable.numpy()
        for layer in _all_operations(stock)
        for variable in getattr(layer, "variables", ())
        if "seed_generator" not in variable.path
    }


def _variable_name(layer, variable):
    return "gamma" if type(layer).__name__ == "LayerScale" else variable.name


def _moments(function):
    """Mean and standard deviation per channel, and whether blue comes first.

    Taken from the results of `preprocess_input`, which is linear.
    """
    preprocess = sys.modules[function.__module__].preprocess_input
    pixels = np.concatenate([np.zeros((1, 3)), np.eye(3)]).reshape(4, 1, 1, 3)
    results = np.asarray(preprocess(pixels.copy())).reshape(4, 3)
    offsets, slopes = results[0], results[1:] - results[0]
    is_reversed = bool(slopes[0, 0] == 0)
    if is_reversed:
        offsets, slopes = offsets[::-1], slopes[:, ::-1]
    scales = np.diag(slopes)
    mean, deviation = (0 - offsets) / scales, 1 / scales
    return tuple(mean.tolist()), tuple(deviation.tolist()), is_reversed


class _Clone:
    """Builds a network again, with other layers.

    Args:
        source: option and value, for messages.
        stock: the network as Keras builds it.
        regularizer: of all kernels.
    """

    def __init__(self, source, stock, regularizer):
        self._source, self._stock, self._regularizer = source, stock, regularizer
        self._names = _explicit_names(stock)
        self._noises, self._clones = [], {}

    def build(self, images, x):
        """The network from images to logits, x being what Keras' network takes."""
        logits = self._run(self._stock, x)
        inputs = [images, *self._noises] if self._noises else images
        model = keras.Model(inputs, logits, name=self._stock.name)
        for layer in model.layers:
            self._check(layer)
        return model

    def _run(self, model, x):
        # Keras' own traversal: the same that runs the model.
        return model._run_through_graph(x, operation_fn=self._visit)

    def _visit(self, operation):
        """What is called in place of an operation of Keras' network."""
        if isinstance(operation, keras.Sequential):
            return lambda x, **_: self._sequence(operation, x)
        if isinstance(operation, keras.Model):
            return lambda x, **_: self._run(operation, x)
        kind = type(operation).__name__
        if kind in ("Dropout", "StochasticDepth"):
            return lambda x, **_: self._drop(operation, x)
        if id(operation) not in self._clones:
            self._clones[id(operation)] = self._clone(operation)
        return self._clones[id(operation)]

    def _sequence(self, sequential, x):
        for layer in sequential.layers:
            x = self._visit(layer)(x)
        return x

    def _clone(self, operation):
        config = operation.get_config()
        if "name" in config:
            config["name"] = self._names[id(operation)]
        if not isinstance(operation, keras.Layer):
            return type(operation).from_config(config)
        config |= {key: self._regularizer for key in REGULARIZERS if key in config}
        if isinstance(operation, layers.BatchNormalization):
            return BatchNormalization.from_config(config)
        if type(operation) is layers.Conv2D and operation.groups > 1:
            return GroupedConv2D.from_config(config)
        if isinstance(operation, layers.Normalization) and not operation.variables:
            # Keras' keeps arrays on the CPU and can be adapted to other images.
            deviation = np.sqrt(np.asarray(operation.input_variance))
            offset = -np.asarray(operation.input_mean) / deviation
            return layers.Rescaling(
                list(1 / deviation),
                list(offset),
                dtype=config["dtype"],
                name=config["name"],
            )
        if type(operation).__name__ == "LayerScale":
            return LayerScale.from_config(config)
        return type(operation).from_config(config)

    def _drop(self, layer, x):
        """Dropout, whose noise is a new input."""
        config = layer.get_config()
        rate = config.get("rate", config.get("drop_path_rate"))
        if not rate:
            return x
        shape = x.shape[1:]
        if "drop_path_rate" in config:
            shape = (1,) * len(shape)
        elif config["noise_shape"]:
            pairs = zip(config["noise_shape"][1:], shape, strict=True)
            shape = tuple(size or whole for size, whole in pairs)
        name = self._names[id(layer)]
        self._noises.append(keras.Input(shape, name=f"{name}_noise"))
        return Dropout(rate, name=name)([x, self._noises[-1]])

    def _check(self, layer):
        """Refuses a layer that keeps a state that no strategy looks after."""
        is_normalization = isinstance(layer, BatchNormalization)
        if layer.non_trainable_variables and not is_normalization:
            names = ", ".join(v.name for v in layer.non_trainable_variables)
            raise ConfigError(
                f"{self._source}: layer {layer.name!r} ({type(layer).__name__}) keeps "
                f"{names}, which are no parameters; choose another --model"
            )


def _explicit_names(stock):
    """Operation's id -> its name; automatic ones, which Keras numbers on from network
    to network, are numbered as in the first network of a process."""
    operations, automatic = list(_all_operations(stock)), {}
    for operation in operations:
        stem, number = split_number(operation.name)
        if stem == snake_case(type(operation).__name__):
            automatic.setdefault(stem, []).append((number, operation))
    names = {id(operation): operation.name for operation in operations}
    for stem, numbered in automatic.items():
        numbered.sort(key=lambda pair: pair[0])
        for place, (_, operation) in enumerate(numbered):
            names[id(operation)] = f"{stem}_{place}" if place else stem
    return names


def _all_operations(model):
    """The operations of a network, in place of a network inside of it those of that."""
    is_sequence = isinstance(model, keras.Sequential)
    for operation in model.layers if is_sequence else model.operations:
        if isinstance(operation, keras.Model):
            yield from _all_operations(operation)
        else:
            yield operation
