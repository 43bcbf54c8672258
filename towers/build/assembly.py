"""Trainers and feeds from a Config and its parts, on the devices of a run."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.build.builder import Parts, build
from towers.config import Config, factories
from towers.data.batches import EvalBatches, TrainBatches
from towers.data.classes import class_weights, logit_offsets
from towers.data.resident import Resident
from towers.data.share import Share, shares
from towers.data.sources import Source, num_bytes
from towers.errors import ConfigError
from towers.optim import losses
from towers.parallel import devices as parallel_devices
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.compilation import why_not_lowered, why_not_xla
from towers.parallel.copies import Initial
from towers.parallel.devices import Devices
from towers.parallel.loop import Batch, Feed, Streams
from towers.parallel.reduce import split_batch
from towers.parallel.strategies.strategy import Strategy
from towers.parallel.trainer import (
    EvaluationOptions,
    Network,
    Objective,
    StepOptions,
    SynchronousTrainer,
    Trainer,
)
from towers.parallel.workers import SINGLE_WORKER, Workers
from towers.threads import num_cores

# Steps of a run from which compile=auto uses XLA. On an H200 it saves 4 to 8 ms a step
# and needs 15 to 50 s to compile.
XLA_STEPS = 5_000
# Maximum bytes of images that input=auto puts on a GPU; CIFAR-10 has 154 MB.
MAX_RESIDENT_BYTES = 2**30


def configure_devices(
    config: Config, *, device: str = "", for_training: bool = True
) -> Devices:
    """Return the devices of the towers; ConfigError if the machine lacks them."""
    if config.deterministic and for_training:
        parallel_devices.enable_determinism()
    # Without moments of their own, several towers train the same network as one: 1.2
    # times as fast with EfficientNet-Lite0 on two cores.
    cores = num_cores()
    is_same = config.batch_norm == "frozen" and config.strategy in ("auto", "towers")
    return parallel_devices.configure(
        device or config.device,
        config.num_towers,
        config.device_order,
        config.device_memory_mb,
        cpu_towers=cores if is_same and config.batch_size >= 8 * cores else 1,
    )


def share_of(config: Config, devices: Devices, workers: Workers) -> Share:
    """Return one worker's images of each batch; ConfigError if towers lack some."""
    count = max(1, len(devices.towers) // config.devices_per_network)
    num_towers, first = workers.size * count, workers.index * count
    if num_towers > config.batch_size:
        why = "every tower needs an image; raise --batch_size or lower --num_towers"
        raise ConfigError(f"batch_size={config.batch_size}, {num_towers} towers: {why}")
    images = shares(config.batch_size, num_towers)
    before, own = sum(images[:first]), sum(images[first : first + count])
    return Share(before, own, config.batch_size)


def assemble(
    config: Config,
    devices: Devices,
    workers: Workers = SINGLE_WORKER,
    teacher: keras.Model | None = None,
    **options: Any,
) -> tuple[Parts, Trainer]:
    """Return the parts of a training or an evaluation, and their trainer.

    The loss also follows the outputs of `teacher`, a trained network. `options` are
    those of `build`, such as `for_training=False` for an evaluation.
    """
    share = share_of(config, devices, workers)
    parts = build(config, device_kind=devices.kind, share=share, **options)
    return parts, create_trainer(config, parts, devices, workers, teacher=teacher)


def create_trainer(
    config: Config,
    parts: Parts,
    devices: Devices,
    workers: Workers = SINGLE_WORKER,
    feed: Feed | None = None,
    teacher: keras.Model | None = None,
) -> Trainer:
    """Return a trainer; `feed` replaces the batches of the parts."""
    choice, batches = config.choice_of("strategy"), parts.train_batches
    strategy = create_strategy(config, parts, devices, workers)
    objective = create_objective(config, parts, teacher)
    compiles, why_not = choose_xla(config, parts, devices, objective)
    is_one_gpu = devices.kind == "GPU" and len(devices.towers) == 1
    compiles_input = compiles and is_one_gpu and batches is not None
    if compiles_input and feed is None:
        elements = batches.stored_stream(0).element_spec
        compiles_input = compiles_on(devices.towers[0], batches.process, elements)
    network = Network(
        model=parts.model,
        phases=parts.phases,
        sync_batch_norm=config.batch_norm == "sync",
        recompute=config.recompute and batches is not None,
        compile_towers=compiles,
        compile_input=compiles_input,
        not_compiled=why_not,
    )
    if batches is not None and feed is None:
        lead_devices = devices.towers[:: strategy.num_shards]
        feed = create_feed(config, batches, lead_devices, strategy.sizes)
    steps = StepOptions(
        micro_batch_size=config.batch_size,
        accumulate_steps=1 if choice.asynchronous else config.accumulate_steps,
        feed=feed,
        scale_loss=config.precision == "float16" and not choice.asynchronous,
        skip_not_finite=config.on_nonfinite == "skip",
        has_rate_factor=config.choice_of("schedule").by_accuracy,
    )
    evaluations = EvaluationOptions(
        tta=factories.create("tta", config.tta),
        keeps_logits=config.choice_of("best_by").is_in_a_file,
    )
    assembled = strategy, network, objective, parts.update, steps, evaluations, workers
    if not choice.asynchronous:
        return SynchronousTrainer(*assembled)
    options = config.options_of("strategy")
    options = {name: options[name] for name in choice.trainer_options}
    return AsynchronousTrainer(*assembled, **options)


def create_strategy(
    config: Config, parts: Parts, devices: Devices, workers: Workers
) -> Strategy:
    """Return the strategy of a run with the initial values of its network."""
    if config.parameter_device == "gpu" and devices.kind != "GPU":
        raise ConfigError(
            "parameter_device=gpu, but the towers run on the CPU; drop one of the two"
        )
    in_16_bits = config.precision in ("bfloat16", "float16")
    if devices.kind == "GPU" and in_16_bits and not config.deterministic:
        parallel_devices.normalize_in_nhwc(parts.model)
    create = factories.resolve("strategy", config.strategy)
    options = factories.named_by(create, config.options_of("strategy"))
    has_processes = config.choice_of("strategy").processes
    if has_processes:
        options["workers"] = workers
    if options.get("all_reduce_dtype") == "float32":
        options["all_reduce_dtype"] = ""  # a network in float64 keeps its own
    if not has_processes and options.get("all_reduce") == "auto":
        # NCCL between physical GPUs; a parameter device needs no all-reduce.
        are_physical = devices.kind == "GPU" and not devices.share_gpus
        in_full = config.all_reduce_dtype == "float32"
        is_reduced = options.get("parameter_device", "auto") == "auto"
        is_nccl = are_physical and in_full and is_reduced and len(devices.towers) > 1
        options["all_reduce"] = "nccl" if is_nccl else "star"
    return create(
        Initial.of(parts.model),
        parts.update,
        devices.towers,
        config.batch_size,
        **options,
    )


def create_objective(
    config: Config, parts: Parts, teacher: keras.Model | None = None
) -> Objective:
    """Return the loss of the run; weights of classes come from its training images."""
    multi_label = parts.data.multi_label
    if multi_label and teacher is not None:
        why = "distillation needs one label an image, not several; leave it out"
        raise ConfigError(f"teacher={config.teacher}: {why}")
    create = functools.partial(losses.create_loss, config.loss, multi_label=multi_label)
    options, by_class = config.options_of("loss"), {}
    options |= dict.fromkeys(("class_weights", "pos_weights", "logit_adjustment"))
    if parts.train_batches is not None:
        source, names = parts.train_batches.source, parts.data.class_names
        for name in ("class_weights", "pos_weights"):
            if value := getattr(config, name):
                by_class[name] = class_weights(value, source, names, name)
        if config.logit_adjustment:
            by_class["logit_adjustment"] = logit_offsets(
                config.logit_adjustment, source, len(names)
            )
    loss_fn = create(**options | by_class)
    if parts.data.unknown is not None:
        loss_fn = losses.with_uniform_targets(loss_fn)
    if teacher is not None:
        loss_fn = losses.distillation(
            loss_fn, config.distillation_temperature, config.distillation_weight
        )
    return Objective(loss_fn=loss_fn, eval_loss_fn=create(**options), teacher=teacher)


def choose_xla(
    config: Config, parts: Parts, devices: Devices, objective: Objective
) -> tuple[bool, str]:
    """Return whether XLA compiles the towers, and why not if that is worth a line."""
    is_asked = config.compile == "xla"
    on_gpus = devices.kind == "GPU"
    if not on_gpus or parts.train_batches is None or config.compile == "none":
        return is_asked, ""
    if not is_asked and parts.total_steps < XLA_STEPS:
        return False, f"a run of fewer than {XLA_STEPS:,} steps would not gain by it"
    why_not = _why_not_xla(config, parts, devices.towers[0], objective)
    if why_not and is_asked:
        raise ConfigError(f"compile=xla: {why_not}; set --compile=none")
    return not why_not, why_not


def _why_not_xla(config, parts, device, objective):
    """Return why XLA cannot compile the towers of GPUs; empty if it can."""
    if config.choice_of("strategy").sharded or config.batch_norm == "sync":
        return "layers transfer activations between GPUs"
    labels = tf.TensorSpec([], tf.int64)
    if parts.train_batches.mix is not None or parts.data.multi_label:
        labels = tf.TensorSpec([len(parts.data.class_names)], tf.float32)

    def loss_fn(logits, labels):
        # Logits stand for the teacher's.
        others = [] if objective.teacher is None else [logits]
        return objective.loss_fn(logits, labels, *others)

    return why_not_xla(parts.model, loss_fn, labels, device, config.deterministic)


def create_feed(
    config: Config, batches: TrainBatches, devices: Sequence[str], sizes: Sequence[int]
) -> Feed:
    """Return the batches of each tower: resident, copied ahead, or on the host."""
    per_tower = batches.split(sizes)
    if config.input == "resident":
        if num_bytes(batches.source) is None:
            why = "its images are not in memory; set --input=stream"
            raise ConfigError(f"input=resident with dataset={config.dataset}: {why}")
        return Resident(per_tower, devices)
    if "GPU" not in devices[0]:
        # One pipeline for all towers, which is traced once.
        split_fn = functools.partial(split_batch, sizes=sizes)
        stream = functools.partial(batches.stream, split_fn=split_fn)
        return Streams([stream], devices)
    first = per_tower[0]
    if not runs_on(devices[0], first.process, first.stored_stream(0).element_spec):
        return Streams([own.stream for own in per_tower], devices)
    is_asynchronous = config.choice_of("strategy").asynchronous
    if not is_asynchronous and config.input == "auto" and fits_on_gpus(batches.source):
        return Resident(per_tower, devices)
    return Streams(
        [own.stored_stream for own in per_tower],
        devices,
        [own.process for own in per_tower],
    )


def runs_on(
    device: str,
    process: Callable[[tf.Tensor, Batch], Batch],
    elements: Mapping[str, tf.TensorSpec],
) -> bool:
    """Return whether a device can compute `process` (see `Streams`), by trying it."""
    function = tf.function(process, autograph=False)
    before = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(False)
    try:
        with tf.device(device):
            function(*_first_step(elements))
    except tf.errors.InvalidArgumentError:
        return False
    finally:
        tf.config.set_soft_device_placement(before)
    return True


def compiles_on(
    device: str,
    process: Callable[[tf.Tensor, Batch], Batch],
    elements: Mapping[str, tf.TensorSpec],
) -> bool:
    """Return whether XLA can compile `process` (see `Streams`) for a device."""
    function = tf.function(process, autograph=False, jit_compile=True)
    kind = tf.DeviceSpec.from_string(device).device_type
    return not why_not_lowered(function, _first_step(elements), kind)


def _first_step(elements):
    """Return step 0 and zeros; int32 tensors of a GPU are in host memory."""
    return tf.constant(0, tf.int64), {
        k: tf.zeros(x.shape, tf.int64 if x.dtype == tf.int32 else x.dtype)
        for k, x in elements.items()
    }


def fits_on_gpus(source: Source) -> bool:
    """Return whether `input=auto` keeps the images on GPUs."""
    size = num_bytes(source)
    return size is not None and size <= MAX_RESIDENT_BYTES


def create_eval_feed(batches: EvalBatches, trainer: Trainer) -> Feed:
    """Return the batches of an evaluation: resident if GPUs hold them, or streams."""
    devices = trainer.devices[:: trainer.strategy.num_shards]
    per_tower = batches.split(len(devices))
    devices = devices[: len(per_tower)]
    if "GPU" in devices[0] and fits_on_gpus(batches.source):
        return Resident(per_tower, devices)

    def same(dataset: tf.data.Dataset, step: int) -> tf.data.Dataset:
        return dataset

    return Streams([functools.partial(same, x.stream()) for x in per_tower], devices)
