"""Random layers whose noise is an input of the network."""

import threading

import keras
import tensorflow as tf
from keras import layers, tree

from towers.keras_internals import spatial_noise_shape
from towers.models.layers.core import dropped

# Number of images of a trial call; no other axis has this length.
_NUM_TRIAL_IMAGES = 3

_local = threading.local()  # `draw`: (layer, its inputs) -> noise


class WithNoise(layers.Layer):
    """A layer with random layers in it, whose noise is an input.

    Its inputs are the symbolic tensors in the `args` and `kwargs` of the layer's call,
    and one of noise for each call of a random layer.
    """

    def __init__(self, layer: layers.Layer, args: tuple, kwargs: dict, **settings):
        super().__init__(autocast=False, **settings)
        self.layer = layer
        flat = tree.flatten((args, kwargs))
        self.tensors = tuple(x for x in flat if isinstance(x, keras.KerasTensor))
        self._arguments = lambda fill: tree.map_structure(fill, (args, kwargs))
        # Filled by a call without noise; None if a random layer mixes images.
        self.noise_shapes: list[tuple[int, ...] | None] = []

    def call(self, tensors, training=False):
        noises = list(tensors[len(self.tensors) :])

        def draw(layer, x):
            if noises:
                return noises.pop(0)
            is_apart = x.shape[0] == _NUM_TRIAL_IMAGES
            self.noise_shapes.append(noise_shape(layer, x) if is_apart else None)
            return tf.zeros_like(x, tf.float32)

        _local.draw = draw
        try:
            return self.call_of(self.layer, tensors)
        finally:
            _local.draw = None

    def call_of(self, layer, tensors):
        """Call a layer with the arguments of this one."""
        values = dict(zip(map(id, self.tensors), tensors, strict=False))
        args, kwargs = self._arguments(lambda x: values.get(id(x), x))
        return layer(*args, **kwargs)

    def find_noise_shapes(self) -> list[tuple[int, ...] | None]:
        """Trace a call, and return the shapes of noise for one image."""

        @tf.function(autograph=False)
        def call():
            shapes = [[_NUM_TRIAL_IMAGES, *x.shape[1:]] for x in self.tensors]
            pairs = zip(shapes, self.tensors, strict=True)
            self([tf.zeros(shape, x.dtype) for shape, x in pairs], training=True)

        with keras.StatelessScope():
            call.get_concrete_function()
        return self.noise_shapes


def noise_shape(layer: layers.Layer, x) -> tuple[int, ...]:
    """Return the shape of the noise of a random layer of Keras for one image."""
    shape = tuple(x.shape)[1:]
    if is_stochastic_depth(layer):
        return (1,) * len(shape)
    if spatial := spatial_noise_shape(layer, x):
        return spatial[1:]
    if getattr(layer, "noise_shape", None):
        pairs = zip(layer.noise_shape[1:], shape, strict=True)
        return tuple(size or whole for size, whole in pairs)
    return shape


class Noisy:
    """A random layer inside of a `WithNoise`, without its generator."""

    variables = ()

    def call(self, inputs, training=False):
        if not training or not noise_rate(self):
            return inputs
        return self.change(inputs, _local.draw(self, inputs))


class _Dropout(Noisy, layers.Dropout):
    def change(self, x, noise):
        return dropped(x, noise, self.rate)


class _GaussianNoise(Noisy, layers.GaussianNoise):
    def change(self, x, noise):
        return x + tf.cast(self.stddev * _normal(noise), x.dtype)


class _GaussianDropout(Noisy, layers.GaussianDropout):
    def change(self, x, noise):
        stddev = (self.rate / (1 - self.rate)) ** 0.5
        return x * tf.cast(1 + stddev * _normal(noise), x.dtype)


def _normal(noise):
    return tf.math.ndtri(noise + 2**-24)  # noise is a multiple of 2**-23, also 0


_SPATIAL = (layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D)
DROPOUTS = {layers.Dropout: _Dropout} | {
    kind: type(f"_{kind.__name__}", (_Dropout, kind), {}) for kind in _SPATIAL
}
NOISY = DROPOUTS | {
    layers.GaussianNoise: _GaussianNoise,
    layers.GaussianDropout: _GaussianDropout,
}


def is_stochastic_depth(layer: layers.Layer) -> bool:
    """Return whether a layer is stochastic depth of `keras.applications`."""
    is_of_keras = type(layer).__module__.startswith("keras.")
    return is_of_keras and hasattr(layer, "drop_path_rate")


def noise_rate(layer: layers.Layer) -> float:
    """Return the rate, or the standard deviation of Gaussian noise."""
    return layer.stddev if isinstance(layer, layers.GaussianNoise) else layer.rate
