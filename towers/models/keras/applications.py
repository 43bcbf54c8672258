"""The networks of `keras.applications`, rebuilt so that any strategy trains them."""

import inspect
import sys
import warnings
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from towers.config.preprocessing import IMAGENET_STD
from towers.errors import ConfigError, did_you_mean
from towers.messages import one_line
from towers.models.keras.networks import rebuild
from towers.models.layers.normalization import BatchNormalization, Normalization
from towers.models.variables import keras_settings

REGULARIZERS = ("kernel_regularizer", "depthwise_regularizer", "pointwise_regularizer")


def create_model(
    *,
    name: str,
    image_shape: tuple[int, int, int],
    num_classes: int,
    regularizer: keras.regularizers.Regularizer | None,
) -> keras.Model:
    """Build a network of `keras.applications` with logits; all kernels decay."""
    function = find_function(name)
    if image_shape[-1] != 3:
        why = f"takes images of 3 channels, not {image_shape[-1]}"
        raise ConfigError(f"model=keras:{name} {why}")
    try:
        stock = function(
            weights=None,
            input_shape=image_shape,
            classes=num_classes,
            classifier_activation=None,
        )
    except ValueError as error:
        raise ConfigError(f"model=keras:{name}: {one_line(error)}") from None
    is_reversed = _moments(function)[2]
    first = ReverseChannels(name="reverse_channels") if is_reversed else None
    source = f"model=keras:{name}"
    model = rebuild(source, stock, image_shape, num_classes, first)
    for layer in model.layers:
        _mark(layer, regularizer)
        _check(source, layer)
    return model


def _mark(layer, regularizer):
    for name in REGULARIZERS:
        if hasattr(layer, name):
            setattr(layer, name, regularizer)
    for variable in layer.trainable_variables:
        if variable.name.endswith("kernel"):
            variable.regularizer = regularizer


def _check(source, layer):
    """Refuse a layer with a state that strategies do not update."""
    state = [v.name for v in layer.non_trainable_variables]
    if state and not isinstance(layer, (BatchNormalization, Normalization)):
        why = f"keeps {', '.join(state)}, not parameters; choose another --model"
        kind = type(layer).__name__
        raise ConfigError(f"{source}: layer {layer.name!r} ({kind}) {why}")


class ReverseChannels(keras.layers.Layer):
    """Reverses the channels: RGB to BGR."""

    def call(self, inputs):
        return tf.reverse(inputs, [-1])


def find_function(name: str) -> Callable[..., keras.Model]:
    """Return the function of `keras.applications` that builds a network."""
    functions = dict(inspect.getmembers(keras.applications, inspect.isfunction))
    if name not in functions:
        hint = f"{did_you_mean(name, functions)}keras.applications has "
        raise ConfigError(f"model=keras:{name}: {hint}{', '.join(functions)}")
    return functions[name]


def pixel_moments(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation, red first, that `preprocess_input` uses."""
    return _moments(find_function(name))[:2]


def create_pretrained(name: str) -> keras.Model:
    """Build a network with its weights of ImageNet, which Keras fetches and caches."""
    function = find_function(name)
    try:
        with warnings.catch_warnings():
            # Keras warns of the default size.
            warnings.filterwarnings("ignore", "`input_shape` is undefined")
            stock = function(weights="imagenet", classifier_activation=None)
    except Exception as error:  # Keras raises no class of its own
        why = f"init_from=imagenet with model=keras:{name}: {one_line(error)}"
        raise OSError(f"{why}; give the file, --init_from=FILE.h5") from error
    shape, num_classes = stock.inputs[0].shape[1:], stock.outputs[0].shape[-1]
    return rebuild(f"model=keras:{name}", stock, shape, num_classes)


def correct_variances(name: str, state: dict[str, np.ndarray]) -> None:
    """Correct the input variances in Keras' weights of EfficientNetB0 to B7, in place.

    The file has standard deviations, and Keras divides by their roots once more, in a
    layer that it adds only with weights="imagenet" (issue 49930 of TensorFlow).
    """
    if not name.startswith("EfficientNetB"):
        return
    for key, values in state.items():
        is_variance = key.endswith("normalization/variance")
        if is_variance and np.allclose(values, IMAGENET_STD, atol=1e-3):
            state[key] = values**2


def _moments(function):
    """Return mean, standard deviation, and whether blue comes first."""
    preprocess = sys.modules[function.__module__].preprocess_input
    pixels = np.concatenate([np.zeros((1, 3)), np.eye(3)]).reshape(4, 1, 1, 3)
    with keras_settings():
        results = np.asarray(preprocess(pixels.copy())).reshape(4, 3)
    offsets, slopes = results[0], results[1:] - results[0]
    is_reversed = bool(slopes[0, 0] == 0)
    if is_reversed:
        offsets, slopes = offsets[::-1], slopes[:, ::-1]
    scales = np.diag(slopes)
    mean, std = (0 - offsets) / scales, 1 / scales
    return tuple(mean.tolist()), tuple(std.tolist()), is_reversed
