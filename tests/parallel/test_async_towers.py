"""Asynchronous towers: the order of their fetches and applies, replayed in NumPy."""

import collections

import keras
import networks
import numpy as np
import pytest
import small_runs
import tensorflow as tf
from engines import oracle
from keras import layers
from marks import slow
from recipes import (
    Recipe,
    assert_equal_to_oracle,
    assert_some_are_clipped,
    clip_norm_for,
    create_trainer,
    record_events,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from towers.errors import NumericError
from towers.models.variables import keras_settings
from towers.optim import optimizers
from towers.optim.update import Update
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.training.outputs import is_between_steps
from towers.training.train import train

WAIT_SECS = 30  # Timeout for what should happen at once.


def create(network, recipe, batches, num_towers, cls=AsynchronousTrainer, **options):
    """Create towers and a list that records their fetches and applies."""
    towers = create_trainer(cls, network, recipe, batches, num_towers, **options)
    record = []
    record_events(towers.coordinator, record)
    return towers, record


def before_computing(hook):
    """Return a class whose towers call `hook(trainer, tower, number of its update)`."""

    class Hooked(AsynchronousTrainer):
        def _compute(self, tower, *share):
            hook(self, tower, self.coordinator.begun[tower])
            return super()._compute(tower, *share)

    return Hooked


# The replay.


def replay(network, recipe, batches, num_towers, record, scale_gradients=True):
    """Replay a record in NumPy.

    Returns:
        The result of the oracle, with a report for each update in the order of their
        applies (None if it is skipped), and the staleness of each update.
    """
    rule = oracle.OPTIMIZERS[recipe.optimizer]
    params = {k: v.astype(np.float64) for k, v in network.params.items()}
    state = dict(network.state)
    averages = params | state
    slots = {
        slot: {k: np.zeros_like(v) for k, v in params.items()}
        for slot in rule.slot_names
    }
    oracle_batches = networks.oracle_batches(batches)
    fetched, reports, staleness = {}, [], []
    for event, tower, number in record:
        if event == "fetch":
            fetched[tower] = params, state, len(reports)
            continue
        seen_params, seen_state, num_updates = fetched.pop(tower)
        images, labels, noise = oracle_batches[number]
        share = oracle.shares(len(labels), num_towers)[tower]
        staleness.append(len(reports) - num_updates)
        if not np.all(np.isfinite(images[share])):
            reports.append(None)
            continue
        found = oracle.loss_and_gradients(
            oracle.ramp_momentum(network.described, num_updates // num_towers),
            seen_params,
            seen_state,
            images[share],
            labels[share],
            noise={name: array[share] for name, array in noise.items()},
            label_smoothing=recipe.label_smoothing,
        )
        gradients = oracle.add_weight_decay(found.gradients, seen_params, network.decay)
        norm = oracle.global_norm(gradients)
        clipped = oracle.clip_by_global_norm(gradients, recipe.clip_norm)
        scale = len(labels[share]) / len(labels) if scale_gradients else 1.0
        step = len(reports) // num_towers
        rate = recipe.rate_fn(step * len(labels))
        scaled = {name: scale * gradient for name, gradient in clipped.items()}
        params, slots = rule.update(
            params, scaled, slots, rate, **recipe.hyperparameters
        )
        state = found.state
        decay = oracle.weight_decay_loss(seen_params, network.decay)
        reports.append(
            oracle.StepReport(
                step=step,
                loss=found.loss,
                total_loss=found.loss + decay,
                accuracy=found.accuracy,
                tower_losses=[found.loss],
                tower_images=[len(labels[share])],
                learning_rate=rate,
                gradient_norm=norm,
            )
        )
        if recipe.ema_decay and len(reports) % num_towers == 0:
            values = params | state
            averages = oracle.move_averages(averages, values, recipe.ema_decay, step)
    return oracle.OracleResult(params, state, slots, averages, reports), staleness


@pytest.mark.parametrize(
    "name,dtype,optimizer,num_towers,options",
    [
        ("residual", "float64", "nesterov", 2, {}),
        slow("plain", "float32", "momentum", 8, {}),
        slow("plain", "float32", "sgd", 3, {"async_scale_gradients": False}),
    ],
)
def test_towers_equal_the_replay_of_their_record(
    name, dtype, optimizer, num_towers, options
):
    network = networks.NETWORKS[name](dtype)
    batches = networks.random_batches(6, 13)
    recipe = Recipe(
        optimizer,
        learning_rate=0.01 if options else 0.05,
        clip_norm=clip_norm_for(network, batches),
    )
    towers, record = create(network, recipe, batches, num_towers, **options)
    calls = [towers.train(num_steps) for num_steps in (1, 2, 3)]
    expected, staleness = replay(
        network, recipe, batches, num_towers, record, scale_gradients=not options
    )
    assert_some_are_clipped(expected.reports, recipe)
    assert_equal_to_oracle(
        towers.state(), expected, {"float32": 1e-5, "float64": 1e-10}[dtype]
    )
    assert towers.state()["step"] == 6
    seen = np.concatenate([metrics["staleness"] for metrics in calls])
    np.testing.assert_array_equal(seen, staleness)
    assert_metrics_of_the_last_step(calls[-1], expected.reports, record)
    # Those of the last update, neither clipped nor scaled.
    gradients = towers.gradients(batches[-1])
    assert list(gradients) == list(network.params)
    norm = oracle.global_norm(gradients)
    assert norm == pytest.approx(expected.reports[-1].gradient_norm, rel=1e-4)


def assert_metrics_of_the_last_step(metrics, reports, record):
    applied = [tower for event, tower, _ in record if event == "apply"]
    last = dict(zip(applied, reports, strict=True))
    of_towers = [last[tower] for tower in sorted(last)]
    images = [report.tower_images[0] for report in of_towers]

    def mean(field, weights):
        return np.average([getattr(r, field) for r in of_towers], weights=weights)

    assert metrics["step"] == 6
    for field in ("loss", "total_loss", "accuracy"):
        assert metrics[field] == pytest.approx(mean(field, images), rel=1e-4)
    assert metrics["gradient_norm"] == pytest.approx(mean("gradient_norm", None), 1e-4)
    assert metrics["learning_rate"] == reports[-1].learning_rate
    np.testing.assert_allclose(
        metrics["tower_losses"], [r.loss for r in of_towers], rtol=1e-4
    )


# Row 26: no update is lost.


def ones_network():
    """Create a dense layer whose sum of logits has gradients of one."""
    with keras_settings("float32"):
        images = keras.Input((2,), name="images")
        logits = layers.Dense(3, kernel_initializer="zeros", name="logits")(images)
    return keras.Model(images, logits)


@pytest.mark.parametrize(
    "num_towers,scale_gradients", [slow(2, False), (4, True), slow(8, True)]
)
@pytest.mark.row(26)
def test_row_26_constant_gradients_add_up_exactly(num_towers, scale_gradients):
    num_steps = 25
    adding = optimizers.Optimizer(
        ("sum",), lambda p, slots, g, context: (p + g, {"sum": slots["sum"] + g})
    )
    ones = {"images": np.ones([16, 2], np.float32), "labels": np.zeros(16, np.int32)}
    towers = create_trainer(
        AsynchronousTrainer,
        networks.Network(ones_network(), [], {}),
        Recipe(),
        num_steps * [ones],
        num_towers,
        loss_fn=lambda logits, labels: tf.reduce_sum(logits, axis=1),
        update_fn=Update(adding, lambda step: tf.constant(1.0, tf.float64)),
        async_scale_gradients=scale_gradients,
    )
    towers.train(num_steps)
    state = towers.state()
    expected = num_steps * (1 if scale_gradients else num_towers)
    for kind in ("params/logits/{}", "slots/logits/{}/sum"):
        for name, shape in (("kernel", (2, 3)), ("bias", (3,))):
            np.testing.assert_array_equal(
                state[kind.format(name)], np.full(shape, expected, np.float32)
            )
    assert state["step"] == num_steps


# Ends.


@pytest.mark.row(14, 41)
@pytest.mark.parametrize("num_towers,bad_tower", [(4, 2), slow(1, 0)])
def test_row_14_a_bad_update_is_not_applied_and_names_its_tower(num_towers, bad_tower):
    """Row 41: the state is saved if all towers have made the same steps."""
    network, batches = networks.plain_network(), networks.random_batches(6, 16)
    batches[3]["images"][4 * bad_tower + 1, 0, 0, 0] = np.nan
    towers, record = create(network, Recipe(), batches, num_towers)
    with pytest.raises(NumericError, match=f"^step 4: .* of tower {bad_tower} "):
        towers.train(6)
    assert ("fetch", bad_tower, 3) in record
    assert ("apply", bad_tower, 3) not in record
    expected, _ = replay(network, Recipe(), batches, num_towers, record)
    assert_equal_to_oracle(towers.state(), expected)
    applied = collections.Counter(t for event, t, _ in record if event == "apply")
    is_whole = len(set(applied.values())) == 1 and len(applied) == num_towers
    assert is_between_steps(towers) == is_whole
    assert num_towers > 1 or is_whole


@pytest.mark.row(41)
def test_row_41_a_step_that_only_some_towers_have_made_is_not_saved(
    tmp_path, monkeypatch
):
    def fail(trainer, tower, number):
        coordinator = trainer.coordinator
        if (tower, number) == (1, 2):
            with coordinator.lock:
                coordinator.lock.wait_for(
                    lambda: coordinator.applied[0] == 2, WAIT_SECS
                )
            raise NumericError("in tower 1")

    small_runs.use(monkeypatch)
    cls = before_computing(fail)
    monkeypatch.setattr("towers.build.assembly.AsynchronousTrainer", cls)
    settings = small_runs.small_config(strategy="async_towers", num_towers=2)
    with pytest.raises(NumericError, match="in tower 1"):
        train(tmp_path, settings)
    assert small_runs.saved_steps(tmp_path) == []


@pytest.mark.row(14)
def test_row_14_a_bad_update_may_be_skipped():
    network, batches = networks.plain_network(), networks.random_batches(6, 13)
    for tower, step in enumerate((1, 3, 4)):
        batches[step]["images"][4 * tower + 2, 0, 0, 0] = np.nan
    towers, record = create(network, Recipe(), batches, 3, skip_not_finite=True)
    metrics = towers.train(6)
    expected, staleness = replay(network, Recipe(), batches, 3, record)
    assert expected.reports.count(None) == metrics["skipped_steps"] == 3
    np.testing.assert_array_equal(metrics["staleness"], staleness)
    state = towers.state()
    counts = {name: state.pop(f"skipped/{name}") for name in ("total", "in_a_row")}
    assert counts["total"] == 3 and state["step"] == 6
    assert_equal_to_oracle(state, expected)


# A whole run.


def test_a_run_logs_and_draws_its_staleness(tmp_path, monkeypatch):
    small_runs.use(monkeypatch)
    settings = small_runs.small_config(
        strategy="async_towers", num_towers=3, max_staleness=4
    )
    state = train(tmp_path, settings).state
    assert state["step"] == 10
    *_, last = small_runs.records(tmp_path)
    assert last["step"] == 10
    assert 0 <= last["staleness_mean"] <= last["staleness_max"] <= 4
    events = EventAccumulator(str(tmp_path / "tensorboard" / "train"))
    events.Reload()
    assert "towers/staleness_mean" in events.Tags()["tensors"]
    drawn = events.Tensors("tensors/staleness/updates")
    assert [event.step for event in drawn] == [1, 2, 4, 6, 8, 10]
    # A histogram's rows are left edge, right edge, count.
    counts = [tf.make_ndarray(e.tensor_proto)[:, 2].sum() for e in drawn]
    assert counts == [3 * num_steps for num_steps in (1, 1, 2, 2, 2, 2)]
