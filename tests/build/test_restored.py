"""A run's network without its data set: `load_run`, and what is stored for it."""

import dataclasses
import json

import numpy as np
import pytest
import small_runs
from marks import slow
from small_runs import CLASS_NAMES, NUM_TEST, arrays, numpy_logits, saved, small_config

from towers import load_run
from towers.data.sets import synthetic
from towers.data.sources import Subset
from towers.errors import ConfigError, DataError
from towers.evaluation.evaluate import evaluate
from towers.run.dataset_info import DatasetInfo
from towers.run.folder import RunFolder
from towers.run.stored_config import evaluation_config
from towers.training.train import train

pytestmark = pytest.mark.usefixtures("small")


def lose_the_data(monkeypatch):
    def load(data_dir):
        raise DataError("moved away")

    monkeypatch.setattr(synthetic, "load", load)


def test_without_the_data_the_logits_are_those_of_numpy(half_way, monkeypatch):
    lose_the_data(monkeypatch)
    run = load_run(half_way)
    tensors = saved(half_way).tensors
    assert (run.step, run.class_names) == (5, CLASS_NAMES)
    assert run.config == small_config(max_steps=5)
    images = arrays(NUM_TEST, 1)[0]
    for model, kind in ((run.model, "params"), (run.model_ema, "averages")):
        logits = numpy_logits(half_way, images, kind)
        ours = model(run.preprocess(images)).numpy()
        np.testing.assert_allclose(ours, logits, rtol=1e-4, atol=1e-5)
    assert np.any(tensors["params/logits/bias"] != tensors["averages/logits/bias"])


@pytest.mark.row(34)
def test_an_older_step_has_the_options_that_it_was_trained_with(half_way):
    changed = small_config(augment="translate_flip")
    train(half_way, changed, allow_change=("augment",))
    for step, augment in ((5, "none"), (10, changed.augment)):
        assert load_run(half_way, step=step).config.augment == augment
        assert evaluation_config(RunFolder(half_way), step).augment == augment
    assert load_run(half_way).config.augment == changed.augment


# What is stored, and what it is compared with.


@pytest.mark.parametrize(
    "change,words",
    [
        ({"class_names": (*"abcd", "z")}, "class 4 was e and is z"),
        ({"class_names": tuple("abcdef")}, "it had 5 classes and has 6"),
        slow({"mean": (1.0, 2.0, 3.0)}, "mean and standard deviation .* were .* and"),
        ({"train": np.arange(49)}, "it had 50 training images and has 49"),
        slow({"train": np.arange(50)[::-1]}, "labels .* of its training images, or"),
    ],
)
@pytest.mark.row(34)
def test_row_34_another_data_set_does_not_continue_a_run(
    half_way, monkeypatch, capfd, change, words
):
    data_set = small_runs.small_data()
    if "train" in change:
        change = {"train": Subset(data_set.train, change["train"])}
    data_set = dataclasses.replace(data_set, **change)
    expected = evaluate(half_way)
    small_runs.use(monkeypatch, data_set=data_set)
    way = "--init_from=.*" if "class_names" in change else "--allow_change=dataset"
    with pytest.raises(ConfigError, match=f"{words}.*{way}"):
        train(half_way, small_config())
    if "class_names" not in change:  # an evaluation preprocesses as the training
        capfd.readouterr()
        assert evaluate(half_way) == expected
        is_warned = f"run: {words.split()[0]}" in capfd.readouterr().out
        assert is_warned == ("train" in change)
    else:
        with pytest.raises(ConfigError, match=words):
            evaluate(half_way)
        with pytest.raises(ConfigError, match=f"{words}.*--init_from={half_way}"):
            train(half_way, small_config(), allow_change=("dataset",))
        config = small_config(init_from=str(half_way))
        assert train(half_way.parent / "new", config).step == 10
        assert "new: z" in (out := capfd.readouterr().out) or "new: f" in out
        return
    train(half_way, small_config(), allow_change=("dataset",))
    stored = json.loads((half_way / "dataset_info.json").read_text())
    kept = DatasetInfo.of(data_set)
    assert all(tuple(stored[x]) == getattr(kept, x) for x in ("class_names", "mean"))
    assert stored["num_train"] == data_set.train.num_examples
