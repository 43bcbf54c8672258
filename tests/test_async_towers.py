"""Asynchronous towers: the order of their fetches and applies, replayed in NumPy."""

import collections
import contextlib
import itertools
import os
import signal
import threading
import time

import keras
import networks
import numpy as np
import oracle
import pytest
import small_runs
import tensorflow as tf
from keras import layers
from marks import slow
from recipes import (
    Recipe,
    assert_equal_to_oracle,
    assert_metrics,
    assert_some_are_clipped,
    clip_norm_for,
    create_trainer,
    record_events,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from towers import config, training
from towers.config import checks
from towers.errors import ConfigError, NumericError, Preempted, StuckError
from towers.models import keras_settings
from towers.optim import optimizers
from towers.optim.update import Update, moving_averages
from towers.parallel import strategies
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.coordinator import SHARES_AHEAD
from towers.parallel.loop import CONSISTENT_ACTIVITIES
from towers.run import session, watchdog

WAIT_SECS = 30  # for what should come at once


def create(
    network,
    recipe,
    batches,
    num_towers,
    cls=AsynchronousTrainer,
    record=None,
    **options,
):
    if record is not None:

        class Recorded(cls):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                record_events(self.coordinator, record)

        cls = Recorded
    return create_trainer(cls, network, recipe, batches, num_towers, **options)


# The replay.


def replay(network, recipe, batches, num_towers, record, scale_gradients=True):
    """Does in NumPy what was recorded.

    Returns:
        What the oracle's `train` returns, with a report for each update in the order
        of their applies, None for one that is skipped, and the staleness of each.
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
            network.described,
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


def random_script(num_towers, *calls, seed=0):
    """An order of fetches and applies that may come about in calls of so many steps."""
    rng, script = np.random.default_rng(seed), []
    for num_steps in calls:
        fetched, applied = np.zeros([2, num_towers], int)
        while min(applied) < num_steps:
            may_fetch = (fetched == applied) & (fetched < num_steps)
            may_fetch &= fetched < min(fetched) + SHARES_AHEAD
            may_apply = fetched > applied
            tower = rng.choice(np.flatnonzero(may_fetch | may_apply))
            if may_apply[tower]:
                applied[tower] += 1
            else:
                fetched[tower] += 1
            script.append(("apply" if may_apply[tower] else "fetch", tower))
    return script


def scripted(cls):
    """The towers of a class, but each waits for its turn."""

    class Scripted(cls):
        def __init__(self, *args, script, **kwargs):
            super().__init__(*args, **kwargs)
            self._script = collections.deque(script)
            self._turn = threading.Condition()

        def _fetch(self, tower):
            with self._wait_for_turn("fetch", tower):
                return super()._fetch(tower)

        def _apply(self, tower, *computed):
            with self._wait_for_turn("apply", tower):
                super()._apply(tower, *computed)

        @contextlib.contextmanager
        def _wait_for_turn(self, *event):
            with self._turn:
                assert self._turn.wait_for(lambda: self._script[0] == event, WAIT_SECS)
                yield
                self._script.popleft()
                self._turn.notify_all()

    return Scripted


Scripted = scripted(AsynchronousTrainer)


def train_scripted(
    network, recipe, batches, num_towers, cls=AsynchronousTrainer, **options
):
    """Six steps in three calls, in a random order.

    Returns:
        The towers, their record, and the metrics of each call.
    """
    calls, record = (1, 2, 3), []
    towers = create(
        network,
        recipe,
        batches,
        num_towers,
        scripted(cls),
        script=random_script(num_towers, *calls),
        record=record,
        **options,
    )
    metrics = [towers.train(num_steps) for num_steps in calls]
    return towers, record, metrics


@pytest.mark.parametrize("name", ["plain", "residual"])
def test_one_tower_equals_the_oracle(name):
    network = networks.NETWORKS[name]()
    batches = networks.random_batches(10, 13)
    recipe = Recipe(clip_norm=clip_norm_for(network, batches))
    expected = recipe.oracle(network, batches, 1)
    towers = create(network, recipe, batches, 1)
    seen = [towers.train(1), towers.train(4), towers.train(5)]
    assert_equal_to_oracle(towers.state(), expected)
    for metrics, step in zip(seen, (1, 5, 10), strict=True):
        assert_metrics(metrics, expected.reports[step - 1])
        assert not metrics["staleness"].any()


@pytest.mark.parametrize(
    "num_towers,batch_size",
    [(2, 13), slow(4, 16), slow(3, 13), slow(4, 13), slow(8, 13)],
)
def test_towers_equal_the_replay_of_their_record(num_towers, batch_size):
    network = networks.plain_network()
    batches = networks.random_batches(6, batch_size)
    recipe = Recipe(clip_norm=clip_norm_for(network, batches))
    towers, record, calls = train_scripted(network, recipe, batches, num_towers)
    expected, staleness = replay(network, recipe, batches, num_towers, record)
    assert_some_are_clipped(expected.reports, recipe)
    assert max(staleness) >= num_towers - 1

    assert_equal_to_oracle(towers.state(), expected)
    assert towers.state()["step"] == 6
    seen = np.concatenate([metrics["staleness"] for metrics in calls])
    np.testing.assert_array_equal(seen, staleness)


@pytest.mark.parametrize("optimizer", [slow("sgd"), "nesterov"])
def test_every_optimizer_equals_the_replay(optimizer):
    network = networks.plain_network()
    batches = networks.random_batches(6, 13)
    recipe = Recipe(optimizer)
    towers, record, _ = train_scripted(network, recipe, batches, 3)
    expected, _ = replay(network, recipe, batches, 3, record)
    assert_equal_to_oracle(towers.state(), expected)


def test_float64_towers_equal_the_replay_to_ten_digits():
    network = networks.residual_network("float64")
    batches = networks.random_batches(6, 13)
    recipe = Recipe(clip_norm=clip_norm_for(network, batches))
    towers, record, _ = train_scripted(network, recipe, batches, 2)
    expected, _ = replay(network, recipe, batches, 2, record)
    assert_equal_to_oracle(towers.state(), expected, tolerance=1e-10)


@pytest.mark.slow
def test_unscaled_gradients_equal_the_replay():
    network = networks.plain_network()
    batches = networks.random_batches(6, 13)
    recipe = Recipe(learning_rate=0.01)
    towers, record, _ = train_scripted(
        network, recipe, batches, 3, async_scale_gradients=False
    )
    expected, _ = replay(network, recipe, batches, 3, record, scale_gradients=False)
    assert_equal_to_oracle(towers.state(), expected)


@pytest.mark.parametrize("max_staleness", [slow(0), 1])
def test_towers_that_run_freely_equal_the_replay(max_staleness):
    network = networks.plain_network()
    batches, record = networks.random_batches(20, 13), []
    recipe = Recipe(clip_norm=clip_norm_for(network, batches))
    towers = create(
        network, recipe, batches, 3, record=record, max_staleness=max_staleness
    )
    metrics = [towers.train(8), towers.train(12)]
    expected, staleness = replay(network, recipe, batches, 3, record)
    assert_equal_to_oracle(towers.state(), expected)
    seen = np.concatenate([m["staleness"] for m in metrics])
    np.testing.assert_array_equal(seen, staleness)
    bound = max_staleness or 2 * (2 * SHARES_AHEAD + 1)
    assert max(staleness) <= bound


def test_metrics_are_those_of_the_last_step():
    network = networks.plain_network()
    batches = networks.random_batches(6, 13)
    recipe = Recipe(clip_norm=clip_norm_for(network, batches))
    towers, record, [*_, metrics] = train_scripted(network, recipe, batches, 3)
    expected, _ = replay(network, recipe, batches, 3, record)
    applied = [tower for event, tower, _ in record if event == "apply"]
    last = dict(zip(applied, expected.reports, strict=True))
    of_towers = [last[tower] for tower in range(3)]
    images = [report.tower_images[0] for report in of_towers]

    def mean(field, weights):
        return np.average([getattr(r, field) for r in of_towers], weights=weights)

    assert metrics["step"] == 6
    for field in ("loss", "total_loss", "accuracy"):
        assert metrics[field] == pytest.approx(mean(field, images), rel=1e-4)
    assert metrics["gradient_norm"] == pytest.approx(mean("gradient_norm", None), 1e-4)
    assert metrics["learning_rate"] == expected.reports[-1].learning_rate
    np.testing.assert_allclose(
        metrics["tower_losses"], [r.loss for r in of_towers], rtol=1e-4
    )
    # Those of the last update, neither clipped nor scaled.
    gradients = towers.gradients()
    assert list(gradients) == list(network.params)
    norm = oracle.global_norm(gradients)
    assert norm == pytest.approx(expected.reports[-1].gradient_norm, rel=1e-4)


# What the replay must object to.


class LostUpdates(AsynchronousTrainer):
    """Broken on purpose: a tower writes back what follows from the values it fetched,
    as it may without a lock."""

    def _fetch(self, tower):
        self._seen = getattr(self, "_seen", {})
        self._seen[tower] = [variable.numpy() for variable in self._copy.params]
        return super()._fetch(tower)

    def _apply(self, tower, *computed):
        for variable, value in zip(self._copy.params, self._seen[tower], strict=True):
            variable.assign(value)
        super()._apply(tower, *computed)


class TornFetch(AsynchronousTrainer):
    """Broken on purpose: half of what is fetched is that of the fetch before."""

    def _fetch(self, tower):
        self._before = getattr(self, "_before", {})
        values = super()._fetch(tower)
        [params] = values.params
        before = self._before.get(tower, params)
        self._before[tower] = params
        half = params.shape[0] // 2
        return values._replace(params=[tf.concat([before[:half], params[half:]], 0)])


class SummedGradients(AsynchronousTrainer):
    """Broken on purpose: every tower's gradients count as the whole batch's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._scales = [1.0 for _ in self._scales]


class EqualScales(AsynchronousTrainer):
    """Broken on purpose: 1/num_towers, although the batch does not divide."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._scales = [1 / len(self._scales) for _ in self._scales]


class HastyAverages(AsynchronousTrainer):
    """Broken on purpose: the averages move with every update, not with every step."""

    def _apply(self, *args):
        super()._apply(*args)
        copy, step = self._copy, self._copy.step.value()
        moved = moving_averages(
            copy.read(copy.averages),
            copy.read([*copy.params, *copy.state]),
            step,
            self._update_fn.ema_decay,
        )
        for average, value in zip(copy.averages, moved, strict=True):
            average.assign(value)


BROKEN = [
    LostUpdates,
    TornFetch,
    SummedGradients,
    EqualScales,
    HastyAverages,
]


@pytest.mark.parametrize(
    "broken", [BROKEN[0], *(slow(broken) for broken in BROKEN[1:])]
)
def test_the_replay_objects_to_broken_towers(broken):
    network = networks.plain_network()
    batches = networks.random_batches(7, 13)
    towers, record, _ = train_scripted(network, Recipe(), batches, 2, cls=broken)
    expected, _ = replay(network, Recipe(), batches, 2, record)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equal_to_oracle(towers.state(), expected)


# Row 26: no update is lost.


def ones_network():
    """A dense layer on images of ones; the sum of its logits has gradients of one."""
    with keras_settings("float32"):
        images = keras.Input((2,), name="images")
        logits = layers.Dense(3, kernel_initializer="zeros", name="logits")(images)
    return keras.Model(images, logits)


@pytest.mark.parametrize("scale_gradients", [False, True])
@pytest.mark.parametrize("num_towers", [2, 8])
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


# Staleness.


def steps_of(tower, count):
    return count * [("fetch", tower), ("apply", tower)]


@pytest.mark.parametrize(
    "script,expected",
    [
        ([("fetch", 0), *steps_of(1, 2), ("apply", 0), *steps_of(0, 1)], [0, 0, 2, 0]),
        ([("fetch", 0), ("fetch", 1), ("apply", 1), ("apply", 0)], [0, 1]),
        (
            # The furthest that towers come apart.
            [
                *steps_of(0, SHARES_AHEAD),
                ("fetch", 0),
                *steps_of(1, 2 * SHARES_AHEAD + 1),
                ("apply", 0),
                *steps_of(0, SHARES_AHEAD),
            ],
            [0, 0, 0, 0, 0, 0, 0, 5, 0, 0],
        ),
    ],
    ids=["overtaken", "crossed", "furthest"],
)
def test_staleness_is_counted(script, expected):
    num_steps = len(script) // 4
    network, batches = networks.plain_network(), networks.random_batches(num_steps, 4)
    towers = create(network, Recipe(), batches, 2, Scripted, script=script)
    np.testing.assert_array_equal(towers.train(num_steps)["staleness"], expected)


class Held(AsynchronousTrainer):
    """The first tower computes its first update until it is released."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.released = threading.Event()

    def _compute(self, tower, *share):
        if (tower, self.coordinator.begun[tower]) == (0, 1):
            assert self.released.wait(WAIT_SECS)
        return super()._compute(tower, *share)


# Ends.


class Failing(AsynchronousTrainer):
    """A tower that raises an error instead of its third update, once."""

    error = ZeroDivisionError("in tower 1")

    def _compute(self, tower, *share):
        if tower == 1 and self.coordinator.begun[1] == 3 and self.error:
            error, self.error = self.error, None
            raise error
        return super()._compute(tower, *share)


@pytest.mark.row(15)
def test_row_15_an_error_of_one_tower_ends_all_and_is_the_one_raised():
    network, batches = networks.plain_network(), networks.random_batches(8, 13)
    record = []
    towers = create(network, Recipe(), batches, 3, Failing, record=record)
    with pytest.raises(ZeroDivisionError) as caught:
        towers.train(8)
    assert caught.value is Failing.error
    assert ("apply", 1, 2) not in record

    # What was applied stays, and the next call goes on.
    state = towers.state()
    expected, staleness = replay(network, Recipe(), batches, 3, record)
    assert_equal_to_oracle(state, expected)
    assert state["step"] == len(staleness) // 3
    assert towers.train(1)["step"] == state["step"] + 1


@pytest.mark.parametrize("bad_tower", [0, 2])
@pytest.mark.row(14)
def test_row_14_a_bad_update_is_not_applied_and_names_its_tower(bad_tower):
    network, batches = networks.plain_network(), networks.random_batches(6, 16)
    batches[3]["images"][4 * bad_tower + 1, 0, 0, 0] = np.nan
    record = []
    towers = create(network, Recipe(), batches, 4, record=record)
    message = (
        rf"^step 4: .* of tower {bad_tower} \(loss .*\) is not finite; the update "
        "was not applied"
    )
    with pytest.raises(NumericError, match=message):
        towers.train(6)
    assert ("fetch", bad_tower, 3) in record
    assert ("apply", bad_tower, 3) not in record
    expected, _ = replay(network, Recipe(), batches, 4, record)
    assert_equal_to_oracle(towers.state(), expected)
    applied = collections.Counter(t for event, t, _ in record if event == "apply")
    is_whole = len(set(applied.values())) == 1 and len(applied) == 4
    assert session.is_between_steps(towers) == is_whole


@pytest.mark.row(41)
def test_row_41_after_a_bad_update_of_the_only_tower_the_step_is_whole():
    network, batches = networks.plain_network(), networks.random_batches(3, 8)
    batches[1]["images"][0, 0, 0, 0] = np.nan
    towers = create(network, Recipe(), batches, 1)
    with pytest.raises(NumericError):
        towers.train(3)
    assert session.is_between_steps(towers)
    assert session.settled_state(towers)["step"] == 1


class BadUpdate(AsynchronousTrainer):
    """The second update of tower 1 is bad, when tower 0 has made its own."""

    def _compute(self, tower, *share):
        if (tower, self.coordinator.begun[tower]) == (1, 2):
            deadline = time.monotonic() + WAIT_SECS
            while self.num_applied < 2:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            raise NumericError("in tower 1")
        return super()._compute(tower, *share)

    num_applied = 0  # of tower 0

    def _apply(self, tower, *computed):
        super()._apply(tower, *computed)
        self.num_applied += tower == 0


@pytest.mark.row(41)
def test_row_41_a_step_that_only_some_towers_have_made_is_not_saved(
    tmp_path, monkeypatch
):
    small_runs.use(monkeypatch)
    monkeypatch.setattr("towers.build.AsynchronousTrainer", BadUpdate)
    settings = small_runs.small_config(strategy="async_towers", num_towers=2)
    with pytest.raises(NumericError, match="in tower 1"):
        training.train(tmp_path, settings)
    assert small_runs.saved_steps(tmp_path) == []


@pytest.mark.row(41)
def test_row_41_an_update_that_fails_midway_is_of_no_step_until_another_is_loaded():
    def fail(*args):
        raise ZeroDivisionError

    network, batches = networks.plain_network(), networks.random_batches(8, 8)
    towers = create(network, Recipe(), batches, 1)
    towers.train(2)
    state, call = towers.state(), towers._apply_call
    towers._apply_call = fail
    with pytest.raises(ZeroDivisionError):
        towers.train(2)
    assert not session.is_between_steps(towers)
    towers._apply_call = call
    towers.train(1)
    assert not session.is_between_steps(towers)
    towers.load(state)
    assert session.is_between_steps(towers)
    assert towers.train(1)["step"] == 3 and session.is_between_steps(towers)


@pytest.mark.row(14)
def test_row_14_a_bad_update_may_be_skipped():
    """Of each tower one, so that in some step the last update is skipped as well."""
    network, batches = networks.plain_network(), networks.random_batches(6, 13)
    for tower, step in enumerate((1, 3, 4)):
        batches[step]["images"][4 * tower + 2, 0, 0, 0] = np.nan
    record = []
    script = random_script(3, 6)
    towers = create(
        network,
        Recipe(),
        batches,
        3,
        Scripted,
        script=script,
        record=record,
        skip_not_finite=True,
    )
    metrics = towers.train(6)
    expected, staleness = replay(network, Recipe(), batches, 3, record)
    assert expected.reports.count(None) == metrics["skipped_steps"] == 3
    assert any(report is None for report in expected.reports[2::3])
    np.testing.assert_array_equal(metrics["staleness"], staleness)
    state = towers.state()
    counts = {name: state.pop(f"skipped/{name}") for name in ("total", "in_a_row")}
    assert counts["total"] == 3 and state["step"] == 6
    assert_equal_to_oracle(state, expected)


def test_an_error_in_tracing_is_raised_before_there_are_threads():
    def loss_fn(logits, labels):
        raise ZeroDivisionError(threading.current_thread().name)

    network, batches = networks.plain_network(), networks.random_batches(1, 4)
    towers = create(network, Recipe(), batches, 2, loss_fn=loss_fn)
    with pytest.raises(ZeroDivisionError, match=threading.current_thread().name):
        towers.train(1)
    assert towers.progress() == (0, "tracing the step")


def test_request_stop_ends_after_the_furthest_step_in_hand():
    class Stopped(AsynchronousTrainer):
        def _compute(self, tower, *share):
            if self.coordinator.begun[tower] == 2:
                self.request_stop()
            return super()._compute(tower, *share)

    network, batches = networks.plain_network(), networks.random_batches(20, 13)
    record = []
    towers = create(network, Recipe(), batches, 3, Stopped, record=record)
    metrics = towers.train(20)
    assert 2 <= metrics["step"] <= 2 + SHARES_AHEAD
    applied = [event for event in record if event[0] == "apply"]
    assert sorted(applied) == [
        ("apply", tower, number)
        for tower in range(3)
        for number in range(metrics["step"])
    ]
    expected, _ = replay(network, Recipe(), batches, 3, record)
    assert_equal_to_oracle(towers.state(), expected)
    assert towers.progress() == (metrics["step"], "idle")
    assert towers.train(3) == {}


def test_request_stop_before_the_first_step_takes_none():
    network, batches = networks.plain_network(), networks.random_batches(3, 8)
    towers = create(network, Recipe(), batches, 2)
    assert towers.progress() == (0, "tracing the step")
    towers.request_stop()
    assert towers.train(3) == {}
    assert towers.progress() == (0, "idle")


# Under watch.


def watched_training(dog, towers, num_steps):
    with dog.training():
        towers.train(num_steps)


@pytest.mark.row(15)
def test_row_15_a_tower_that_hangs_is_named():
    network, batches = networks.plain_network(), networks.random_batches(9, 12)
    record = []
    towers = create(network, Recipe(), batches, 3, Held, record=record)
    seconds = itertools.count()

    def clock():
        """Seconds go by once there is nothing that the others can do."""
        others = sum(event == "apply" for event, _, _ in record)
        return next(seconds) if others == 2 * (1 + SHARES_AHEAD) else 0

    dog = watchdog.Watchdog(
        towers, CONSISTENT_ACTIVITIES, stuck_after_secs=2, clock=clock
    )
    with pytest.raises(StuckError, match=r"^step 3 .*, while computing \(tower 0\)$"):
        dog.run(watched_training, dog, towers, 9)
    towers.released.set()
    small_runs.join_abandoned()
    assert towers.progress() == (9, "idle")


@pytest.mark.row(12)
def test_row_12_towers_that_wait_for_data_are_left_between_two_steps(monkeypatch):
    monkeypatch.setattr(watchdog, "_GRACE_SECS", 0.1)
    network, batches = networks.plain_network(), networks.random_batches(5, 12)
    released, record = threading.Event(), []

    def slow_batches():
        for step, batch in enumerate(batches):
            assert step < 3 or released.wait(WAIT_SECS)
            yield batch

    towers = create(network, Recipe(), batches, 3, record=record)
    spec = networks.stream_of(batches)(0).element_spec
    slow_stream = tf.data.Dataset.from_generator(slow_batches, output_signature=spec)
    towers._compile()
    towers._feed = networks.feed_of(batches, [4, 4, 4], towers.devices)
    towers._feed._streams = [
        lambda _, i=i: slow_stream.map(
            lambda batch: {k: v[4 * i : 4 * i + 4] for k, v in batch.items()}
        )
        for i in range(3)
    ]

    def clock():
        if towers.progress() == (3, "waiting for data") and not dog.stopped_by:
            os.kill(os.getpid(), signal.SIGTERM)
        return time.monotonic()

    with watchdog.Watchdog(towers, CONSISTENT_ACTIVITIES, clock=clock) as dog:
        with pytest.raises(Preempted, match="while waiting for data$"):
            dog.run(watched_training, dog, towers, 5)
    state = session.settled_state(towers)
    assert state["step"] == 3
    expected, staleness = replay(network, Recipe(), batches, 3, record)
    assert len(staleness) == 9
    assert_equal_to_oracle(state, expected)
    released.set()
    small_runs.join_abandoned()
    assert towers.progress() == (3, "idle")


# What all strategies share.


def test_state_goes_bit_for_bit_to_and_from_other_strategies():
    network, batches = networks.residual_network(), networks.random_batches(5, 12)
    record = []
    source = create(network, Recipe(), batches, 2, strategies.towers)
    source.train(2)
    middle = create(network, Recipe(), batches, 3, record=record)
    middle.load(source.state())
    small_runs.assert_equal_states(middle.state(), source.state())
    assert middle.progress() == (2, "tracing the step")
    assert middle.train(2)["step"] == 4
    assert {number for _, _, number in record} == {2, 3}
    for num_devices, cls, options in (
        (4, strategies.model_parallel, {"group_size": 2}),
        (2, strategies.replicated, {}),
        (1, strategies.towers, {}),
    ):
        target = create(network, Recipe(), batches, num_devices, cls, **options)
        target.load(middle.state())
        small_runs.assert_equal_states(target.state(), middle.state())
        middle.load(target.state())
        small_runs.assert_equal_states(middle.state(), target.state())
    assert target.train(1)["step"] == 5


@pytest.mark.slow
def test_evaluation_is_that_of_towers():
    network = networks.residual_network()
    batches = networks.random_batches(2, 13)
    for batch in batches:
        batch["weights"] = np.ones(13, np.float32)
    batches[-1]["weights"][5:] = 0
    towers = create(network, Recipe(), batches, 3)
    towers.train(2)
    others = create(network, Recipe(), batches, 2, strategies.towers)
    others.load(towers.state())
    counts = [
        trainer.evaluate(
            networks.feed_of(batches, trainer.strategy.sizes, trainer.devices),
            len(batches),
            kinds=(False, True),
        )
        for trainer in (towers, others)
    ]
    found = [tuple(x[kind] for x in counts) for kind in (False, True)]
    for counts, expected in found:
        assert counts["images"] == 13 + 5
        assert counts["correct"] == expected["correct"]
        assert counts["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found[0][0]["loss"] != found[1][0]["loss"]


class Counted(keras.Layer):
    """Counts in its state, an int32, how often it was called in training."""

    def build(self, shape):
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="count"
        )

    def call(self, x, training=False):
        if training:
            self.count.assign(self.count + 1)
        return x


@pytest.mark.slow
def test_state_that_is_no_float_is_that_of_the_first_tower():
    with keras_settings("float32"):
        images = keras.Input(networks.IMAGE_SHAPE, name="images")
        x = Counted(name="counted")(layers.Flatten(name="flatten")(images))
        logits = layers.Dense(networks.NUM_CLASSES, name="logits")(x)
        model = keras.Model(images, logits)
    network = networks.Network(model, [], {})
    batches = networks.random_batches(6, 8)
    towers = create(network, Recipe(), batches, 4, Scripted, script=random_script(4, 6))
    towers.train(6)
    assert towers.state()["state/counted/count"] == 6


# A whole run.


def test_a_run_logs_and_draws_its_staleness(tmp_path, monkeypatch, capsys):
    small_runs.use(monkeypatch)
    settings = small_runs.small_config(
        strategy="async_towers", num_towers=3, max_staleness=4
    )
    state = training.train(tmp_path, settings).state
    assert state["step"] == 10
    assert (
        "variables on /CPU:0, which each tower updates alone" in capsys.readouterr()[0]
    )
    *_, last = small_runs.records(tmp_path)
    assert last["step"] == 10
    assert 0 <= last["staleness_mean"] <= last["staleness_max"] <= 4
    events = EventAccumulator(str(tmp_path / "tensorboard" / "train"))
    events.Reload()
    assert "staleness_mean" in events.Tags()["tensors"]
    drawn = events.Tensors("staleness/updates")
    assert [event.step for event in drawn] == [1, 2, 4, 6, 8, 10]
    # A histogram's rows are left edge, right edge, count.
    counts = [tf.make_ndarray(e.tensor_proto)[:, 2].sum() for e in drawn]
    assert counts == [3 * num_steps for num_steps in (1, 1, 2, 2, 2, 2)]


@pytest.mark.row(16)
def test_row_16_options_that_contradict_it_are_refused():
    message = "^accumulate_steps=2 with strategy=async_towers: "
    with pytest.raises(ConfigError, match=message):
        config.Config(strategy="async_towers", accumulate_steps=2)
    message = "^batch_norm=sync with strategy=async_towers: "
    with pytest.raises(ConfigError, match=message):
        config.Config(strategy="async_towers", batch_norm="sync")


def test_options_without_effect_are_warned_about():
    options = {"async_scale_gradients": False, "max_staleness": 3}
    assert checks.ignored_options(config.Config(**options)) == [
        "async_scale_gradients=False has no effect with strategy=towers",
        "max_staleness=3 has no effect with strategy=towers",
    ]
    asynchronous = config.Config(strategy="async_towers", **options)
    assert checks.ignored_options(asynchronous) == []
