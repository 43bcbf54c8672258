"""Small networks, each as a Keras model and as a description for the oracle."""

import dataclasses
import types
from collections.abc import Mapping

import keras
import numpy as np
import tensorflow as tf
from engines.oracle import layer, plain
from keras import layers

from towers.config.choices import FAMILY, MODELS
from towers.data.streams import without_tuning
from towers.models.create import create_model, noise_shapes
from towers.models.layers.core import Dropout
from towers.models.layers.normalization import (
    BatchNormalization,
    LocalResponseNormalization,
)
from towers.models.variables import build_network, keras_settings
from towers.parallel.copies import Initial, NetworkLayout, Values
from towers.parallel.loop import Streams

# Those of the package; the networks of Keras are in test_applications.
NAMES = [name for name in MODELS if not name.endswith(FAMILY)]


def _kind(name):
    """Return the function that builds a network, and its options but sizes."""
    options = MODELS[name].options
    kinds = frozenset(options) - {"name", "depth", "blocks", "deeper", "wider"}
    has_bottlenecks = options.get("has_bottlenecks", True)
    return MODELS[name].target, kinds, has_bottlenecks, options.get("columns")


# The smallest network of each kind: larger ones have the same layers.
KINDS = [
    min((x for x in NAMES if _kind(x) == kind), key=lambda x: MODELS[x].num_params)
    for kind in dict.fromkeys(map(_kind, NAMES))
]

IMAGE_SHAPE = (8, 8, 3)
NUM_CLASSES = 5
WEIGHT_DECAY = 0.01
NOISE_SHAPES = types.MappingProxyType({"dropout1_noise": (12,)})


@dataclasses.dataclass(frozen=True)
class Network:
    """A model, its description for the oracle, and the weight decay per parameter."""

    model: keras.Model
    described: list
    decay: dict[str, float]

    @property
    def params(self) -> dict[str, np.ndarray]:
        return {v.path: v.numpy() for v in self.model.trainable_variables}

    @property
    def state(self) -> dict[str, np.ndarray]:
        return {v.path: v.numpy() for v in self.model.non_trainable_variables}


