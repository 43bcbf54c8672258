"""The networks of `keras.applications`, rebuilt so that any strategy trains them.

The variables keep the names that they have in Keras.
"""

import inspect
import sys
import warnings
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from towers.config.preprocessing import IMAGENET_STD
from towers.errors import ConfigError, nearest
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
    """A network of `keras.applications` with a head of `num_classes`, and without the
    softmax; its parameters are drawn.

    All kernels are marked for decay. Images come standardized by `pixel_moments`; what
    else the network does to pixels is part of it.
    """
    function = find_function(name)
    if image_shape[-1] != 3:
        raise ConfigError(
            f"model=keras:{name} takes images of 3 channels, not {image_shape[-1]}"
        )
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
    """Marks the kernels of a layer for decay."""
    for name in REGULARIZERS:
        if hasattr(layer, name):
            setattr(layer, name, regularizer)
    for variable in layer.trainable_variables:
        if variable.name.endswith("kernel"):
            variable.regularizer = regularizer


def _check(source, layer):
    """Refuses a layer that keeps a state that no strategy looks after."""
    state = [v.name for v in layer.non_trainable_variables]
    if state and not isinstance(layer, (BatchNormalization, Normalization)):
        raise ConfigError(
            f"{source}: layer {layer.name!r} ({type(layer).__name__}) keeps "
            f"{', '.join(state)}, which are no parameters; choose another --model"
        )


class ReverseChannels(keras.layers.Layer):
    """Images [n, height, width, channels] with the last channel first: RGB as BGR."""

    def call(self, inputs):
        return tf.reverse(inputs, [-1])


def find_function(name: str) -> Callable[..., keras.Model]:
    """The function of `keras.applications` that builds a network; or a ConfigError."""
    functions = dict(inspect.getmembers(keras.applications, inspect.isfunction))
    if name not in functions:
        raise ConfigError(
            f"model=keras:{name}: {nearest(name, functions)}keras.applications has "
            + ", ".join(functions)
        )
    return functions[name]


def pixel_moments(name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, red first, with which a network's images
    are standardized: the `preprocess_input` that Keras has for it.

    They are (0, 0, 0) and (1, 1, 1) where the network takes pixels, which its own
    layers rescale.
    """
    return _moments(find_function(name))[:2]


def create_pretrained(name: str) -> keras.Model:
    """The network that Keras has trained on ImageNet, with the head of 1000 classes.
    Keras fetches its weights once, into its own folder, and checks them.
    """
    function = find_function(name)
    try:
        with warnings.catch_warnings():
            # Keras warns of the default size, which is meant.
            warnings.filterwarnings("ignore", "`input_shape` is undefined")
            stock = function(weights="imagenet", classifier_activation=None)
    except Exception as error:  # a download's, of no class of its own
        raise OSError(
            f"init_from=imagenet with model=keras:{name}: {one_line(error)}; give the "
            "file of the weights, --init_from=FILE.h5"
        ) from error
    shape, num_classes = stock.inputs[0].shape[1:], stock.outputs[0].shape[-1]
    return rebuild(f"model=keras:{name}", stock, shape, num_classes)


def correct_variances(name: str, state: dict[str, np.ndarray]) -> None:
    """Corrects the input variances in Keras' weights of EfficientNetB0 to B7. In the
    file they are standard deviations, and Keras divides by their roots once more, in a
    layer that it adds with weights="imagenet" alone (issue 49930 of TensorFlow).
    `state`, name -> array, is changed.
    """
    for key, values in state.items():
        if name.startswith("EfficientNetB") and key.endswith("normalization/variance"):
            if np.allclose(values, IMAGENET_STD, atol=1e-3):
                state[key] = values**2


def _moments(function):
    """Mean and standard deviation per channel, and whether blue comes first.

    Taken from the results of `preprocess_input`, which is linear.
    """
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
