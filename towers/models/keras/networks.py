"""Adapts user-written Keras models to the trainer.

`rebuild` calls the layers of a network once more, in one flat graph. Names and
variables stay, where names are unique. What breaks a rule is replaced: random layers,
whose noise becomes an input that the trainer draws from (seed, step, position), batch
normalization, and what has no gradient on a CPU.
"""

import re

import keras
import numpy as np
from keras import layers, tree

from towers.errors import ConfigError
from towers.keras_internals import (
    detach,
    drop_seed_generators,
    last_operation,
    layers_of,
    rename,
    run_through_graph,
)
from towers.models.keras.noise import (
    DROPOUTS,
    NOISY,
    Noisy,
    WithNoise,
    is_stochastic_depth,
    noise_rate,
    noise_shape,
)
from towers.models.layers.core import Dropout, GroupedConv2D
from towers.models.layers.normalization import BatchNormalization, Normalization

IMAGES = "images"


def rebuild(
    source: str,
    network: keras.Model,
    image_shape: tuple[int, int, int],
    num_classes: int,
    first_layer: keras.Layer | None = None,
) -> keras.Model:
    """The same network, which is consumed, as a Functional model from images
    [n, *image_shape], and one noise tensor for each random layer, to logits
    [n, num_classes]. `first_layer` is put before it. A ConfigError, which begins with
    the source, has a line for each reason why it cannot be trained.
    """
    if not is_network(network):
        raise ConfigError(
            f"{source}: gave {type(network).__name__}; return a Functional model, "
            "keras.Model(inputs, outputs), or a keras.Sequential"
        )
    rebuilding = _Rebuilding()
    images, x = rebuilding.inputs(network, image_shape)
    if first_layer:
        x = [first_layer(x[0]), *x[1:]]
    outputs = tree.flatten(rebuilding.run(network, x))
    rebuilding.check_outputs(outputs, num_classes)
    if rebuilding.complaints:
        lines = tuple(f"{source}: {x}" for x in rebuilding.complaints)
        error = ConfigError("\n".join(lines))
        error.lines = lines
        raise error
    rebuilding.name_variables()
    inputs = [images, *rebuilding.noises] if rebuilding.noises else images
    return keras.Model(inputs, outputs[0], name=network.name)


def is_network(operation: object) -> bool:
    """True for Functional and Sequential models; others show no operations."""
    names = {cls.__name__ for cls in type(operation).__mro__}
    return not names.isdisjoint(("Functional", "Sequential"))