def plain_network(dtype: str = "float32") -> Network:
    """Create convolution, pooling, LRN, and dense layers with decay and dropout."""

    def create():
        images = keras.Input(IMAGE_SHAPE, name="images")
        noise = keras.Input((12,), name="dropout1_noise")
        options = {"bias_initializer": keras.initializers.Constant(0.1)}
        x = layers.Conv2D(6, 3, padding="same", name="conv1", **options)(images)
        x = layers.ReLU(name="relu1")(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same", name="pool1")(x)
        x = LocalResponseNormalization(2, 1.0, 0.1, 0.75, name="norm1")(x)
        x = layers.Flatten(name="flatten")(x)
        options = {"kernel_regularizer": keras.regularizers.L2(WEIGHT_DECAY / 2)}
        x = layers.Dense(12, name="fc1", **options)(x)
        x = layers.ReLU(name="relu2")(x)
        x = Dropout(0.25, name="dropout1")([x, noise])
        logits = layers.Dense(NUM_CLASSES, name="logits")(x)
        return keras.Model([images, noise], logits)

    model = build_network(create, seed=1, policy=dtype)
    norm = {"depth_radius": 2, "bias": 1.0, "alpha": 0.1, "beta": 0.75}
    described = [
        *plain("conv:conv1 relu:relu1"),
        layer("max_pool", "pool1", size=3, stride=2),
        layer("local_response_norm", "norm1", **norm),
        *plain("flatten:flatten dense:fc1 relu:relu2"),
        layer("dropout", "dropout1", rate=0.25),
        layer("dense", "logits"),
    ]
    return Network(model, described, {"fc1/kernel": WEIGHT_DECAY})


def residual_network(
    dtype: str = "float32", image_shape: tuple[int, int, int] = IMAGE_SHAPE
) -> Network:
    """Create a residual block; the momentum of its second normalization is ramped."""

    def create():
        images = keras.Input(image_shape, name="images")
        x = layers.Conv2D(6, 3, padding="same", use_bias=False, name="conv1")(images)
        x = layers.BatchNormalization(momentum=0.9, name="norm1")(x)
        shortcut = layers.ReLU(name="relu1")(x)
        x = layers.Conv2D(6, 3, padding="same", use_bias=False, name="conv2")(shortcut)
        x = BatchNormalization(momentum=0.99, name="norm2")(x)
        x = layers.Add(name="add2")([shortcut, x])
        x = layers.ReLU(name="relu2")(x)
        x = layers.GlobalAveragePooling2D(name="pool2")(x)
        logits = layers.Dense(NUM_CLASSES, name="logits")(x)
        return keras.Model(images, logits)

    model = build_network(create, seed=1, policy=dtype)
    described = [
        layer("conv", "conv1"),
        layer("batch_norm", "norm1", momentum=0.9),
        *plain("relu:relu1 conv:conv2"),
        layer("batch_norm", "norm2", momentum=0.99),
        layer("add", "add2", inputs=("relu1", "norm2")),
        *plain("relu:relu2 global_average_pool:pool2 dense:logits"),
    ]
    return Network(model, described, {})


# Height and width of the smallest images that the networks of Keras take.
APPLICATION_SIDE = 32


def application(name: str, dtype: str = "float64") -> Network:
    """Create a network by keras:NAME or FILE.py:NAME, without a description."""
    model = create_model(
        name,
        image_shape=(APPLICATION_SIDE, APPLICATION_SIDE, 3),
        num_classes=NUM_CLASSES,
        weight_decay=WEIGHT_DECAY,
        precision=dtype,
        seed=3,
    )
    return Network(model, [], {})


def application_batches(network: Network, batch_size: int) -> list[dict]:
    """Draw two batches for it."""
    return random_batches(
        2,
        batch_size,
        image_shape=network.model.inputs[0].shape[1:],
        noise_shapes=noise_shapes(network.model),
    )


NETWORKS = {"plain": plain_network, "residual": residual_network}


def random_batches(
    num_steps: int,
    batch_size: int,
    seed: int = 0,
    image_shape: tuple[int, int, int] = IMAGE_SHAPE,
    noise_shapes: Mapping[str, tuple[int, ...]] = NOISE_SHAPES,
) -> list[dict]:
    """Draw NumPy batches, by default for both kinds of network here."""
    rng = np.random.default_rng(seed)
    return [
        {
            "images": rng.normal(size=(batch_size, *image_shape)).astype(np.float32),
            "labels": rng.integers(0, NUM_CLASSES, batch_size, dtype=np.int32),
        }
        | {
            name: rng.random((batch_size, *shape), dtype=np.float32)
            for name, shape in noise_shapes.items()
        }
        for _ in range(num_steps)
    ]


def oracle_batches(batches: list[dict]) -> list[tuple]:
    """Return the same batches in the form of the oracle."""
    return [
        (
            batch["images"],
            batch["labels"],
            {
                name.removesuffix("_noise"): values
                for name, values in batch.items()
                if name.endswith("_noise")
            },
        )
        for batch in batches
    ]


def model_of(*stack: layers.Layer, shape=(8, 8, 4)) -> keras.Model:
    """Create a sequence of layers."""
    with keras_settings(), tf.device("CPU:0"):
        x = images = keras.Input(shape, name="images")
        for layer in stack:
            x = layer(x)
        return keras.Model(images, x)


def values_of(
    params: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]
) -> tuple[NetworkLayout, Values]:
    """Pack named arrays into vectors."""
    parts = [{k: tf.constant(v) for k, v in part.items()} for part in (params, state)]
    layout = NetworkLayout(Initial(*parts))
    vectors = layout.params.pack(list(parts[0].values()))
    return layout, Values(vectors, *layout.pack_state(list(parts[1].values())))


def feed_of(batches: list[dict], sizes: list[int], devices: list[str]) -> Streams:
    """Return a feed of batches; `sizes` are images of a micro-batch per tower."""
    ends, size = np.cumsum(sizes), sum(sizes)
    streams = []
    for first, end in zip(ends - sizes, ends, strict=True):
        numbers = np.arange(len(batches[0]["labels"])).reshape(-1, size)[:, first:end]
        own = [{k: v[numbers.ravel()] for k, v in b.items()} for b in batches]
        streams.append(stream_of(own))
    return Streams(streams, devices)


def stream_of(batches: list[dict]):
    """Return first step -> tf.data.Dataset, from a list of batches."""
    stacked = {k: np.stack([b[k] for b in batches]) for k in batches[0]}

    def stream(first_step):
        rest = {k: v[first_step:] for k, v in stacked.items()}
        return without_tuning(tf.data.Dataset.from_tensor_slices(rest))

    return stream
