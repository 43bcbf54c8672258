"""Adapts user-written Keras models to the trainer.

`rebuild` calls the layers of a network once more, in one flat graph. Unique names and
the variables stay. What the trainer cannot use is replaced: random layers, whose noise
becomes an input drawn from (seed, step, position), batch normalization, and layers that
are slow, inexact or without a gradient on a CPU.
"""

import inspect
import re

import keras
from keras import layers, tree

from towers import keras_internals
from towers.errors import ConfigError
from towers.models.keras.noise import (
    DROPOUTS,
    NOISY,
    Noisy,
    WithNoise,
    is_stochastic_depth,
    noise_rate,
    noise_shape,
)
from towers.models.layers import core, normalization

IMAGES = "images"

# Layers of Keras -> ours.
OURS = NOISY | {
    layers.BatchNormalization: normalization.BatchNormalization,
    layers.Dense: core.Dense,
    layers.DepthwiseConv2D: core.DepthwiseConv2D,
    layers.Normalization: normalization.Normalization,
}


def rebuild(
    source: str,
    network: keras.Model,
    image_shape: tuple[int, int, int],
    num_classes: int,
    first_layer: keras.Layer | None = None,
) -> keras.Model:
    """Return a network, which is consumed, as a flat Functional model.

    It maps images [n, *image_shape], and one noise tensor per random layer, to logits
    [n, num_classes]. `first_layer` is put before it.

    Raises:
        ConfigError: it cannot be trained; a line per reason, which begins with
        `source`.
    """
    if not is_network(network):
        way = "return a Functional model, keras.Model(inputs, outputs), or a Sequential"
        raise ConfigError(f"{source}: gave {type(network).__name__}; {way}")
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
    """Return whether a model is Functional or Sequential, so its layers are known."""
    names = {cls.__name__ for cls in type(operation).__mro__}
    return not names.isdisjoint(("Functional", "Sequential"))


