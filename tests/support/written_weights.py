"""Files of weights, as Keras and TensorFlow write them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from towers.pretrained import initial
from towers.pretrained.weights import open_weights

IMAGE_SHAPE, NUM_CLASSES = (8, 8, 3), 5


def create_network(*, image_shape, num_classes, width=1.0, regularizer=None):
    """The network to be trained: elementary layers alone."""
    images = keras.Input(image_shape, name="images")
    x = layers.Conv2D(4, 3, name="conv1")(images)
    x = layers.BatchNormalization(name="norm1")(x)
    x = layers.Conv2D(4, 1, name="inner")(x)
    x = layers.GlobalAveragePooling2D(name="pool1")(x)
    return keras.Model(images, layers.Dense(num_classes, name="logits")(x))


def create_theirs(num_classes=NUM_CLASSES):
    """The same with a nested model, an operator, a Lambda, an optimizer, and values."""
    images = keras.Input(IMAGE_SHAPE)
    x = layers.Conv2D(4, 3, name="conv1")(images)
    x = layers.BatchNormalization(name="norm1")(x) + 1.0
    x = layers.Lambda(lambda x: x - 1.0, output_shape=x.shape[1:])(x)
    x = keras.Sequential([layers.Conv2D(4, 1, name="inner")], name="block")(x)
    x = layers.Dropout(0.5)(x)
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(images, layers.Dense(num_classes, name="logits")(x))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(0)
    for variable in model.variables:
        if variable.dtype == "float32":
            variable.assign(rng.uniform(size=variable.shape))
    return model


def save_by_name(model, path):
    """As a program for TensorFlow 1 does."""
    by_name = {v.path: v.value for v in model.variables if "seed" not in v.path}
    tf.compat.v1.train.Saver(by_name).save(None, str(path), write_meta_graph=False)


WRITERS = {
    "model.keras": lambda model, path: model.save(path),
    "model.h5": lambda model, path: model.save(path),
    "model.weights.h5": lambda model, path: model.save_weights(path),
    "exported": lambda model, path: model.export(path, verbose=False),
    "saved_model": lambda model, path: tf.saved_model.save(model, str(path)),
    "checkpoint-1": lambda model, path: tf.train.Checkpoint(net=model).write(path),
    "by_name": save_by_name,
}


def zeros(model):
    kinds = {True: "params", False: "state"}
    return {f"{kinds[v.trainable]}/{v.path}": np.zeros(v.shape) for v in model.weights}


def empty_state(num_classes=NUM_CLASSES):
    state = zeros(create_network(image_shape=IMAGE_SHAPE, num_classes=num_classes))
    return state | {"averages/conv1/kernel": np.zeros((3, 3, 3, 4)), "step": np.int64()}


def fill(path, state):
    with open_weights(str(path)) as weights:
        match = initial.match_variables(state, weights)
        initial.fill(state, match.taken)
        return match
