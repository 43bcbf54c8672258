"""Two workers end where `replicated` ends with two towers, whatever the options."""

import contextlib

import numpy as np
import pytest
from machines import machines
from small_runs import records, saved

from towers.config import Config
from towers.training.train import train

COMMON = {
    "dataset": "shapes",
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
EVALUATED = {"eval_every_epochs": 0.006}
OPTIONS = {
    "mixing, evaluation, clock": {
        **{"mixup": 0.3, "cutmix": 1.0, "random_erasing": 0.5, "color_jitter": 0.3},
        **EVALUATED,
        "tta": "translate",
        "summary_every_secs": 1e-6,
        "steps_per_loop": 1,
    },
    "accumulation, resident": {
        **{"accumulate_steps": 3, "clip_norm": 0.5, "weight_decay": 0.01},
        "input": "resident",
    },
    "float16, held out": {"precision": "float16", "validation_fraction": 0.3}
    | EVALUATED,
    "sync": {"model": "resnet20", "width": 0.25, "batch_norm": "sync"},
    "muon, phases": {
        **{"model": "speedrun", "width": 0.125, "optimizer": "muon"},
        "early_sizes": "16:0.0005",
    },
    "dropout": {"model": "alexnet", "width": 0.02},
    "skip": {"on_nonfinite": "skip", "learning_rate": 1e30},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_two_workers_end_where_two_towers_end(name, tmp_path):
    options = COMMON | OPTIONS[name]
    alone, together = tmp_path / "towers", tmp_path / "workers"
    train(alone, Config(**options, strategy="replicated", num_towers=2))
    flags = [f"--{k}={v}" for k, v in options.items()]
    flags += ["--strategy=multi_worker", "--num_towers=1", f"--workdir={together}"]
    with machines(2) as network, contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(network.start(i, tmp_path, *flags)) for i in range(2)
        ]
        for worker in workers:
            assert worker.wait(300) == 0, worker.output
    expected, found = saved(alone).tensors, saved(together).tensors
    assert set(found) == set(expected)
    for key, value in expected.items():
        np.testing.assert_allclose(
            found[key], value, rtol=1e-3, atol=2e-5, err_msg=f"{name}: {key}"
        )
    for mine, theirs in zip(records(together), records(alone), strict=True):
        assert set(mine) == set(theirs)
        for key in theirs:
            # What is not a number is written as None.
            ours, expected = (np.array(x[key], float) for x in (mine, theirs))
            np.testing.assert_allclose(
                ours, expected, rtol=1e-3, atol=1e-3, err_msg=key
            )