class _Rebuilding:
    """One pass through a network."""

    def __init__(self):
        self.noises = []  # the inputs besides the images
        self.complaints = []  # reasons why the network cannot be trained
        self._names = {IMAGES}
        self._called = {}  # id -> (operation, its former name)
        self._ours = {}  # id of a layer -> the layer called in its place
        self._replaced = set()  # names

    def inputs(self, network, image_shape):
        """Return the images, and all inputs of the network: the others are noise."""
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
        """Call all layers of a network."""

        def visit(operation):
            return lambda *args, **kwargs: self._call(operation, args, kwargs)

        if isinstance(network, keras.Sequential):
            [x] = tree.flatten(x)
            for layer in network.layers:
                x = visit(layer)(x)
            return x
        # Keras' own traversal, which also runs the model.
        return keras_internals.run_through_graph(network, x, visit)

    def _call(self, operation, args, kwargs):
        if is_network(operation):
            return self.run(operation, args[0])
        if id(operation) not in self._called:
            self._called[id(operation)] = operation, operation.name
            operation.name = self._unique(operation.name)
            keras_internals.detach(operation)  # from its former graph
        # The graph's value is a default: a call of the whole model decides.
        kwargs.pop("training", None)
        if not isinstance(operation, layers.Layer):
            return operation(*args, **kwargs)
        if type(operation) in DROPOUTS or is_stochastic_depth(operation):
            return self._drop(operation, args[0])
        name, operation = operation.name, self._replacement(operation)
        operation.name, inner = name, keras_internals.layers_of(operation)
        if any(isinstance(x, layers.SpectralNormalization) for x in inner):
            why = (
                "changes parameters while the loss is computed (spectral normalization)"
            )
            way = (
                "leave it out, or write a layer that normalizes its kernel at each use"
            )
            self._complain(operation, operation.name, f"{why}; {way}")
        if not any(isinstance(x, Noisy) and noise_rate(x) > 0 for x in inner):
            return operation(*args, **kwargs)
        layer = WithNoise(operation, args, kwargs, name=self._name_of_call(operation))
        shapes = layer.find_noise_shapes()
        if None in shapes:
            why = "has a random layer that does not see one image beside the other"
            self._complain(operation, operation.name, why)
            return operation(*args, **kwargs)
        noises = [self._noise(f"{layer.name}_noise", shape) for shape in shapes]
        return layer([*layer.tensors, *noises])

    def _replacement(self, layer):
        """Return our layer for one of Keras, else the layer with such layers in it."""
        if id(layer) in self._ours:
            return self._ours[id(layer)]
        ours = layer
        if is_network(layer):
            ours = keras.models.clone_model(layer, clone_function=self._replacement)
        elif kind := _class_of_ours(layer):
            ours = _converted(layer, kind)
        self._ours |= {id(layer): ours, id(ours): ours}
        if ours is layer and isinstance(layer, keras.Layer):
            for name, value in vars(layer).items():
                vars(layer)[name] = self._with_replacements(value)
            if {getattr(layer, x, 1) for x in ("dropout", "recurrent_dropout")} == {0}:
                # Recurrent cells always have one.
                keras_internals.drop_seed_generators(layer)
        return ours

    def _with_replacements(self, value):
        """Replace the layers in a value of an attribute."""
        if isinstance(value, keras.Layer):
            return self._replacement(value)
        if isinstance(value, list):  # in place, as Keras tracks it
            list.__setitem__(value, slice(None), map(self._with_replacements, value))
        elif isinstance(value, dict):
            for key, inner in value.items():
                dict.__setitem__(value, key, self._with_replacements(inner))
        elif type(value) is tuple:
            return tuple(map(self._with_replacements, value))
        return value

    def _name_of_call(self, operation):
        """Return the name of the layer that is called in place of an operation."""
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
        dropout = core.Dropout(rate, name=self._name_of_call(layer))
        noise = self._noise(f"{dropout.name}_noise", noise_shape(layer, x))
        return dropout([x, noise])

    def check_outputs(self, outputs, num_classes):
        """Complain of outputs other than logits, and of random layers that stay."""
        for layer, name in self._called_layers():
            variables = getattr(layer, "variables", ())
            if type(layer) not in DROPOUTS and any(
                "seed_generator" in variable.path for variable in variables
            ):
                hint = "and --augment changes images"
                inner = keras_internals.layers_of(layer)
                if any(hasattr(x, "recurrent_dropout") for x in inner):
                    hint = "so set dropout and recurrent_dropout to 0"
                why = "keeps a random generator; only dropout and Gaussian noise are"
                self._complain(layer, name, f"{why} replaced, {hint}")
        shapes = [tuple(x.shape) for x in outputs]
        if shapes != [(None, num_classes)]:
            needed = f"[(None, {num_classes})], a logit of each class"
            self.complaints.append(f"gives {shapes}; the data set needs {needed}")
        last = keras_internals.last_operation(outputs[0])
        function = getattr(last, "activation", type(last))
        kind = getattr(function, "__name__", "").lower().removesuffix("_v2")
        if kind in ("softmax", "sigmoid"):
            why = f"gives probabilities; the loss takes logits: leave its {kind} out"
            self._complain(last, last.name, why)

    def _complain(self, layer, name, why):
        self.complaints.append(f"layer {name!r} ({type(layer).__name__}) {why}")

    def _called_layers(self):
        """Return the layers that were called, each with its former name."""
        return [(self._ours.get(i, x), name) for i, (x, name) in self._called.items()]

    def name_variables(self):
        """Begin the path of a variable with its layer, not with a network around it."""
        for layer, name in self._called_layers():
            attributes = {id(value): key for key, value in vars(layer).items()}
            for variable in getattr(layer, "variables", ()):
                _, _, rest = f"/{variable.path}".partition(f"/{name}/")
                rest = rest or variable.path
                if re.fullmatch(r"variable(_\d+)?", rest):
                    rest = attributes.get(id(variable), rest)
                keras_internals.rename(variable, f"{layer.name}/{rest}")


def _class_of_ours(layer):
    kind = type(layer)
    if kind is layers.LayerNormalization:
        is_plain = layer.scale and layer.center and not layer.rms_scaling
        is_plain = is_plain and layer.axis in (-1, [-1])
        return normalization.FusedLayerNormalization if is_plain else None
    if kind is layers.Activation:
        return core.FusedActivation if core.is_fused(layer.activation) else None
    if kind is layers.Conv2D:
        has_groups = layer.groups > 1 and layer.data_format == "channels_last"
        return core.GroupedConv2D if has_groups else core.Conv2D
    return OURS.get(kind)


def _converted(layer, kind):
    """Return a layer of our class with the arguments and variables of one of Keras."""
    names = inspect.signature(type(layer).__init__).parameters
    settings = {name: getattr(layer, name) for name in names if hasattr(layer, name)}
    settings |= {"name": layer.name, "trainable": layer.trainable}
    if kind is normalization.Normalization:
        settings |= {"mean": layer.input_mean, "variance": layer.input_variance}
    ours = kind(**settings | {"dtype": layer.dtype_policy})
    for name, value in vars(layer).items():
        if vars(ours).get(name) is None:  # `build` has set it
            setattr(ours, name, value)
    ours.built = layer.built
    return ours
