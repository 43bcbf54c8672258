"""Two workers end where `replicated` ends with two towers, whatever the options."""

import json

import numpy as np
import pytest
from machines import machines

from towers import training
from towers.config import Config
from towers.run.checkpointer import Checkpointer

COMMON = {
    "dataset": "embedded",
    "model": "lenet",
    "device": "cpu",
    "batch_size": 33,  # does not divide
    "learning_rate": 0.01,
    "ema_decay": 0.9,
    "max_steps": 4,
    "eval_every_epochs": 0.0,
    "summary_every_steps": 2,
    "log_every_steps": 2,
}
OPTIONS = {
    "mixing": {"mixup": 0.3, "cutmix": 1.0, "random_erasing": 0.5, "color_jitter": 0.3},
    "accumulation": {"accumulate_steps": 3, "clip_norm": 0.5, "weight_decay": 0.01},
    "float16": {"precision": "float16"},
    "sync": {"model": "resnet20", "width": 0.25, "batch_norm": "sync"},
    "muon": {"model": "speedrun", "width": 0.125, "optimizer": "muon"},
    "phases": {"model": "speedrun", "width": 0.125, "early_sizes": "16:0.0005"},
    "resident": {"input": "resident"},
    "dropout": {"model": "alexnet", "width": 0.02},
    "evaluation": {"eval_every_epochs": 0.006, "tta": "translate_unsure"},
    "clock": {"summary_every_secs": 1e-6, "steps_per_loop": 1},
    "held out": {"validation_fraction": 0.3, "eval_every_epochs": 0.006},
    "skip": {"on_nonfinite": "skip", "learning_rate": 1e30},
}


def records(folder):
    return [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]


def tensors(folder):
    return Checkpointer(folder / "checkpoints", pytest.fail).restore().tensors


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_two_workers_end_where_two_towers_end(name, tmp_path):
    options = COMMON | OPTIONS[name]
    config = Config(**options, strategy="replicated", num_towers=2)
    training.train(tmp_path / "towers", config)
    flags = [f"--{k}={v}" for k, v in options.items()]
    flags += ["--strategy=multi_worker", "--num_towers=1"]
    with machines(2) as network:
        logs = [tmp_path / "0.log", tmp_path / "1.log"]
        workers = [
            network.start(i, log, *flags, f"--workdir={tmp_path / 'workers'}")
            for i, log in enumerate(logs)
        ]
        codes = [worker.wait(300) for worker in workers]
        assert codes == [0, 0], "".join(log.read_text() for log in logs)
    expected, found = tensors(tmp_path / "towers"), tensors(tmp_path / "workers")
    assert set(found) == set(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(
            found[key], value, rtol=1e-3, atol=2e-5, err_msg=f"{name}: {key}"
        )
    for mine, theirs in zip(
        records(tmp_path / "workers"), records(tmp_path / "towers"), strict=True
    ):
        assert set(mine) == set(theirs)
        for key in set(theirs) - {"images_per_sec", "input_wait_percent"}:
            # What is not a number is written as None.
            ours, expected = (np.array(x[key], float) for x in (mine, theirs))
            np.testing.assert_allclose(
                ours, expected, rtol=1e-3, atol=1e-3, err_msg=key
            )
