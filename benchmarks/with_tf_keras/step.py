"""Training steps of networks written plainly in Keras 2, for `benchmarks.links`.

    PYTHON step.py NETWORK IMAGE_SIZE BATCH_SIZE

It imports no towers. It is one of several workers of MultiWorkerMirroredStrategy, by
its TF_CONFIG, with BATCH_SIZE images over all of them. It prints the number of trained
parameters, then takes as many steps of `fit` as each line of standard input says, and
prints their seconds of processor time. Images lie ready; SGD with momentum.
"""

import os
import sys
import time

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras import layers

CLASSES = 10


def conv(x, filters, size, strides=1):
    settings = {"padding": "same", "use_bias": False}
    return layers.Conv2D(filters, size, strides, **settings)(x)


def norm(x):
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


def resnet18(x):
    x = layers.ReLU()(norm(conv(x, 64, 3)))
    for filters in (64, 128, 256, 512):
        for strides in (1 if filters == 64 else 2, 1):
            y = layers.ReLU()(norm(conv(x, filters, 3, strides)))
            y = norm(conv(y, filters, 3))
            if strides > 1:
                x = norm(conv(x, filters, 1, strides))
            x = layers.ReLU()(layers.add([x, y]))
    return layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x))


def cnn(x):
    """The network of TensorFlow's CIFAR-10 tutorial."""

    def conv(x):
        return layers.Conv2D(64, 5, padding="same", activation="relu")(x)

    def pool(x):
        return layers.MaxPooling2D(3, 2, padding="same")(x)

    def response(x):
        return layers.Lambda(lambda x: tf.nn.lrn(x, 4, 1.0, 0.001 / 9, 0.75))(x)

    x = layers.Flatten()(pool(response(conv(response(pool(conv(x)))))))
    x = layers.Dense(384, "relu")(x)
    return layers.Dense(CLASSES)(layers.Dense(192, "relu")(x))


def main(name: str, side: int, batch_size: int) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        images = tf_keras.Input((side, side, 3))
        model = tf_keras.Model(images, {"cnn": cnn, "resnet18": resnet18}[name](images))
        model.compile(
            tf_keras.optimizers.SGD(0.01, 0.9),
            tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            ["accuracy"],
        )
    params = sum(np.prod(x.shape) for x in model.trainable_variables)
    print(int(params), file=answers, flush=True)
    batch = (
        tf.random.normal([batch_size, side, side, 3]),
        tf.random.uniform([batch_size], maxval=CLASSES, dtype=tf.int32),
    )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    dataset = tf.data.Dataset.from_tensors(batch).repeat().with_options(options)
    # What `fit` calls for each step, without what it does once an epoch.
    train = model.make_train_function()
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    for line in sys.stdin:
        used = time.process_time()
        for _ in range(int(line)):
            logs = train(batches)
        logs["loss"].numpy()
        print(time.process_time() - used, file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
