"""Every synchronous strategy computes what one device does on the whole batch."""

import collections
import dataclasses

import networks
import numpy as np
import oracle
import pytest
import tensorflow as tf

from towers import losses, optimizers, schedules
from towers.errors import NumericError
from towers.parallel import slices
from towers.parallel.model_parallel import ModelParallel
from towers.parallel.replicated import Replicated
from towers.parallel.towers import Towers

NUM_STEPS = 10
NUM_EXAMPLES = 50  # so that a stair of the schedule falls within the steps


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the trainer and the oracle are both told."""

    optimizer: str = "momentum"
    momentum: float = 0.9
    clip_norm: float = 0.0
    ema_decay: float = 0.999
    label_smoothing: float = 0.1
    learning_rate: float = 0.05

    def update(self, batch_size: int) -> optimizers.Update:
        schedule = schedules.create_schedule(
            "exponential",
            self.learning_rate,
            num_examples=NUM_EXAMPLES,
            warmup_epochs=0,
            decay_factor=0.5,
            epochs_per_decay=1.5,
        )
        name = "nesterov" if self.optimizer == "nesterov" else "sgd"
        return optimizers.Update(
            optimizers.create_optimizer(name, momentum=self.momentum),
            lambda step: schedule(step * batch_size),
            self.clip_norm,
            self.ema_decay,
        )

    def oracle(self, network, batches, num_towers) -> oracle.OracleResult:
        hyper = {} if self.optimizer == "sgd" else {"momentum": self.momentum}
        return oracle.train(
            network.described,
            network.params,
            network.state,
            networks.oracle_batches(batches),
            optimizer=self.optimizer,
            learning_rate=oracle.staircase(
                self.learning_rate, 0.5, num_examples=NUM_EXAMPLES, epochs_per_decay=1.5
            ),
            weight_decay=network.decay,
            label_smoothing=self.label_smoothing,
            clip_norm=self.clip_norm,
            ema_decay=self.ema_decay,
            num_towers=num_towers,
            **hyper,
        )


STRATEGIES = {"towers": Towers, "replicated": Replicated}
slow = pytest.mark.slow
GROUPS = [  # devices, devices in a group
    (2, 2),
    (4, 2),
    pytest.param(4, 4, marks=slow),
    pytest.param(8, 2, marks=slow),
    pytest.param(8, 4, marks=slow),
]
both = pytest.mark.parametrize("cls", STRATEGIES.values(), ids=STRATEGIES)


def create_towers(
    network, recipe, batches, num_towers, cls=Towers, accumulate_steps=1, **where
):
    images_per_step = len(batches[0]["labels"])
    return cls(
        network.model,
        loss_fn=lambda logits, labels: losses.cross_entropy(
            logits, labels, recipe.label_smoothing
        ),
        update=recipe.update(images_per_step),
        stream=networks.stream_of(batches),
        batch_size=images_per_step // accumulate_steps,
        accumulate_steps=accumulate_steps,
        devices=[f"/CPU:{tower}" for tower in range(num_towers)],
        **where,
    )


def assert_equal_to_oracle(state, expected, tolerance=1e-5):
    """Parameters, slots, averages and model state agree; none is missing or left."""
    wanted = {f"params/{k}": v for k, v in expected.params.items()}
    wanted |= {f"state/{k}": v for k, v in expected.state.items()}
    wanted |= {f"averages/{k}": v for k, v in expected.averages.items()}
    for slot, values in expected.slots.items():
        wanted |= {f"slots/{k}/{slot}": v for k, v in values.items()}
    assert set(state) == set(wanted) | {"step"}
    for name, value in wanted.items():
        np.testing.assert_allclose(
            state[name], value, atol=tolerance, rtol=tolerance, err_msg=name
        )


def oracle_cases():
    """All of strategy `towers`; of the others what is most likely to go wrong."""
    for strategy, cls in STRATEGIES.items():
        for name in networks.NETWORKS:
            for num_towers in (1, 2, 3, 4, 8):
                for batch_size in (16, 13):
                    fast = cls is Towers or (num_towers, batch_size) == (3, 13)
                    yield pytest.param(
                        cls,
                        name,
                        num_towers,
                        batch_size,
                        marks=[] if fast else pytest.mark.slow,
                        id=f"{strategy}-{name}-{num_towers}-{batch_size}",
                    )


@pytest.mark.parametrize("cls,name,num_towers,batch_size", list(oracle_cases()))
def test_towers_equal_the_oracle(cls, name, num_towers, batch_size):
    network = networks.NETWORKS[name]()
    batches = networks.random_batches(NUM_STEPS, batch_size)
    recipe = Recipe(clip_norm=0.5)
    expected = recipe.oracle(network, batches, num_towers)
    assert max(r.gradient_norm for r in expected.reports) > 0.5, "nothing is clipped"

    towers = create_towers(network, recipe, batches, num_towers, cls=cls)
    losses_seen = [towers.train(1), towers.train(4), towers.train(5)]

    assert_equal_to_oracle(towers.state(), expected)
    for metrics, report in zip(
        losses_seen, [expected.reports[i] for i in (0, 4, 9)], strict=True
    ):
        for field in ("loss", "total_loss", "accuracy", "learning_rate"):
            assert metrics[field] == pytest.approx(getattr(report, field), rel=1e-4)
        assert metrics["gradient_norm"] == pytest.approx(report.gradient_norm, rel=1e-4)
    assert losses_seen[-1]["tower_losses"].shape == (num_towers,)


@both
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
def test_every_optimizer_equals_the_oracle(cls, optimizer):
    network = networks.plain_network()
    batches = networks.random_batches(NUM_STEPS, 13)
    recipe = Recipe(optimizer, momentum=0.0 if optimizer == "sgd" else 0.9)
    towers = create_towers(network, recipe, batches, 3, cls=cls)
    towers.train(NUM_STEPS)
    assert_equal_to_oracle(towers.state(), recipe.oracle(network, batches, 3))


@both
@pytest.mark.parametrize("name", ["plain", "residual"])
def test_float64_towers_equal_the_oracle_to_ten_digits(cls, name):
    network = networks.NETWORKS[name]("float64")
    batches = networks.random_batches(NUM_STEPS, 13)
    recipe = Recipe(clip_norm=0.5)
    towers = create_towers(network, recipe, batches, 3, cls=cls)
    towers.train(NUM_STEPS)
    expected = recipe.oracle(network, batches, 3)
    assert_equal_to_oracle(towers.state(), expected, tolerance=1e-10)


def test_towers_without_averages_keep_none():
    network = networks.plain_network()
    batches = networks.random_batches(3, 8)
    towers = create_towers(network, Recipe(ema_decay=0.0), batches, 2)
    towers.train(3)
    assert not [name for name in towers.state() if name.startswith("averages/")]
    with pytest.raises(ValueError, match="ema_decay"):
        towers.evaluate([], use_averages=True)


@both
def test_two_runs_are_bit_equal_and_so_are_other_cuts_into_calls(cls):
    network = networks.residual_network()
    batches = networks.random_batches(6, 13)
    states = []
    for calls in ([6], [1, 2, 3]):
        towers = create_towers(network, Recipe(), batches, 4, cls=cls)
        for num_steps in calls:
            towers.train(num_steps)
        states.append(towers.state())
    for name, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][name], err_msg=name)


@pytest.mark.parametrize("before,after", [(2, 4), (4, 1)])
def test_state_of_some_towers_is_continued_by_others(before, after):
    network = networks.plain_network()
    batches = networks.random_batches(NUM_STEPS, 13)
    recipe = Recipe()
    first = create_towers(network, recipe, batches, before)
    first.train(4)
    second = create_towers(network, recipe, batches, after)
    second.load(first.state())
    second.train(6)
    assert_equal_to_oracle(second.state(), recipe.oracle(network, batches, 1))


@both
@pytest.mark.parametrize("bad_tower", [0, 2])
def test_a_bad_tower_stops_before_the_update(cls, bad_tower):
    network = networks.plain_network()
    batches = networks.random_batches(5, 16)
    batches[3]["images"][4 * bad_tower + 1, 0, 0, 0] = np.nan
    recipe = Recipe()
    towers = create_towers(network, recipe, batches, 4, cls=cls)
    with pytest.raises(NumericError, match=rf"^step 4: .* of tower {bad_tower} \("):
        towers.train(5)
    assert_equal_to_oracle(towers.state(), recipe.oracle(network, batches[:3], 1))


def test_request_stop_ends_after_the_step_in_hand():
    network = networks.plain_network()
    towers = create_towers(network, Recipe(), networks.random_batches(3, 8), 2)
    assert towers.progress() == (0, "tracing the step")
    towers.request_stop()
    assert towers.train(3) == {}
    assert towers.progress() == (0, "idle")


def test_a_step_waits_from_its_wanting_a_batch_to_having_it(monkeypatch):
    """By a clock that stands still but for 3 s in a draw and 1 s in a tower's loss."""
    now = np.float64([0.0])

    def clock(secs=0.0):
        def operation():
            now[0] += secs
            return now[0]

        return tf.ensure_shape(tf.numpy_function(operation, [], tf.float64), [])

    def passing(secs, tensor):
        with tf.control_dependencies([clock(secs)]):
            return tf.identity(tensor)

    network, batches = networks.plain_network(), networks.random_batches(4, 8)
    towers = create_towers(network, Recipe(), batches, 2)
    stream, loss_fn = towers._stream, towers._loss_fn
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # drawn when wanted
    towers._stream = lambda first_step: (
        stream(first_step)
        .map(lambda batch: batch | {"labels": passing(3.0, batch["labels"])})
        .with_options(options)
    )
    towers._loss_fn = lambda logits, labels: loss_fn(logits, passing(1.0, labels))
    monkeypatch.setattr(tf, "timestamp", clock)
    assert towers.train(3)["input_wait_secs"] == 9.0
    assert now == [15.0]
    assert towers.train(1)["input_wait_secs"] == 3.0


