"""The result of a training: its history, and the trained network."""

import json

import numpy as np
import pytest
from small_runs import NUM_TEST, arrays, small_config

from towers import load_run
from towers.training.result import create_history
from towers.training.train import train

pytestmark = pytest.mark.usefixtures("small")


def test_a_run_in_two_parts_has_the_history_of_its_file_and_its_network(tmp_path):
    config = small_config(eval_every_epochs=1.0, num_towers=2)
    train(tmp_path, small_config(eval_every_epochs=1.0, max_steps=5))
    for _ in range(2):  # the second finds the run finished
        result = train(tmp_path, config)
        history = result.history
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        lines = {line["step"]: line for line in map(json.loads, lines)}
        assert set(history) == {name for x in lines.values() for name in x} - {"step"}
        for name in ("loss", "test_accuracy", "test_accuracy_ema", "epoch"):
            steps, values = history[name]
            assert steps.tolist() == [s for s, line in lines.items() if name in line]
            assert values.tolist() == [lines[step][name] for step in steps]
        steps, losses = history["tower_losses"]  # of one tower, then of two
        assert losses.shape == (len(steps), 2)
        assert np.isnan(losses[:, 1]).tolist() == [step <= 5 for step in steps]
        assert losses[-1].tolist() == lines[steps[-1]]["tower_losses"]
        assert_holds_the_network(result, tmp_path)


def assert_holds_the_network(result, workdir):
    images, labels = arrays(NUM_TEST, 1)
    inputs = result.network.preprocess(images)
    for model, name in ((result.model, ""), (result.model_ema, "_ema")):
        correct = np.sum(np.argmax(model(inputs), 1) == labels)
        assert correct / NUM_TEST == result.history[f"test_accuracy{name}"].values[-1]
    loaded = load_run(workdir)
    np.testing.assert_array_equal(loaded.model(inputs), result.model(inputs))
    kernel = result.model.get_layer("logits").kernel
    np.testing.assert_array_equal(kernel, result.state["params/logits/kernel"])


def test_what_was_not_finite_or_not_there_is_nan_in_the_history():
    lines = [{"step": 1, "x": 2, "y": [1]}, {"step": 3, "x": None, "y": [2, None, 4]}]
    history = create_history(lines)
    np.testing.assert_array_equal(history["x"], [[1, 3], [2, np.nan]])
    nan = np.nan
    np.testing.assert_array_equal(history["y"].values, [[1, nan, nan], [2, nan, 4]])
    assert create_history([]) == {}
