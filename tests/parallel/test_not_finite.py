"""Steps that are not finite and skipped."""

import dataclasses

import networks
import numpy as np
import pytest
import small_runs
from marks import slow
from recipes import Recipe, create_trainer, have_steps_of_gpus, parted
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from towers.errors import NumericError
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.strategies.model_parallel import model_parallel
from towers.parallel.strategies.replicated import replicated
from towers.parallel.strategies.towers import towers
from towers.training.train import train

pytestmark = pytest.mark.usefixtures("several_vectors")

# A class, its devices and options. One asynchronous tower: the order of the updates of
# several is a matter of time, see test_async_towers.py.
KINDS = [
    (towers, 2, {}),
    (replicated, 2, {"accumulate_steps": 2}),
    (model_parallel, 4, {"group_size": 2}),
    (AsynchronousTrainer, 1, {}),
]


def create(cls, network, batches, num_devices, **options):
    options = {"skip_not_finite": True} | options
    return create_trainer(cls, network, Recipe(), batches, num_devices, **options)


def batches_with(steps):
    """Create a batch of 8 images per letter: "b" is bad in the last image, "g" good."""
    batches = networks.random_batches(len(steps), 8)
    for batch, letter in zip(batches, steps, strict=True):
        if letter == "b":
            batch["images"][7, 1, 1, 0] = np.nan
    return batches


def of_counts(state):
    return parted(state, "skipped/")[0]


def without_counts(state):
    return parted(state, "skipped/")[1]


@pytest.mark.parametrize(
    "cls,num_devices,options", [KINDS[0], *(slow(*kind) for kind in KINDS[1:])]
)
@pytest.mark.row(14)
def test_a_bad_step_is_counted_and_changes_nothing_else(cls, num_devices, options):
    """Later steps equal those of a trainer that skips nothing, from that state."""
    network, batches = networks.residual_network(), batches_with("ggbgg")
    trainer = create(cls, network, batches, num_devices, **options)
    assert trainer.train(2)["skipped_steps"] == 0
    before = trainer.state()
    metrics = trainer.train(1)
    assert (metrics["step"], metrics["skipped_steps"]) == (3, 1)
    assert np.isnan(metrics["loss"]) and np.isnan(metrics["gradient_norm"])
    skipped = trainer.state()
    expected = without_counts(before) | {"step": np.int64(3)}
    small_runs.assert_equal_states(without_counts(skipped), expected)
    assert of_counts(skipped) == {"skipped/total": 1, "skipped/in_a_row": 1}

    assert trainer.train(2)["skipped_steps"] == 1
    after = trainer.state()
    assert of_counts(after) == {"skipped/total": 1, "skipped/in_a_row": 0}
    stopping = create(
        cls, network, batches, num_devices, skip_not_finite=False, **options
    )
    stopping.load(expected)
    stopping.train(2)
    small_runs.assert_equal_states(without_counts(after), stopping.state())
    kernel = "params/logits/kernel"
    assert np.any(after[kernel] != before[kernel])


@pytest.mark.parametrize(
    "cls,num_devices,options",
    [kind if kind is KINDS[1] else slow(*kind) for kind in KINDS],
)
@pytest.mark.row(14)
def test_ten_in_a_row_end_the_run_and_nine_do_not(cls, num_devices, options):
    network, batches = networks.plain_network(), batches_with("g" + 9 * "b" + "g")
    batches += batches_with(22 * "b")  # asynchronous towers read ahead
    trainer = create(cls, network, batches, num_devices, **options)
    trainer.train(6)
    five = trainer.state()
    assert of_counts(five) == {"skipped/total": 5, "skipped/in_a_row": 5}
    assert trainer.train(5)["skipped_steps"] == 9
    good = trainer.state()
    trainer.load(five)
    assert trainer.train(5)["skipped_steps"] == 9
    small_runs.assert_equal_states(trainer.state(), good)

    assert trainer.train(4)["skipped_steps"] == 13
    before = trainer.state()
    message = (
        rf"^step 21: the loss or a gradient of tower {len(trainer.strategy.sizes) - 1} "
        r"\(loss .*\) is not finite, 10 times in a row; "
    )
    for start in (good, before, None):  # the last time from where it ended
        if start:
            trainer.load(start)
        with pytest.raises(NumericError, match=message):
            trainer.train(11)
        expected = good | {
            "skipped/total": np.int64(18),
            "skipped/in_a_row": np.int64(9),
            "step": np.int64(20),
        }
        small_runs.assert_equal_states(trainer.state(), expected)


@pytest.mark.row(14)
@pytest.mark.parametrize("of_gpus", [slow(False), True])
@pytest.mark.parametrize(
    "cls,num_devices,options", [slow(*KINDS[0]), KINDS[1], slow(*KINDS[2])]
)
def test_a_bad_step_ends_the_call_at_the_one_before(
    cls, num_devices, options, of_gpus, monkeypatch
):
    """On GPUs the host notices it at the end of a call; then a good batch works."""
    network, batches = networks.residual_network(), batches_with("ggbgg")
    if of_gpus:
        have_steps_of_gpus(monkeypatch)
    options = options | {"skip_not_finite": False}
    trainer = create(cls, network, batches, num_devices, **options)
    before = trainer.state()
    assert trainer.train(2)["step"] == 2
    good = trainer.state()
    trainer.load(before)
    with pytest.raises(NumericError, match=r"^step 3: .* of tower 1 "):
        trainer.train(5)
    assert trainer.progress() == (2, "idle")
    small_runs.assert_equal_states(trainer.state(), good)
    trainer.feed = trainer.loop.feed = networks.feed_of(
        batches_with("ggggg"),
        trainer.strategy.sizes,
        trainer.devices[:: trainer.strategy.num_shards],
    )
    assert trainer.train(3)["step"] == 5


# Whole runs. The last images of two neighboring steps are bad, in both epochs.


@pytest.fixture
def config(monkeypatch):
    small_runs.use(monkeypatch, data_set=small_runs.spoiled(monkeypatch, 3, 4))
    return small_runs.small_config(
        augment="none", num_towers=2, log_every_steps=1, on_nonfinite="skip"
    )


@pytest.mark.row(14)
def test_a_run_stopped_in_a_row_of_bad_steps_continues_bit_for_bit(config, tmp_path):
    whole = train(tmp_path / "whole", config).state
    train(tmp_path / "run", dataclasses.replace(config, max_steps=3))
    stopped = small_runs.saved(tmp_path / "run").tensors
    assert of_counts(stopped) == {"skipped/total": 1, "skipped/in_a_row": 1}
    small_runs.assert_equal_states(train(tmp_path / "run", config).state, whole)
    records = small_runs.records(tmp_path / "run")
    assert records == small_runs.records(tmp_path / "whole")
    counts = [record["skipped_steps"] for record in records]
    assert counts[:5] == [0, 0, 1, 2, 2] and counts[-1] == whole["skipped/total"] == 4
    assert [record["loss"] is None for record in records[:5]] == 2 * [False] + [
        True,
        True,
        False,
    ]
    events = EventAccumulator(str(tmp_path / "whole" / "tensorboard" / "train"))
    assert "optimizer/skipped_steps" in events.Reload().Tags()["tensors"]
