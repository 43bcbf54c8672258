"""The same training step by Keras, MirroredStrategy, and PyTorch.

    python -m benchmarks.peers --models=cnn,resnet20 --work=train,predict

In turn in one process, on a batch that lies ready, SGD with momentum:
- `towers`: the compiled step of strategy `towers`, with one tower; on a CPU also with
  one for each core, in a process of its own, which is how a training uses a CPU best.
- `fit`: `keras.Model.fit` on the same model, our layers included.
- `fit, stock layers`: `fit` on the network as a user of Keras writes it, with the
  convolutions, normalizations and activations of Keras and TensorFlow.
- `mirrored`: `fit` under `tf.distribute.MirroredStrategy` on the same devices, where
  there are two or more; to be compared with `replicated`, our strategy on them.
- `torch`, `torch, compiled`: the network written plainly in PyTorch, or as timm has it,
  channels last, by a Python that has them (`--torch=PYTHON`), in a process of its own,
  on its first GPU where it sees one.

With `--work=predict` they predict the batch instead, Keras by `keras.Model.predict`.
`--by="towers;torch"` takes only these. The peak is the most memory that a process had
(VmHWM), its libraries included, of those with a process of their own.

`fit` takes the steps of a round in one call (`steps_per_execution`), which is faster
than its default of one; a round of it begins with a new iterator, as an epoch does.
`--compile` is for both sides; `auto`, the default of both, is XLA on GPUs.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import statistics

import keras
import tensorflow as tf

from benchmarks import measure, trainers
from towers.build import builder
from towers.config import Config
from towers.config.choices import MODELS
from towers.models.create import POLICIES, without_noise
from towers.models.layers.core import (
    Conv2D,
    Dense,
    DepthwiseConv2D,
    FusedActivation,
    Gelu,
    GroupedConv2D,
    SameConv2D,
)
from towers.models.layers.normalization import (
    BatchNormalization,
    FusedLayerNormalization,
    LocalResponseNormalization,
)
from towers.models.variables import keras_settings
from towers.parallel import devices
from towers.threads import num_cores

LEARNING_RATE, MOMENTUM = 0.01, 0.9
OURS = ("PYTHONPATH", "LD_LIBRARY_PATH", "TF_ENABLE_ONEDNN_OPTS")


def stock_convolution(settings: dict) -> keras.layers.Layer:
    del settings["before_pool"]  # a pool drops a last row
    return keras.layers.Conv2D.from_config(settings | {"padding": "same"})


def stock_grouped(settings: dict) -> keras.layers.Layer:
    groups, filters = settings.pop("groups"), settings["filters"]
    if groups != filters or groups == 1:
        return keras.layers.Conv2D.from_config(settings | {"groups": groups})
    del settings["filters"]
    names = {x: x.replace("kernel_", "depthwise_") for x in settings}
    names["kernel_size"] = "kernel_size"
    return keras.layers.DepthwiseConv2D(**{names[k]: v for k, v in settings.items()})


def stock_response_normalization(settings: dict) -> keras.layers.Layer:
    numbers = [settings[name] for name in ("depth_radius", "bias", "alpha", "beta")]

    def normalize(x):  # in the one type that TensorFlow has it in everywhere
        return tf.cast(tf.nn.lrn(tf.cast(x, tf.float32), *numbers), x.dtype)

    return keras.layers.Lambda(normalize, name=settings["name"])


def stock_normalization(settings: dict) -> keras.layers.Layer:
    del settings["is_frozen"]
    return keras.layers.BatchNormalization.from_config(settings)


def stock_gelu(settings: dict) -> keras.layers.Layer:
    exact = functools.partial(keras.activations.gelu, approximate=False)
    return keras.layers.Activation(exact, name=settings["name"])


# Our layers -> the settings of one to what a user of Keras would write instead.
STOCK = {
    BatchNormalization: stock_normalization,
    Conv2D: keras.layers.Conv2D.from_config,
    Dense: keras.layers.Dense.from_config,
    DepthwiseConv2D: keras.layers.DepthwiseConv2D.from_config,
    FusedActivation: keras.layers.Activation.from_config,
    FusedLayerNormalization: keras.layers.LayerNormalization.from_config,
    SameConv2D: stock_convolution,
    LocalResponseNormalization: stock_response_normalization,
    Gelu: stock_gelu,
    GroupedConv2D: stock_grouped,
}


def with_stock_layers(model: keras.Model) -> keras.Model:
    """The same network with the layers of Keras and TensorFlow in place of ours."""

    def stock(layer):
        settings = layer.get_config()
        if type(layer) not in STOCK:
            return type(layer).from_config(settings)
        settings.pop("device_kind", None)
        return STOCK[type(layer)](settings)

    return copied(model, keras.models.clone_model(model, clone_function=stock))


def copied(model: keras.Model, clone: keras.Model) -> keras.Model:
    """The clone, with the values of the model."""
    values = zip(model.get_weights(), clone.weights, strict=True)
    clone.set_weights([x.reshape(variable.shape) for x, variable in values])
    return clone


def predict(model: keras.Model, batch: dict, num_steps: int, compiler: str):
    """Returns a function that predicts the batch so many times by a Keras model."""
    model = without_noise(model)
    model.compile(jit_compile="auto" if compiler == "auto" else compiler == "xla")
    dataset = tf.data.Dataset.from_tensors(batch["images"]).repeat(num_steps)
    return lambda: model.predict(dataset, verbose=0)


def fit(model: keras.Model, batch: dict, num_steps: int, compiler: str, strategy=None):
    """Compiles a Keras model; returns a function that trains it for so many steps."""
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
            jit_compile="auto" if compiler == "auto" else compiler == "xla",
        )

    def train():
        model.fit(dataset, steps_per_epoch=num_steps, epochs=1, verbose=0)

    return train


class TorchProcess(trainers.ChildProcess):
    """Steps of a network in PyTorch: with_torch/step.py, run by a Python that has it.

    Args:
        words: arguments of the program.
    """

    def __init__(self, python: str, *words: object):
        program = pathlib.Path(__file__).with_name("with_torch") / "step.py"
        # Another Python must not find our packages and libraries.
        environ = {k: v for k, v in os.environ.items() if k not in OURS}
        super().__init__([python, program, *map(str, words)], environ)

    @functools.cached_property
    def num_params(self) -> int:
        """The trained parameters; waits until it has started."""
        return int(self.answer())

    def __call__(self) -> float:
        """Takes the steps of its arguments; their seconds of processor time."""
        self.say("")
        return self.answer()


def torch_name(model: str) -> str:
    """The name of our network in with_torch/step.py, that of timm if timm has it."""
    weights = MODELS[model].pretrained
    return f"timm/{weights.timm.partition('.')[0]}" if weights else model


def start_torch(config: Config, *words: object) -> TorchProcess:
    """Starts a network in PyTorch, with as many trained parameters as ours."""
    model = builder.build(config).model
    num_params = sum(math.prod(x.shape) for x in model.trainable_variables)
    process = TorchProcess(*words)
    if process.num_params != num_params:
        raise SystemExit(
            f"{config.model} has {num_params:,} parameters here, and in PyTorch "
            f"{process.num_params:,}"
        )
    return process


def torch_processes(config: Config, options, predicts: bool) -> dict:
    """Name -> a call that starts its process."""
    if not options.torch:
        return {}
    words = options.torch, torch_name(config.model), config.image_size
    words = *words, config.batch_size, options.steps, config.precision
    start = functools.partial(start_torch, config, *words, *["--predict"] * predicts)
    return {"torch": start, "torch, compiled": functools.partial(start, "--compile")}


def tower_process(config: Config, predicts: bool) -> trainers.TrainerProcess:
    """Our steps by a tower for each core, which are the devices of another process."""
    fields = dataclasses.asdict(config) | {"num_towers": num_cores()}
    process = trainers.TrainerProcess(fields, "cpu", steps=1, predicts=predicts)
    process.wait()
    return process


def start(made: dict, options, stack: contextlib.ExitStack) -> tuple[dict, dict]:
    """Name -> a call that takes the steps of a round, and of processes also the id, of
    all things or those of --by."""
    things, pids = {}, {}
    for name in [name for name in made if name in (options.by or made)]:
        things[name] = thing = made[name]()
        if isinstance(thing, trainers.ChildProcess):
            stack.callback(thing.close)
            pids[name] = thing.pid
        if isinstance(thing, trainers.TrainerProcess):
            things[name] = functools.partial(thing.train, options.steps)
    return things, pids


def create_things(config: Config, options, chosen, predicts: bool) -> dict:
    """Name -> a call that returns a process, or a call that takes a round's steps."""
    parts = builder.build(config, device_kind=chosen.kind)
    batch = trainers.first_batch(parts)
    with tf.device(chosen.towers[0]):
        batch = tf.nest.map_structure(tf.identity, batch)

    def model():
        built = builder.build(config, device_kind=chosen.kind).model  # on the host
        with tf.device(chosen.towers[0]):
            return copied(built, keras.models.clone_model(built))

    def stock_model():
        policy = keras_settings(POLICIES[options.precision])
        with policy, tf.device(chosen.towers[0]):
            return with_stock_layers(model())

    def train(**fields):
        replaced = dataclasses.replace(config, **fields)
        if predicts:
            take = trainers.predictions(parts, chosen)
        else:
            take = trainers.create_on_constant_batch(replaced, parts, chosen).train
        return functools.partial(take, options.steps)

    def by_keras(create, *strategy):
        take = predict if predicts else fit
        return take(create(), batch, options.steps, options.compile, *strategy)

    num_towers = len(chosen.towers)
    things = {"towers": lambda: train(num_towers=1), "fit": lambda: by_keras(model)}
    if any(type(layer) in STOCK for layer in parts.model.layers):
        things["fit, stock layers"] = lambda: by_keras(stock_model)
    if num_towers > 1 and not predicts:
        strategy = {"strategy": "replicated", "num_towers": num_towers}
        things["replicated"] = lambda: train(**strategy)
        things["mirrored"] = lambda: by_keras(
            model, tf.distribute.MirroredStrategy(list(chosen.towers))
        )
    elif chosen.kind == "CPU":
        things["towers, one for each core"] = functools.partial(
            tower_process, config, predicts
        )
    return things