@both
@pytest.mark.parametrize("num_towers", [1, 3, 8])
def test_evaluation_counts_every_weighted_image_once(cls, num_towers):
    network = networks.residual_network()
    batches = networks.random_batches(3, 13)
    for batch in batches:
        batch["weights"] = np.ones(13, np.float32)
    batches[-1]["weights"][5:] = 0
    towers = create_towers(network, Recipe(), batches, num_towers, cls=cls)

    counts = towers.evaluate(networks.stream_of(batches)(0))

    images = np.concatenate([b["images"] for b in batches])[: 13 + 13 + 5]
    labels = np.concatenate([b["labels"] for b in batches])[: 13 + 13 + 5]
    logits = oracle.forward(
        network.described, network.params, network.state, images, training=False
    ).logits
    image_losses, _ = oracle.cross_entropy(logits, labels, 0.1)
    assert counts["images"] == 31
    assert counts["correct"] == np.sum(np.argmax(logits, 1) == labels)
    assert counts["loss"] == pytest.approx(np.sum(image_losses), rel=1e-5)


class SummedGradients(Towers):
    """Broken on purpose: the towers' gradients are added up."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._weights = [1.0] * len(self._weights)


class SkippedTower(Towers):
    """Broken on purpose: the first tower's share counts twice, the last one's never."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        last = self._weights[-1]
        self._weights = [self._weights[0] + last, *self._weights[1:-1], 0.0]


