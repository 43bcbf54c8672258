"""Export as a SavedModel, for TensorFlow Serving and everything that reads one."""

import os
import pathlib
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from towers.evaluation import RestoredRun

# The signature that TensorFlow Serving calls if none is named.
SERVING = "serving_default"

# The operations before the network have names with this.
PREPROCESSING = "preprocessing"


def predict_fn(network: keras.Model, run: RestoredRun) -> Callable:
    """The compiled function from "images", uint8 [n, *run.image_shape], to "logits" and
    "probabilities", float32 [n, classes].

    Args:
        network: preprocessed images -> logits.
    """

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, *run.image_shape], tf.uint8, name="images")
        ],
        autograph=False,
    )
    def predict(images):
        with tf.name_scope(PREPROCESSING):
            images = run.preprocess(images)
        logits = network(images, training=False)
        return {"logits": logits, "probabilities": tf.nn.softmax(logits)}

    return predict


def write(
    path: pathlib.Path,
    network: keras.Model,
    run: RestoredRun,
    precision: str = "float32",
    calibration: np.ndarray | None = None,
) -> None:
    """Writes the folder of a SavedModel with three signatures.

    "serving_default" takes images as `predict_fn`; "encoded_images" the files of
    images, strings [n], of which the middle is resized; "class_names" takes nothing and
    gives the names, strings [classes].
    """
    predict = predict_fn(network, run)

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.string, name="encoded_images")],
        autograph=False,
    )
    def predict_encoded(encoded_images):
        spec = tf.TensorSpec(run.image_shape, tf.uint8)
        return predict(
            tf.map_fn(
                lambda content: decode(content, run.image_shape),
                encoded_images,
                fn_output_signature=spec,
            )
        )

    @tf.function(input_signature=[])
    def class_names():
        return {"class_names": tf.constant(run.class_names)}

    signatures = {
        SERVING: predict,
        "encoded_images": predict_encoded,
        "class_names": class_names,
    }
    save(path, network, signatures)


def save(
    path: pathlib.Path, network: keras.Model, signatures: Mapping[str, Callable]
) -> None:
    """Writes compiled functions, which use the variables of a network, by their
    names."""
    module = tf.Module()
    module.network_variables = [variable.value for variable in network.variables]
    tf.saved_model.save(module, os.fspath(path), signatures=dict(signatures))


def decode(content: tf.Tensor, image_shape: Sequence[int]) -> tf.Tensor:
    """The middle of an image file, by TensorFlow's decoder, which does not turn photos
    as EXIF says.

    Args:
        content: a string; PNG or JPEG; for three channels also BMP without a palette,
            and the first frame of a GIF.
        image_shape: height, width, channels of the result.

    Returns:
        uint8 of `image_shape`.
    """
    *size, channels = image_shape
    image = tf.io.decode_image(content, channels=channels, expand_animations=False)
    return middle(tf.ensure_shape(image, [None, None, channels]), size)


def middle(image: tf.Tensor, size: Sequence[int]) -> tf.Tensor:
    """As `resizing.fit`, of an image whose size is known in the graph only. As Pillow
    does, first the rows are resized and rounded, then the columns.

    Args:
        image: uint8 [height, width, channels].
        size: (height, width) of the result.

    Returns:
        uint8 [*size, channels].
    """
    stored = tf.cast(tf.shape(image)[:2], tf.float32)
    wanted = tf.constant(size, tf.float32)
    scale = tf.reduce_max(wanted / stored)
    begins = (wanted - scale * stored) / 2
    for axis in (1, 0):
        is_axis = tf.one_hot(axis, 2)
        resized = tf.raw_ops.ScaleAndTranslate(
            images=image[tf.newaxis],
            size=tf.where(is_axis > 0, size, tf.shape(image)[:2]),
            scale=1 + is_axis * (scale - 1),
            translation=is_axis * begins,
            kernel_type="triangle",
            antialias=True,
        )
        # Halves are rounded up, also where float32 has them a little too small.
        image = tf.saturate_cast(tf.floor(resized[0] + 0.5001), tf.uint8)
    return image