def main() -> None:
    parser = measure.create_parser(__doc__)
    parser.add_argument("--models", type=measure.names, default="cnn,resnet20")
    parser.add_argument("--work", type=measure.names, default="train")
    parser.add_argument("--by", type=lambda text: text.split(";"))
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--num_towers", type=int, default=1)
    parser.add_argument("--image_size", type=int, default=32, help="if synthetic")
    parser.add_argument("--torch", metavar="PYTHON", default="")
    options = parser.parse_args()
    if options.num_towers > 1 and len(options.models) > 1:
        names = ",".join(options.models)
        parser.error(
            f"--num_towers={options.num_towers} with --models={names}: in one "
            "process the collectives of two MirroredStrategies clash; name one network"
        )
    if options.torch and options.precision not in ("float32", "bfloat16"):
        parser.error(
            f"--precision={options.precision} with --torch: on CPUs its autocast has "
            "bfloat16 only"
        )
    fields = trainers.STEP_ALONE | measure.dataset(options)
    fields |= {"optimizer": "sgd", "learning_rate": LEARNING_RATE}
    # A long run, in which compile=auto is XLA on GPUs.
    fields |= {"momentum": MOMENTUM, "schedule": "constant", "num_epochs": 1e4}
    fields |= {"batch_size": options.batch_size, "precision": options.precision}
    fields |= {"compile": options.compile, "image_size": options.image_size}
    configs = [Config(**fields, model=name) for name in options.models]

    # What runs on one of several devices has all cores too.
    chosen = devices.configure(options.device, options.num_towers, core_per_tower=False)
    dtype = tf.as_dtype(options.precision)
    rates = [measure.matrix_rate(dtype, chosen.towers)]
    print(measure.report_head("The same step by other programs"))
    print(
        f"{options.precision}, compiler {options.compile}, batch {options.batch_size} "
        f"of {options.image_size}x{options.image_size} images, {options.num_towers} "
        f"device(s); {options.rounds} rounds of {options.steps} steps, one more to "
        "warm up\n\n"
        + measure.table_head(
            "network | by | work | images/s, median | time / first (min, median, max) "
            "| MB at the peak"
        )
    )
    for config, work in itertools.product(configs, options.work):
        predicts = work == "predict"
        with contextlib.ExitStack() as stack:
            made = create_things(config, options, chosen, predicts)
            made |= torch_processes(config, options, predicts)
            things, pids = start(made, options, stack)
            wall, _ = measure.in_turn(things, options.rounds)
            peaks = {k: measure.process_bytes("VmHWM", x) for k, x in pids.items()}
        rates.append(measure.matrix_rate(dtype, chosen.towers))
        first = next(iter(things))
        for name in things:
            secs = statistics.median(wall[name]) / options.steps
            spread = measure.ratios_text(wall, name, first)
            peak = f"{peaks[name] / 1e6:.0f}" if name in peaks else ""
            cells = f"{options.batch_size / secs:.1f}", spread, peak
            print(measure.table_row(config.model, name, work, *cells), flush=True)
    print(f"\nBefore and after each network: {measure.rates_text(rates)}.")


if __name__ == "__main__":
    measure.run(main)