class LateRate(Towers):
    """Broken on purpose: the schedule counts the steps of one tower, as the tutorial
    does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        rate, n = self._update.learning_rate_fn, len(self._devices)
        self._update = dataclasses.replace(
            self._update, learning_rate_fn=lambda step: rate(step // n)
        )


@pytest.mark.parametrize("broken", [SummedGradients, SkippedTower, LateRate])
def test_the_oracle_objects_to_broken_towers(broken):
    network = networks.plain_network()
    batches = networks.random_batches(NUM_STEPS, 16)
    recipe = Recipe()
    towers = create_towers(network, recipe, batches, 4, cls=broken)
    towers.train(NUM_STEPS)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equal_to_oracle(towers.state(), recipe.oracle(network, batches, 4))


def partition_graphs(call) -> list:
    """The graphs per device that TensorFlow executed during a call."""
    from tensorflow.python.eager import context

    context.context().enable_graph_collection()
    try:
        call()
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_graph_collection()
    return [g for f in metadata.function_graphs for g in f.partition_graphs]


def test_each_tower_computes_on_its_own_device_and_variables_stay_on_theirs():
    network = networks.residual_network()
    batches = networks.random_batches(2, 12)
    towers = create_towers(network, Recipe(), batches, 3, parameter_device="/CPU:7")

    graphs = partition_graphs(lambda: towers.train(2))

    ops = collections.defaultdict(collections.Counter)
    for graph in graphs:
        for node in graph.node:
            # oneDNN's rewrites of an operation keep its name within theirs.
            for kind in ("BackpropFilter", "BackpropInput", "Conv2D", "AssignVariable"):
                if kind in node.op:
                    ops[node.device[-1]][kind] += 1
                    break
    for tower in "012":
        assert ops[tower]["Conv2D"] == 2, ops
        assert ops[tower]["BackpropFilter"] == 2, ops
        assert ops[tower]["BackpropInput"] == 1, ops  # none for the images
    assert not set(ops) - set("0127"), ops
    # Beside the parameters' device only the step and the phase change, on the host.
    num_variables = len(towers.state()) - 1
    assert ops["7"]["AssignVariable"] == num_variables
    assert ops["1"]["AssignVariable"] == ops["2"]["AssignVariable"] == 0


@both
@pytest.mark.parametrize("accumulate_steps", [3])
def test_accumulated_micro_batches_equal_one_batch(cls, accumulate_steps):
    network = networks.plain_network()
    batches = networks.random_batches(NUM_STEPS, 7 * accumulate_steps)
    recipe = Recipe(clip_norm=0.5)
    strategy = create_towers(
        network, recipe, batches, 3, cls=cls, accumulate_steps=accumulate_steps
    )
    metrics = strategy.train(NUM_STEPS)
    expected = recipe.oracle(network, batches, 1)
    assert_equal_to_oracle(strategy.state(), expected)
    report = expected.reports[-1]
    for field in ("loss", "total_loss", "accuracy", "learning_rate"):
        assert metrics[field] == pytest.approx(getattr(report, field), rel=1e-4)


@both
@pytest.mark.parametrize(
    "num_towers,batch_size", [(3, 13), pytest.param(8, 16, marks=slow)]
)
def test_synchronised_batch_norm_equals_one_device(cls, num_towers, batch_size):
    network = networks.residual_network()
    batches = networks.random_batches(NUM_STEPS, batch_size)
    recipe = Recipe(clip_norm=0.5)
    strategy = create_towers(
        network, recipe, batches, num_towers, cls=cls, sync_batch_norm=True
    )
    strategy.train(NUM_STEPS)
    assert_equal_to_oracle(strategy.state(), recipe.oracle(network, batches, 1))


@pytest.mark.parametrize("batch_size", [pytest.param(16, marks=slow), 13])
@pytest.mark.parametrize("num_devices,group_size", GROUPS)
@pytest.mark.parametrize("name", ["plain", "residual"])
def test_worker_groups_equal_the_oracle(name, num_devices, group_size, batch_size):
    network = networks.NETWORKS[name]()
    batches = networks.random_batches(NUM_STEPS, batch_size)
    recipe = Recipe(clip_norm=0.5)
    groups = create_towers(
        network, recipe, batches, num_devices, cls=ModelParallel, group_size=group_size
    )
    groups.train(NUM_STEPS)
    expected = recipe.oracle(network, batches, num_devices // group_size)
    assert_equal_to_oracle(groups.state(), expected)
    whole = sum(value.nbytes for value in network.params.values())
    assert sum(groups.param_bytes) == whole
    assert max(groups.param_bytes) < 1.5 * whole / group_size


def test_worker_groups_share_moments_where_asked():
    network = networks.residual_network()
    batches = networks.random_batches(NUM_STEPS, 13)
    recipe = Recipe()
    groups = create_towers(
        network,
        recipe,
        batches,
        6,
        cls=ModelParallel,
        group_size=2,
        sync_batch_norm=True,
    )
    groups.train(NUM_STEPS)
    assert_equal_to_oracle(groups.state(), recipe.oracle(network, batches, 1))


@pytest.mark.parametrize("algorithm", ["star", "tree", "ring"])
def test_every_all_reduce_equals_the_oracle(algorithm):
    network = networks.residual_network()
    batches = networks.random_batches(NUM_STEPS, 13)
    recipe = Recipe()
    replicas = create_towers(
        network, recipe, batches, 3, cls=Replicated, algorithm=algorithm, pack_mb=0.001
    )
    replicas.train(NUM_STEPS)
    assert_equal_to_oracle(replicas.state(), recipe.oracle(network, batches, 3))


def test_a_replica_that_differs_is_named():
    """FAULTS row 27."""
    network = networks.plain_network()
    replicas = create_towers(
        network, Recipe(), networks.random_batches(2, 8), 3, cls=Replicated
    )
    replicas.train(1)
    replicas.state()
    slot = replicas._replicas[2].slots[0]["velocity"]
    slot.assign_add(tf.ones_like(slot) * 1e-6)
    with pytest.raises(NumericError, match=r"slots/conv1/kernel/velocity of tower 2"):
        replicas.state()


def of_kind(kind, network, recipe, batches):
    """A strategy by the name of its kind, on some devices."""
    cls, num_devices, options = {
        "towers": (Towers, 3, {}),
        "replicated": (Replicated, 2, {"algorithm": "tree"}),
        "model_parallel": (ModelParallel, 4, {"group_size": 2}),
    }[kind]
    return create_towers(network, recipe, batches, num_devices, cls=cls, **options)


@pytest.mark.parametrize("name", ["plain", "residual"])
def test_any_strategy_continues_the_state_of_any_other(name):
    """FAULTS row 11: save in X, resume in Y, for all pairs."""
    network = networks.NETWORKS[name]()
    batches = networks.random_batches(6, 13)
    recipe = Recipe()
    kinds = ("towers", "replicated", "model_parallel")
    strategies = {k: of_kind(k, network, recipe, batches) for k in kinds}
    halves, wholes = {}, {}
    for kind, strategy in strategies.items():
        strategy.train(3)
        halves[kind] = strategy.state()
        strategy.train(3)
        wholes[kind] = strategy.state()
    for writer, state in halves.items():
        for reader, strategy in strategies.items():
            strategy.load(state)
            loaded = strategy.state()
            assert list(loaded) == list(state)
            for key, value in state.items():
                np.testing.assert_array_equal(loaded[key], value, err_msg=key)
            if name == "residual":
                continue  # each has its own local moments
            strategy.train(3)
            for key, value in strategy.state().items():
                np.testing.assert_allclose(
                    value, wholes[writer][key], atol=1e-5, err_msg=(writer, reader)
                )


class ClippedShares(Towers):
    """Broken on purpose: every tower clips before the mean."""

    def _results(self, fetched, batch):
        results = super()._results(fetched, batch)
        clip = self._update.clip_norm
        return [
            r._replace(gradients=tf.clip_by_global_norm(r.gradients, clip)[0])
            for r in results
        ]


class UnscaledReplicas(Replicated):
    """Broken on purpose: the all-reduce adds the towers' means up."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._weights = [1.0] * len(self._weights)


