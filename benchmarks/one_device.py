"""What `benchmarks.scaling --paper` starts from: the costs of one device, measured."""

import argparse
import os
import pathlib
import statistics
import tempfile
import time

from benchmarks import measure, overlap, trainers
from benchmarks.trainer_process import TrainerProcess
from towers import build
from towers.config import Config
from towers.config.recipes import load_recipe
from towers.parallel.devices import Devices
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer

FOLDER = pathlib.Path(__file__).resolve().parent
RECIPES = FOLDER.parent / "configs"


def measure_models(options: argparse.Namespace) -> dict:
    load = os.getloadavg()[0]
    chosen = measure.all_devices(options.device, 1)
    rate = measure.matrix_rate(devices=chosen.towers[:1])
    models = {name: _measure(options, chosen, name) for name in options.models}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": measure.machine(),
        "load": load,
        "matrix_rate": rate,
        "models": models,
    }


def _measure(options: argparse.Namespace, chosen: Devices, model: str) -> dict:
    """The numbers of one network on one device."""
    recipe = load_recipe(f"cifar10_{model}", RECIPES)
    fields = trainers.STEP_ALONE | measure.dataset(options)
    fields |= {"model": model, "batch_size": options.batch_size, "num_towers": 1}
    fields |= {"device": options.device, "augment": recipe.augment}
    started = time.perf_counter()
    process = TrainerProcess(FOLDER.parent, fields, options.device, 1, ready=False)
    process.wait()
    start_secs = time.perf_counter() - started
    process.close()

    config = Config(**fields)
    parts = build.build(config, device_kind=chosen.kind)
    trainer = trainers.create_trainer(config, trainers.on_still_batch(parts), chosen)
    trainer.train(5)
    step_secs = []
    measure.in_turn(
        {"step": lambda: step_secs.append(_secs(lambda: trainer.train(1)))},
        options.calls,
    )
    stream = iter(parts.train_batches.stream(0))
    measure.draw(stream, overlap.FILLING_STEPS)
    drawing_secs = _secs(lambda: measure.draw(stream, options.steps * 10))
    state = trainer.state()
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(folder)

        def save(step):
            checkpointer.save(Snapshot(step, trainer.state(), {}))

        save_secs = [_secs(lambda step=step: save(step)) for step in range(5)]
    summed = [x for name, x in state.items() if name.startswith(("params/", "state/"))]
    return {
        "kind": chosen.kind,
        "images": config.batch_size,
        "step_secs": [round(secs, 7) for secs in step_secs[1:]],
        "num_bytes": sum(x.nbytes for x in summed if x.dtype.kind == "f"),
        "input_images_per_sec": round(
            options.steps * 10 * config.batch_size / drawing_secs
        ),
        "save_secs": round(statistics.median(save_secs), 4),
        "start_secs": round(start_secs, 2),
    }


def _secs(function):
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
