"""Speeds on the devices at hand: steps, input, scaling, a recipe.

Each section takes a `Setting`, writes its table and returns whether something is amiss.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from benchmarks import accuracy, measure, proofs, trainers
from benchmarks.checkouts import ROOT
from benchmarks.flops import flops_per_image
from benchmarks.setting import Setting, reason
from benchmarks.trainer_process import TrainerProcess
from towers import build
from towers.config import Config
from towers.config.recipes import load_recipe
from towers.parallel.devices import Devices

# Images of a step on one GPU.
BATCH_SIZES = {"cnn": 1024, "resnet20": 1024, "speedrun": 2000}
AS_IT_IS = "as it is"
# Name -> fields of Config, and options of a trainer's process.
ALTERNATIVES = {
    AS_IT_IS: ({}, {}),
    "layout optimizer off": ({}, {"grappler": {"layout_optimizer": False}}),
    "Grappler off": ({}, {"grappler": {"disable_meta_optimizer": True}}),
    "XLA": ({"compile": "xla"}, {}),
    "TF32 off": ({}, {"tf32": False}),
}


def step_fields(setting: Setting, model: str, **fields) -> dict:
    """Fields of Config for a step on one device; tiny on a CPU."""
    size = {"batch_size": BATCH_SIZES[model]}
    if setting.is_tiny:
        size = {"batch_size": 16, "width": 0.25}
    one = {"model": model, "num_towers": 1}
    return trainers.STEP_ALONE | setting.dataset() | size | one | fields


def ready_trainer(config: Config, devices: Devices):
    """A trainer on a batch that lies ready, and the FLOP of its step."""
    parts = trainers.on_still_batch(build.build(config, device_kind=devices.kind))
    trainer = trainers.create_trainer(config, parts, devices)
    return trainer, 3 * flops_per_image(parts.model) * config.batch_size


def steps_of_round(setting: Setting, trainer) -> int:
    """The number of steps that fill a round.

    The first steps, in which kernels are chosen, are slower and do not count.
    """
    trainer.train(2)
    started = time.perf_counter()
    trainer.train(5)
    return setting.steps_of_round((time.perf_counter() - started) / 5)


# Alternatives.


def alternatives(setting: Setting) -> bool:
    """Steps with TensorFlow's options changed over the step as it is.

    Each has a process of its own: cuDNN's choices, which a process keeps, do not
    distinguish steps with and without TF32.
    """

    amiss = []

    def row(model, precision):
        fields = step_fields(setting, model, precision=precision)
        processes = {
            name: TrainerProcess(ROOT, fields | more, setting.device, 5, **options)
            for name, (more, options) in ALTERNATIVES.items()
        }
        failed = {}
        try:
            for name, process in processes.items():
                try:
                    process.wait()
                except RuntimeError as error:
                    failed[name] = reason(error)
            started = time.perf_counter()
            processes[AS_IT_IS].train(5)
            step_secs = (time.perf_counter() - started) / 5
            num_steps = setting.steps_of_round(step_secs)
            things = {
                name: functools.partial(process.train, num_steps)
                for name, process in processes.items()
                if name not in failed
            }
            wall, _ = measure.in_turn(things, setting.rounds)
        finally:
            for process in processes.values():
                process.close()
        amiss.extend(failed)

        def cell(name):
            if name in failed:
                return failed[name]
            ratios = measure.ratios(wall, name, AS_IT_IS)
            first = processes[name].first_step_secs
            return f"{' '.join(f'{x:.3f}' for x in ratios)} ({first:.1f} s)"

        milliseconds = 1e3 * statistics.median(wall[AS_IT_IS]) / num_steps
        return f"{milliseconds:.3f}", *map(cell, ALTERNATIVES)

    cases = [("resnet20", "float32"), ("speedrun", "float32"), ("speedrun", "bfloat16")]
    cases = [("cnn", "float32")] if setting.is_tiny else cases
    setting.write(
        "Time of a step over that of the step as it is (min, median, max), one device, "
        f"a batch that lies ready, {setting.rounds} round(s) in turn, and in brackets "
        "the time to the first step while all of a row start. float32 has TF32 where "
        "the GPU has it.\n"
    )
    failed = setting.table(
        f"network | precision | ms a step | {' | '.join(ALTERNATIVES)}",
        {case: functools.partial(row, *case) for case in cases},
    )
    return bool(amiss or failed)


# A step against the matrix rate.


def shares(setting: Setting) -> bool:
    """The step of each network and precision against the matrix rate."""
    devices = setting.devices(several=False)

    def row(model, precision):
        config = Config(**step_fields(setting, model, precision=precision))
        memory = measure.PeakMemory(devices)
        trainer, flops = ready_trainer(config, devices)
        num_steps = steps_of_round(setting, trainer)
        peak, rates, dtype = memory.growth_bytes(), [], tf.as_dtype(precision)
        device = devices.towers[:1]
        things = {
            "rate": lambda: rates.append(measure.matrix_rate(dtype, device)),
            "step": functools.partial(trainer.train, num_steps),
        }
        wall, _ = measure.in_turn(things, setting.rounds)
        secs = np.array(wall["step"]) / num_steps
        return (
            config.batch_size,
            measure.spread(1e3 * secs),
            f"{config.batch_size / np.median(secs):,.0f}",
            f"{flops / np.median(secs) / 1e12:.3f}",
            f"{statistics.median(rates[1:]) / 1e12:.3f}",
            measure.spread(flops / secs / rates[1:]),
            f"{max(0, peak) / 1e6:,.0f}",
        )

    cases = [
        (model, precision)
        for precision in ("bfloat16", "float32", "float16")
        for model in ("speedrun", "resnet20", "cnn")
    ]
    setting.write(
        f"One device; {setting.rounds} round(s) in turn with matrix products of the "
        "same type, one more to warm up. float32 has TF32 where the GPU has it.\n"
    )
    return bool(
        setting.table(
            "network | precision | batch | ms a step (min, median, max) | "
            "images/s | TFLOP/s | matrix rate, TFLOP/s | share (min, median, max) | MB "
            "at the peak",
            {case: functools.partial(row, *case) for case in cases},
        )
    )


# Input.


def streamed_and_resident(setting: Setting) -> bool:
    """A step on streamed batches and on resident ones over one on a ready batch."""
    devices = setting.devices(several=False)

    def row(model, augment):
        fields = {"augment": augment, "precision": "bfloat16", "num_epochs": 1e4}
        config = Config(**step_fields(setting, model, **fields))
        parts = build.build(config, device_kind=devices.kind)
        still = trainers.on_still_batch(parts)
        all_trainers = {"ready": trainers.create_trainer(config, still, devices)}
        for kind in ("stream", "resident"):
            replaced = dataclasses.replace(config, input=kind)
            all_trainers[kind] = trainers.create_trainer(replaced, parts, devices)
        num_steps = steps_of_round(setting, all_trainers["ready"])
        waits = {kind: [] for kind in all_trainers}

        def train(kind):
            waits[kind].append(all_trainers[kind].train(num_steps)["input_wait_secs"])

        things = {kind: functools.partial(train, kind) for kind in all_trainers}
        wall, _ = measure.in_turn(things, setting.rounds)
        cells = [config.batch_size, num_steps]
        cells += [f"{1e3 * statistics.median(wall['ready']) / num_steps:.3f}"]
        for kind in ("stream", "resident"):
            ratios = measure.ratios(wall, kind, "ready")
            wait = 100 * np.divide(waits[kind][1:], wall[kind])
            cells += [" ".join(f"{x:.3f}" for x in ratios), f"{np.median(wait):.1f}"]
        return cells

    cases = [("speedrun", "translate_flip"), ("resnet20", "pad_crop_flip")]
    cases += [("cnn", "tutorial")]
    setting.write(
        f"bfloat16, one device, {setting.rounds} round(s), one more to warm up.\n"
    )
    return bool(
        setting.table(
            "network | augmentation | batch | steps in a round | ms a step, batch ready"
            " | streamed / ready (min, median, max) | input wait, percent | resident / "
            "ready (min, median, max) | input wait, percent",
            {case: functools.partial(row, *case) for case in cases},
        )
    )


# Several devices.


def scaling(setting: Setting) -> bool:
    """Strategies on several devices against one, at one batch and at a growing one."""
    devices = setting.devices()
    setting.remark_on(devices)
    count, model = len(devices.towers), "cnn"
    size = {} if setting.is_tiny else {"batch_size": 512}
    one = Config(**step_fields(setting, model, **size))
    alone, _ = ready_trainer(one, devices)
    num_steps = steps_of_round(setting, alone)
    base = functools.partial(alone.train, num_steps)

    def row(fields, num_towers, batch_size):
        changes = fields | {"num_towers": num_towers, "batch_size": batch_size}
        config = dataclasses.replace(one, **changes)
        trainer, _ = ready_trainer(config, devices)
        trainer.train(2)
        things = {"one": base, "all": functools.partial(trainer.train, num_steps)}
        wall, _ = measure.in_turn(things, setting.rounds)
        speed = batch_size * num_steps / statistics.median(wall["all"])
        times = (
            batch_size / one.batch_size / (1 if setting.shares_device else num_towers)
        )
        efficiency = times * np.divide(wall["one"], wall["all"])
        return f"{speed:,.0f}", measure.spread(efficiency)

    counts = sorted({n for n in (2, 4, 8, 16) if n < count} | {count}, reverse=True)
    cases = {}
    for n in counts if count > 1 else ():
        for kind, batch_size in (
            ("weak", n * one.batch_size),
            ("strong", one.batch_size),
        ):
            for name, fields in proofs.strategies(setting, devices).items():
                if fields["strategy"] != "model_parallel":
                    case = functools.partial(row, fields, n, batch_size)
                    cases[name, n, kind, batch_size] = case
    if setting.shares_device:
        setting.write(
            "The towers share one physical device: the efficiency is the speed over "
            "that of one tower, and shows what the parallel form costs.\n"
        )
    failed = setting.table(
        "strategy | towers | scaling | batch | images/s, median | efficiency (min, "
        "median, max)",
        cases,
    )
    return bool(failed)


# A recipe.


def recipe(setting: Setting) -> bool:
    """The speedrun recipe, run as users do."""
    config = load_recipe("cifar10_speedrun", ROOT / "configs")
    if not setting.data_dir:
        setting.write("Synthetic images, whose accuracy means nothing.\n")
    tiny = {"batch_size": 64, "width": 0.25, "max_steps": 3, "tta": "none"}
    fields = setting.dataset() | {"device": setting.device}
    fields |= tiny if setting.is_tiny else {}
    rows = [{"precision": name} for name in ("float32", "bfloat16")]

    def row(changes: Mapping):
        result = accuracy.run(dataclasses.replace(config, **fields, **changes), 0.0)
        numbers = ("secs", "start_secs", "train_secs", "images_per_sec")
        return (
            f"{result['plain']:.4f}",
            f"{result['accuracy']:.4f}",
            *("" if result[n] is None else f"{result[n]:,.1f}" for n in numbers),
            f"{result['rate'] / 1e12:.3f}",
        )

    return bool(
        setting.table(
            "precision | accuracy, plain | by TTA | seconds in all | first calls, s | "
            "training, s | images/s after the first call | matrix rate, TFLOP/s",
            {(r["precision"],): functools.partial(row, r) for r in rows},
        )
    )