class SkippedReplica(Replicated):
    """Broken on purpose: the last tower's gradients never arrive."""

    def _all_reduce(self, tensors, **reduction):
        last = [tf.zeros_like(tensor) for tensor in tensors[-1]]
        return super()._all_reduce([*tensors[:-1], last], **reduction)


@pytest.mark.parametrize("broken", [ClippedShares, UnscaledReplicas, SkippedReplica])
def test_the_oracle_objects_to_gradients_that_meet_wrongly(broken):
    network = networks.plain_network()
    batches = networks.random_batches(NUM_STEPS, 16)
    # Where every step is clipped, a gradient of the wrong length would not be seen.
    recipe = Recipe(clip_norm=0.5 if broken is ClippedShares else 0.0)
    strategy = create_towers(network, recipe, batches, 4, cls=broken)
    strategy.train(NUM_STEPS)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equal_to_oracle(strategy.state(), recipe.oracle(network, batches, 4))


def test_the_oracle_objects_to_a_transfer_of_the_wrong_slice(monkeypatch):
    def swapped(*slices):
        return tf.concat(slices[::-1], -1)

    monkeypatch.setattr(slices, "concatenated", swapped)
    network = networks.plain_network()
    batches = networks.random_batches(NUM_STEPS, 16)
    groups = create_towers(
        network, Recipe(), batches, 2, cls=ModelParallel, group_size=2
    )
    groups.train(NUM_STEPS)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equal_to_oracle(groups.state(), Recipe().oracle(network, batches, 1))
