"""Creates networks: single-device Keras Functional models of named layers.

A network knows no device, seed or precision: `create_model` settles these for all of
them. Weight decay is the `kernel_regularizer` of the layers that a network marks.
"""

from collections.abc import Callable, Iterator

import keras
import numpy as np

from towers.config import choices, factories
from towers.errors import ConfigError, did_you_mean
from towers.keras_internals import last_inputs, layers_of
from towers.models.keras import applications
from towers.models.keras.networks import IMAGES, rebuild
from towers.models.keras.noise import WithNoise
from towers.models.layers.blocks import Builder
from towers.models.layers.core import Dropout
from towers.models.layers.device import set_device_kind
from towers.models.layers.normalization import BatchNormalization, is_frozen
from towers.models.variables import build_network

POLICIES = {
    "float32": "float32",
    "float64": "float64",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}


def create_model(
    name: str,
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    width: float = 1.0,
    dropout: float = 0.0,
    stochastic_depth: float = 0.0,
    weight_decay: float = 0.0,
    precision: str = "float32",
    seed: int = 0,
    device_kind: str = "CPU",
) -> keras.Model:
    """Build a network on the CPU with parameters that depend on the seed alone.

    `name` is in `towers.config.networks.MODELS`, whose functions take a `Builder`, or
    FILE.py:FUNCTION with some of the keyword arguments image_shape (height, width,
    channels), num_classes, width, dropout, stochastic_depth, and regularizer (of
    kernels that decay). `weight_decay` is the coefficient of half the sum of squares of
    these kernels. `precision` is a key of POLICIES; with 16 bits parameters are
    float32. On another `device_kind`, CPU or GPU, the network is only slower.

    Returns:
        A Functional model from images [n, *image_shape] (and one noise tensor per
        dropout layer) to logits [n, num_classes].

    Raises:
        ConfigError: the network is unknown, the images are too small for it, or it is
            in a file and cannot be trained.
    """
    decay = keras.regularizers.L2(0.5 * weight_decay) if weight_decay else None

    choice = choices.find("model", name)
    is_own = choice.is_in_a_file or choice.is_given

    def create():
        function = factories.resolve("model", name)
        rates = {"dropout": dropout, "stochastic_depth": stochastic_depth}
        if is_own:  # its own defaults count if an option is not set
            needed = factories.required_names(function)
            rates = {k: v for k, v in rates.items() if v or k in needed}
        shared = {"image_shape": image_shape, "num_classes": num_classes}
        shared |= {"width": width, "regularizer": decay}
        builders = {} if is_own else {"build": Builder(**shared)}
        model = factories.call(function, **builders, **shared, **rates)
        if is_own:
            source = "model" if choice.is_given else f"model={name}"
            model = rebuild(source, model, image_shape, num_classes)
        return model

    model = build_network(create, seed, POLICIES[precision])
    set_device_kind(model, device_kind)
    return model


def head_layers(model: keras.Model) -> list[str]:
    """Return the names of the layers after the last global pooling, if any."""
    names = [layer.name for layer in model.layers]
    pools = [
        place
        for place, layer in enumerate(model.layers)
        if "Global" in type(layer).__name__ and "block" not in layer.name
    ]
    return names[pools[-1] + 1 :] if pools else []


def normalization_parameters(model: keras.Model) -> frozenset[str]:
    """Return the names of the scales and offsets of batch normalization."""
    return frozenset(
        variable.path
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        for variable in layer.trainable_variables
    )


def freeze_normalization(
    model: keras.Model, frozen: frozenset[str], everywhere: bool = False
) -> None:
    """Freeze batch normalization whose parameters are all `frozen`, or all of it."""
    for layer in layers_of(model):
        if not isinstance(layer, keras.layers.BatchNormalization) or is_frozen(layer):
            continue
        names = {variable.path for variable in layer.trainable_variables}
        if not everywhere and not (names and names <= frozen):
            continue
        if not isinstance(layer, BatchNormalization):
            option = "batch_norm=frozen" if everywhere else "freeze"
            why = f"the moving averages of layer {layer.name!r} cannot be frozen"
            way = "make it a keras.layers.BatchNormalization"
            raise ConfigError(f"{option}: {why}; {way}")
        layer.is_frozen = True


def adapt(model: keras.Model, images: Callable[[], Iterator[np.ndarray]]) -> None:
    """Adapt layers such as whitening, but not Keras' own, to augmented images."""
    for layer in model.layers:
        method = getattr(type(layer), "adapt", None)
        if method and not method.__module__.startswith("keras."):
            layer.adapt(images())


def pixel_moments(name: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the moments of pixels that a network expects; None for the data set's."""
    choice = choices.find("model", name)
    if choice.has_standardization:
        return applications.pixel_moments(choice.options["name"])
    return None


def rescales_images(model: keras.Model) -> bool:
    """Return whether the first layer of a network rescales or normalizes images."""
    kinds = keras.layers.Rescaling, keras.layers.Normalization
    inner = (x for x in model.layers if not isinstance(x, keras.layers.InputLayer))
    return isinstance(next(inner, None), kinds)


def pretrained(name: str) -> dict[str, np.ndarray]:
    """Return Keras' ImageNet variables of keras:NAME; OSError if they are missing."""
    name = choices.find("model", name).options["name"]
    model = build_network(lambda: applications.create_pretrained(name))
    return {variable.path: variable.numpy() for variable in model.variables}


def noise_shapes(model: keras.Model) -> dict[str, tuple[int, ...]]:
    """Return the noise inputs: per dropout layer, name -> shape for one image."""
    return {x.name: tuple(x.shape[1:]) for x in model.inputs if x.name != IMAGES}


def without_noise(model: keras.Model, layer: str = "") -> keras.Model:
    """Return the network for inference, from images to logits or a layer's output."""
    if len(model.inputs) == 1 and not layer:
        return model
    outputs = {}

    def call(operation, inputs, *args, **kwargs):
        if isinstance(operation, Dropout):
            return inputs[0]
        if isinstance(operation, WithNoise):
            output = operation.call_of(operation.layer, inputs)
        else:
            output = operation(inputs, *args, **kwargs)
        outputs[operation.name] = output
        return output

    # `layer.output` may be of another network that the layer is part of as well.
    clone = keras.models.clone_model(
        model,
        input_tensors=model.input,
        clone_function=lambda layer: layer,
        call_function=call,
    )
    if layer and layer not in outputs:
        hint = f"{did_you_mean(layer, outputs)}layers: {', '.join(outputs)}"
        raise ConfigError(f"features={layer} is not a layer; {hint}")
    [images] = (x for x in model.inputs if x.name == IMAGES)
    output = outputs[layer] if layer else clone.outputs[0]
    return keras.Model(images, output, name=model.name)


def with_features(model: keras.Model) -> keras.Model:
    """Return a network for inference with outputs [n, classes + f].

    These are the logits, and the f features that its last layer gets, of maps the mean.
    """
    [logits], [features, *_] = model.outputs, last_inputs(model.outputs[0])
    if len(features.shape) > 2:
        features = keras.ops.mean(features, [*range(1, len(features.shape) - 1)])
    columns = [keras.ops.cast(x, "float32") for x in (logits, features)]
    return keras.Model(model.inputs, keras.ops.concatenate(columns, -1))