class _Rebuilding:
    """One pass through a network."""

    def __init__(self):
        self.noises = []  # the inputs besides the images
        self.complaints = []  # why the network cannot be trained
        self._names = {IMAGES}
        self._called = {}  # id -> (operation, its former name)
        self._replaced = set()  # names

    def inputs(self, network, image_shape):
        """The images, and all inputs of the network: its others are noise."""
        # A Sequential need not have an Input.
        inputs = getattr(network, "inputs", None) or [keras.Input(image_shape)]
        names = [x.name for x in inputs]
        place = names.index(IMAGES) if IMAGES in names else 0
        others = [x for x in names if x != names[place] and "noise" not in x]
        if others or (len(names) > 1 and IMAGES not in names):
            self.complaints.append(
                f"has the inputs {', '.join(names)}, and is given images alone; keep "
                f"one input (next to {IMAGES!r}, one of a name with 'noise' is drawn)"
            )
        shape = tuple(inputs[place].shape[1:])
        if len(shape) == 3:
            pairs = zip(shape, image_shape, strict=True)
            shape = tuple(wanted if size is None else size for size, wanted in pairs)
        if shape != image_shape:
            self.complaints.append(f"takes images {shape}, and they are {image_shape}")
        images = keras.Input(shape, name=IMAGES)
        return images, [
            images if i == place else self._noise(x.name, x.shape[1:])
            for i, x in enumerate(inputs)
        ]

    def run(self, network, x):
        """Calls all layers of a network."""

        def visit(operation):
            return lambda *args, **kwargs: self._call(operation, args, kwargs)

        if isinstance(network, keras.Sequential):
            [x] = tree.flatten(x)
            for layer in network.layers:
                x = visit(layer)(x)
            return x
        # Keras' own traversal: the same that runs the model.
        return run_through_graph(network, x, visit)

    def _call(self, operation, args, kwargs):
        if is_network(operation):
            return self.run(operation, args[0])
        if id(operation) not in self._called:
            self._take(operation)
        # The graph's value is a default: a call of the whole model decides.
        kwargs.pop("training", None)
        if not isinstance(operation, layers.Layer):
            return operation(*args, **kwargs)
        inner = layers_of(operation)
        if type(operation) in DROPOUTS or is_stochastic_depth(operation):
            return self._drop(operation, args[0])
        if isinstance(operation, layers.Normalization) and not operation.variables:
            name, rank = self._name_of_call(operation), len(args[0].shape)
            return _rescaling(operation, name, rank)(*args)
        if any(isinstance(x, layers.SpectralNormalization) for x in inner):
            self.complaints.append(
                f"layer {operation.name!r} ({type(operation).__name__}): spectral "
                "normalization changes parameters while the loss is computed; leave it "
                "out, or write it as a layer that normalizes its kernel at each use"
            )
        if not _replace_inside(operation):
            return operation(*args, **kwargs)
        layer = WithNoise(operation, args, kwargs, name=self._name_of_call(operation))
        shapes = layer.find_noise_shapes()
        if None in shapes:
            self.complaints.append(
                f"layer {operation.name!r} ({type(operation).__name__}): a random layer"
                " in it does not see one image beside the other"
            )
            return operation(*args, **kwargs)
        noises = [self._noise(f"{layer.name}_noise", shape) for shape in shapes]
        return layer([*layer.tensors, *noises])

    def _take(self, operation):
        """Takes an operation out of its former graph; its name is unique then."""
        self._called[id(operation)] = operation, operation.name
        operation.name = self._unique(operation.name)
        detach(operation)

    def _name_of_call(self, operation):
        """The name of the layer that is called in place of an operation."""
        is_first = operation.name not in self._replaced
        self._replaced.add(operation.name)
        # A later layer may have a name with a number.
        return operation.name if is_first else self._unique(f"{operation.name}_again")

    def _unique(self, name):
        unique, number = name, 0
        while unique in self._names:
            number += 1
            unique = f"{name}_{number}"
        self._names.add(unique)
        return unique

    def _noise(self, name, shape):
        self.noises.append(keras.Input(shape, name=self._unique(name)))
        return self.noises[-1]

    def _drop(self, layer, x):
        rate = layer.drop_path_rate if is_stochastic_depth(layer) else layer.rate
        if not rate:
            return x
        dropout = Dropout(rate, name=self._name_of_call(layer))
        noise = self._noise(f"{dropout.name}_noise", noise_shape(layer, x))
        return dropout([x, noise])

    def check_outputs(self, outputs, num_classes):
        """Complains of outputs that are no logits, and of random layers that stay."""
        for layer, name in self._called.values():
            variables = getattr(layer, "variables", ())
            if type(layer) not in DROPOUTS and any(
                "seed_generator" in variable.path for variable in variables
            ):
                hint = "and --augment changes images"
                inner = layers_of(layer)
                if any(hasattr(x, "recurrent_dropout") for x in inner):
                    hint = "so set dropout and recurrent_dropout to 0"
                self.complaints.append(
                    f"layer {name!r} ({type(layer).__name__}) keeps a random generator;"
                    f" only dropout and Gaussian noise are replaced, {hint}"
                )
        shapes = [tuple(x.shape) for x in outputs]
        if shapes != [(None, num_classes)]:
            self.complaints.append(
                f"gives {shapes}; the data set needs [(None, {num_classes})], a logit "
                "of each class"
            )
        last = last_operation(outputs[0])
        function = getattr(last, "activation", type(last))
        kind = getattr(function, "__name__", "").lower().removesuffix("_v2")
        if kind in ("softmax", "sigmoid"):
            self.complaints.append(
                f"layer {last.name!r} ({type(last).__name__}) gives probabilities; "
                f"the loss takes logits: leave its {kind} out"
            )

    def name_variables(self):
        """A variable's path begins with its layer, not with a network around it. One
        without a name takes its attribute's name.
        """
        for layer, name in self._called.values():
            attributes = {id(value): key for key, value in vars(layer).items()}
            for variable in getattr(layer, "variables", ()):
                _, _, rest = f"/{variable.path}".partition(f"/{name}/")
                rest = rest or variable.path
                if re.fullmatch(r"variable(_\d+)?", rest):
                    rest = attributes.get(id(variable), rest)
                rename(variable, f"{layer.name}/{rest}")


def _replace_inside(layer):
    """Replaces batch normalization, grouped convolutions and random layers in a layer,
    or the layer itself, by layers of towers; True where there are random ones.

    In place: names, variables and users stay.
    """
    has_noise = False
    for inner in layers_of(layer):
        kind = type(inner)
        if kind is layers.BatchNormalization:
            inner._momentum, inner.is_frozen = inner.momentum, False
            inner.__class__ = BatchNormalization
        elif kind is layers.Normalization and inner.variables:
            inner.__class__ = Normalization
        elif kind is layers.Conv2D and inner.groups > 1:
            if inner.data_format == "channels_last":
                inner.__class__ = GroupedConv2D
        elif kind in NOISY:
            inner.__class__ = NOISY[kind]
        elif {getattr(inner, x, 1) for x in ("dropout", "recurrent_dropout")} == {0}:
            drop_seed_generators(inner)  # recurrent cells always have one
        has_noise |= isinstance(inner, Noisy) and noise_rate(inner) > 0
    return has_noise


def _rescaling(layer, name, rank):
    """A Rescaling layer for a `keras.layers.Normalization` with given moments, of
    tensors of a rank: the latter keeps arrays on the CPU and can be adapted to other
    images.
    """
    mean, variance = np.asarray(layer.input_mean), np.asarray(layer.input_variance)
    std = np.maximum(np.sqrt(variance), keras.config.epsilon())
    scale, offset = 1 / std, -mean / std
    if layer.invert:
        scale, offset = std, mean
    # The last of the moments' axes belongs to the last axis, and so on.
    shape, axes = [1] * rank, sorted(axis % rank for axis in layer.axis)
    for axis, size in zip(reversed(axes), reversed(mean.shape), strict=False):
        shape[axis] = size
    scale, offset = (x.reshape(shape).tolist() for x in (scale, offset))
    return layers.Rescaling(scale, offset, dtype=layer.dtype_policy, name=name)
