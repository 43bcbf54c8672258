"""The same network, batch and precision in other hands: Keras' `fit`, MirroredStrategy.

    python -m benchmarks.peers --models=cnn,resnet20

In turn in one process, on a batch that lies ready, SGD with momentum:
- `towers`: the compiled step of strategy `towers`.
- `fit`: `keras.Model.fit` on the same model, our layers included.
- `fit, stock layers`: `fit` on the network as a user of Keras writes it, with the
  convolutions, normalisations and activations of Keras and TensorFlow.
- `mirrored`: `fit` under `tf.distribute.MirroredStrategy` on the same devices, where
  there are two or more; to be compared with `replicated`, our strategy on them.

`fit` is told of the steps of a round at once (`steps_per_execution`), which is faster
than its default of one; a round of it begins with a new iterator, as an epoch does.
`--compile=xla` is for both sides; by itself Keras would take XLA on GPUs only.
"""

import argparse
import contextlib
import dataclasses
import functools
import statistics

import keras
import tensorflow as tf

import towers  # noqa: F401  (before Keras: settles its backend)
from benchmarks import measure
from towers import build, models
from towers.config import config
from towers.models.activations import Gelu
from towers.models.convolution import SameConv2D
from towers.models.layers import BatchNormalization, LocalResponseNormalization
from towers.parallel import devices

LEARNING_RATE, MOMENTUM = 0.01, 0.9


def stock_convolution(settings: dict) -> keras.layers.Layer:
    del settings["before_pool"]  # the pool drops a last row by itself
    return keras.layers.Conv2D.from_config(settings | {"padding": "same"})


def stock_response_normalization(settings: dict) -> keras.layers.Layer:
    numbers = [settings[name] for name in ("depth_radius", "bias", "alpha", "beta")]

    def normalize(x):  # in the one type that TensorFlow has it in everywhere
        return tf.cast(tf.nn.lrn(tf.cast(x, tf.float32), *numbers), x.dtype)

    return keras.layers.Lambda(normalize, name=settings["name"])


def stock_gelu(settings: dict) -> keras.layers.Layer:
    exact = functools.partial(keras.activations.gelu, approximate=False)
    return keras.layers.Activation(exact, name=settings["name"])


# Our layers -> the settings of one to what a user of Keras would write instead.
STOCK = {
    BatchNormalization: keras.layers.BatchNormalization.from_config,
    SameConv2D: stock_convolution,
    LocalResponseNormalization: stock_response_normalization,
    Gelu: stock_gelu,
}


def with_stock_layers(model: keras.Model) -> keras.Model:
    """The same network with the layers of Keras and TensorFlow in place of ours."""

    def stock(layer):
        create = STOCK.get(type(layer), type(layer).from_config)
        return create(layer.get_config())

    return copied(model, keras.models.clone_model(model, clone_function=stock))


def copied(model: keras.Model, clone: keras.Model) -> keras.Model:
    """The clone, with the values of the model."""
    clone.set_weights(model.get_weights())
    return clone


def has_own_layers(model: keras.Model) -> bool:
    return any(type(layer) in STOCK for layer in model.layers)


def fit(model: keras.Model, batch: dict, num_steps: int, compiler: str, strategy=None):
    """Compiles a model of Keras; a function that trains it for so many steps."""
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    inputs = inputs["images"] if len(inputs) == 1 else inputs
    dataset = tf.data.Dataset.from_tensors((inputs, batch["labels"])).repeat()
    with strategy.scope() if strategy else contextlib.nullcontext():
        if strategy:
            model = copied(model, keras.models.clone_model(model))
        model.compile(
            optimizer=keras.optimizers.SGD(LEARNING_RATE, MOMENTUM),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=num_steps,
            jit_compile=compiler == "xla",
        )

    def train():
        model.fit(dataset, steps_per_epoch=num_steps, epochs=1, verbose=0)

    return train


def things_of(settings, options, chosen) -> dict:
    """Name -> a call that trains for a round."""
    one = dataclasses.replace(chosen, towers=chosen.towers[:1])
    still = measure.on_still_batch(build.build(settings))
    batch = still.train_batches.batch

    def model():
        return build.build(settings).model

    towers_step = build.create_strategy(settings, still, one)
    found = {
        "towers": lambda: towers_step.train(options.steps),
        "fit": fit(model(), batch, options.steps, options.compile),
    }
    if has_own_layers(still.model):
        with models.keras_settings(models.POLICIES[settings.precision]):
            stock = with_stock_layers(model())
        found["fit, stock layers"] = fit(stock, batch, options.steps, options.compile)
    if len(chosen.towers) > 1:
        several = dataclasses.replace(settings, strategy="replicated")
        replicated = build.create_strategy(several, still, chosen)
        found["replicated"] = lambda: replicated.train(options.steps)
        mirrored = tf.distribute.MirroredStrategy(list(chosen.towers))
        found["mirrored"] = fit(
            model(), batch, options.steps, options.compile, mirrored
        )
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", type=measure.some_of(config.MODELS), default="cnn,resnet20"
    )
    parser.add_argument("--precision", default="float32", choices=config.PRECISIONS)
    parser.add_argument("--compile", default="none", choices=config.COMPILERS)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--num_towers", type=int, default=1)
    parser.add_argument("--device", default="auto", choices=config.DEVICES)
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.num_towers > 1 and len(options.models) > 1:
        names = ",".join(options.models)
        parser.error(
            f"--num_towers={options.num_towers} with --models={names}: in one "
            "process the collectives of two MirroredStrategies clash; name one network"
        )

    # What runs on one of several devices has all cores too.
    chosen = devices.configure(options.device, options.num_towers, own_cores=False)
    dtype = tf.as_dtype(options.precision)
    rates = [measure.matrix_rate(dtype, chosen.towers)]
    print(measure.report_head("The same training by Keras"))
    print(
        f"{options.precision}, compiler {options.compile}, batch {options.batch_size} "
        f"of 32x32 images, {options.num_towers} device(s); {options.rounds} rounds of "
        f"{options.steps} steps, one more to warm up\n"
    )
    print(
        "| network | trained by | images/s, median | time / towers (min, median, max) |"
    )
    print("| --- | --- | --- | --- |")
    for name in options.models:
        settings = config.Config(
            dataset="synthetic",
            model=name,
            augment="none",
            optimizer="sgd",
            learning_rate=LEARNING_RATE,
            momentum=MOMENTUM,
            schedule="constant",
            ema_decay=0.0,
            input="stream",
            batch_size=options.batch_size,
            precision=options.precision,
            compile=options.compile,
        )
        found = things_of(settings, options, chosen)
        wall, _ = measure.in_turn(found, options.rounds)
        rates.append(measure.matrix_rate(dtype, chosen.towers))
        for thing in found:
            secs = statistics.median(wall[thing]) / options.steps
            spread = " ".join(f"{x:.3f}" for x in measure.ratios(wall, thing, "towers"))
            print(
                f"| {name} | {thing} | {options.batch_size / secs:.1f} | {spread} |",
                flush=True,
            )
    listed = ", ".join(f"{rate / 1e9:.0f}" for rate in rates)
    print(f"\nMatrix rate before and after each network: {listed} GFLOP/s.")


if __name__ == "__main__":
    main()
