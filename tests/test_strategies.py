"""Every synchronous strategy computes what one device does on the whole batch."""

import collections
import dataclasses
import functools
import itertools

import networks
import numpy as np
import oracle
import pytest
import small_runs
import tensorflow as tf
from marks import slow
from recipes import (
    Recipe,
    assert_close,
    assert_equal_to_oracle,
    assert_metrics,
    assert_some_are_clipped,
    clip_norm_for,
    create_trainer,
    have_steps_of_gpus,
    with_images_off_kinks,
)

from benchmarks.proofs import partition_graphs
from towers.data.part import shares
from towers.errors import NumericError
from towers.optim import losses
from towers.optim.update import Update
from towers.optim.vector import Layout
from towers.parallel import step as step_module
from towers.parallel import strategies
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.sharding import slices
from towers.run.checkpoint import Snapshot
from towers.run.checkpointer import Checkpointer

pytestmark = pytest.mark.usefixtures("several_vectors")

NUM_STEPS = 10
STRATEGIES = {
    "towers": strategies.towers,
    "replicated": strategies.replicated,
    "model_parallel": strategies.model_parallel,
}
both = pytest.mark.parametrize(
    "cls", [strategies.towers, strategies.replicated], ids=["towers", "replicated"]
)


# The suite: strategy x towers x network x optimizer x accumulation x batch, and type.

PLACES = [  # strategy, towers that share a batch, devices of each
    *itertools.product(["towers", "replicated"], [1, 2, 3, 4, 8], [1]),
    *itertools.product(["model_parallel"], [1, 2, 3, 4], [2]),
    *itertools.product(["model_parallel"], [1, 2], [4]),
]
NETWORKS = ("plain", "local", "sync")  # the others have batch normalisation
OPTIMIZERS = ("sgd", "momentum", "nesterov")
ACCUMULATE_STEPS = (1, 3)
BATCH_SIZES = (16, 13)  # of a micro-batch
TOLERANCES = {"float32": 1e-5, "float64": 1e-10}


@dataclasses.dataclass(frozen=True)
class Case:
    """A strategy and all else on which its result could depend."""

    strategy: str
    num_towers: int
    group_size: int
    network: str
    optimizer: str
    accumulate_steps: int
    batch_size: int
    dtype: str
    seed: int = 0

    def __str__(self):
        devices = f"{self.num_towers}x{self.group_size}".removesuffix("x1")
        images = f"{self.accumulate_steps}x{self.batch_size}".removeprefix("1x")
        words = (self.strategy, devices, self.network, self.optimizer, images)
        return " ".join([*words, self.dtype])

    def create_network(self) -> networks.Network:
        kind = "plain" if self.network == "plain" else "residual"
        return networks.NETWORKS[kind](self.dtype)

    def recipe(self) -> Recipe:
        clip_norm = clip_norm_for(self.create_network(), self.batches())
        return Recipe(self.optimizer, clip_norm)

    def batches(self) -> list[dict]:
        images = self.accumulate_steps * self.batch_size
        return networks.random_batches(NUM_STEPS, images, seed=self.seed)

    def create_trainer(self, network):
        options = {}
        if self.accumulate_steps > 1:
            options["accumulate_steps"] = self.accumulate_steps
        if self.network == "sync":
            options["sync_batch_norm"] = True
        if self.strategy == "model_parallel":
            options["group_size"] = self.group_size
        return create_trainer(
            STRATEGIES[self.strategy],
            network,
            self.recipe(),
            self.batches(),
            self.num_towers * self.group_size,
            **options,
        )

    def on_one_device(self) -> "Case | None":
        """What one device would have to do for the same result, if there is any."""
        if self.network == "local" and self.num_towers > 1:
            return None
        one = dataclasses.replace(self, strategy="towers", num_towers=1, group_size=1)
        if self.network == "plain":
            images = self.accumulate_steps * self.batch_size
            return dataclasses.replace(one, accumulate_steps=1, batch_size=images)
        return dataclasses.replace(one, network="local")


# Likely to go wrong together: uneven shares, several micro-batches, shared moments or
# not, a velocity. Each value of each axis is here.
FAST = """
towers 2 sync momentum 3x13 float32
towers 3 local nesterov 13 float64
towers 8 plain sgd 16 float32
replicated 2 local momentum 3x13 float32
replicated 3 sync nesterov 13 float64
replicated 4 plain sgd 16 float32
model_parallel 1x2 local momentum 3x13 float32
model_parallel 1x4 plain sgd 16 float32
model_parallel 2x2 sync nesterov 13 float64
"""
FAST = [line for line in FAST.splitlines() if line]


@functools.cache
def all_cases() -> list[Case]:
    """The whole product in float32; in float64, where rounding hides nothing, with the
    optimizer that does all that the others do."""
    axes = (PLACES, NETWORKS, OPTIMIZERS, ACCUMULATE_STEPS, BATCH_SIZES, TOLERANCES)
    cases = [Case(*place, *others) for place, *others in itertools.product(*axes)]
    return [
        case
        for case in cases
        if case.dtype == "float32" or case.optimizer == "nesterov"
    ]


def pairs(case: Case) -> set:
    """The values of any two axes; strategy, towers and group size are one."""
    place = (case.strategy, case.num_towers, case.group_size)
    values = (place, *dataclasses.astuple(case)[3:-1])
    return set(itertools.combinations(enumerate(values), 2))


@functools.cache
def pairwise_cases() -> list[Case]:
    """Few cases in which every pair of values of any two axes occurs: the fast ones,
    then each time the case with most new pairs."""
    chosen = [case for case in all_cases() if str(case) in FAST]
    missing = set().union(*map(pairs, all_cases())) - set().union(*map(pairs, chosen))
    while missing:
        chosen.append(max(all_cases(), key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def test_the_fast_cases_have_each_value_of_each_axis():
    fast = [case for case in all_cases() if str(case) in FAST]
    assert len(fast) == len(FAST)
    for strategy in STRATEGIES:
        cases = [c for c in all_cases() if c.strategy == strategy]
        for axis in ("network", "optimizer", "accumulate_steps", "batch_size", "dtype"):
            values = {getattr(case, axis) for case in cases}
            here = {getattr(c, axis) for c in fast if c.strategy == strategy}
            assert here == values, (strategy, axis)
    for axis in ("num_towers", "group_size"):
        values = {getattr(case, axis) for case in all_cases()}
        assert {getattr(case, axis) for case in fast} == values


def test_the_slow_cases_have_each_pair_of_values_of_any_two_axes():
    assert len(pairwise_cases()) < 70
    one = Case("towers", 3, 1, "sync", "sgd", 3, 13, "float32")
    assert sum(pairs(one) <= pairs(case) for case in all_cases()) == 1
    assert all(
        any(pair in pairs(case) for case in pairwise_cases())
        for case in all_cases()
        for pair in pairs(case)
    )


def marked_cases():
    for case in all_cases():
        marks = [pytest.mark.product]
        if case in pairwise_cases():
            marks = [] if str(case) in FAST else [pytest.mark.slow]
        yield pytest.param(case, id=str(case), marks=marks)


@functools.cache
def trained_state(case: Case) -> dict[str, np.ndarray]:
    trainer = case.create_trainer(case.create_network())
    trainer.train(NUM_STEPS)
    return trainer.state()


@pytest.mark.parametrize("case", list(marked_cases()))
def test_training_equals_the_oracle_and_one_device(case, monkeypatch):
    with_images_off_kinks(
        lambda seed: assert_trained_as_by_the_oracle(
            dataclasses.replace(case, seed=seed)
        ),
        case.dtype,
        monkeypatch,
    )


def assert_trained_as_by_the_oracle(case):
    network, recipe = case.create_network(), case.recipe()
    expected = recipe.oracle(
        network,
        case.batches(),
        num_towers=1 if case.network == "sync" else case.num_towers,
        accumulate_steps=case.accumulate_steps,
    )
    assert_some_are_clipped(expected.reports, recipe)

    strategy = case.create_trainer(network)
    metrics = [strategy.train(num_steps) for num_steps in (1, 4, 5)]

    state, tolerance = strategy.state(), TOLERANCES[case.dtype]
    assert_equal_to_oracle(state, expected, tolerance)
    for seen, step in zip(metrics, (1, 5, 10), strict=True):
        report, tower_losses = expected.reports[step - 1], seen["tower_losses"]
        assert_metrics(seen, report)
        assert tower_losses.shape == (case.num_towers,)
        if case.network != "sync":  # which the oracle computes as one tower
            np.testing.assert_allclose(tower_losses, report.tower_losses, rtol=1e-4)
    one_device = case.on_one_device()
    if one_device not in (None, case):
        assert_close(state, trained_state(one_device), tolerance)


@pytest.mark.parametrize("group_size", [2, 4])
@pytest.mark.parametrize("name", ["plain", "residual"])
def test_each_device_of_a_group_owns_its_share_of_the_parameters(name, group_size):
    network = networks.NETWORKS[name]()
    batches = networks.random_batches(1, 8)
    groups = create_trainer(
        strategies.model_parallel, network, Recipe(), batches, 8, group_size=group_size
    )
    whole = sum(value.nbytes for value in network.params.values())
    num_bytes = [
        sum(v.nbytes for k, v in copy.numpy().items() if k.startswith("params/"))
        for copy in groups.strategy.shards
    ]
    assert sum(num_bytes) == whole
    assert max(num_bytes) < 1.5 * whole / group_size


@pytest.mark.parametrize("algorithm", ["tree", "ring"])
def test_every_all_reduce_equals_the_oracle(algorithm):
    """The suite takes the other one, star."""
    network = networks.plain_network()
    batches = networks.random_batches(NUM_STEPS, 13)
    replicas = create_trainer(
        strategies.replicated,
        network,
        Recipe(),
        batches,
        3,
        all_reduce=algorithm,
    )
    replicas.train(NUM_STEPS)
    assert_equal_to_oracle(replicas.state(), Recipe().oracle(network, batches))


# What is repeated, continued, stopped.


@both
def test_two_runs_are_bit_equal_and_so_are_other_cuts_into_calls(cls):
    network = networks.residual_network()
    batches = networks.random_batches(6, 13)
    states = []
    for calls in ([6], [1, 2, 3]):
        towers = create_trainer(cls, network, Recipe(), batches, 3)
        for num_steps in calls:
            towers.train(num_steps)
        states.append(towers.state())
    for name, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][name], err_msg=name)


# Towers of another number are another strategy here.
KINDS = {
    "towers 3": (strategies.towers, 3, {}),
    "towers 1": (strategies.towers, 1, {}),
    "replicated 2": (strategies.replicated, 2, {"all_reduce": "tree"}),
    "model_parallel 2x2": (strategies.model_parallel, 4, {"group_size": 2}),
    # Several of them update in an order of their own.
    "async_towers 1": (AsynchronousTrainer, 1, {}),
}


@pytest.mark.parametrize("name", ["plain", slow("residual")])
@pytest.mark.row(11)
def test_any_strategy_continues_a_checkpoint_of_any_other(name, tmp_path):
    """reliability.md, row 11: save in X, resume in Y, for all ordered pairs."""
    network = networks.NETWORKS[name]()
    batches = networks.random_batches(6, 13)
    strategies, whole = {}, {}
    for kind, (cls, num_devices, options) in KINDS.items():
        if name == "residual" and num_devices > 1:
            # With local moments each would rightly go its own way.
            options = options | {"sync_batch_norm": True}
        strategies[kind] = create_trainer(
            cls, network, Recipe(), batches, num_devices, **options
        )
        strategies[kind].train(3)
        state = strategies[kind].state()
        Checkpointer(tmp_path / kind).save(Snapshot(3, state, {}))
        strategies[kind].train(3)
        whole[kind] = strategies[kind].state()
    for writer in KINDS:
        saved = Checkpointer(tmp_path / writer).restore().tensors
        for strategy in strategies.values():
            strategy.load(saved)
            small_runs.assert_equal_states(strategy.state(), saved)
            assert strategy.train(3)["step"] == 6
            assert_close(strategy.state(), whole[writer])


@both
@pytest.mark.parametrize("bad_tower", [slow(0), 2])
@pytest.mark.row(14)
def test_a_bad_tower_stops_before_the_update(cls, bad_tower):
    network = networks.plain_network()
    batches = networks.random_batches(5, 16)
    batches[3]["images"][4 * bad_tower + 1, 0, 0, 0] = np.nan
    recipe = Recipe()
    towers = create_trainer(cls, network, recipe, batches, 4)
    with pytest.raises(NumericError, match=rf"^step 4: .* of tower {bad_tower} \("):
        towers.train(5)
    assert_equal_to_oracle(towers.state(), recipe.oracle(network, batches[:3], 1))


def test_request_stop_ends_after_the_step_in_hand():
    network = networks.plain_network()
    batches = networks.random_batches(3, 8)
    towers = create_trainer(strategies.towers, network, Recipe(), batches, 2)
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
    recipe = Recipe()
    towers = create_trainer(
        strategies.towers,
        network,
        recipe,
        batches,
        1,
        loss_fn=lambda x, labels: recipe.loss_fn(x, passing(1.0, labels)),
    )
    [stream] = towers._feed._streams
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # drawn when wanted
    towers._feed._streams = [
        lambda first_step: (
            stream(first_step)
            .map(lambda batch: batch | {"labels": passing(3.0, batch["labels"])})
            .with_options(options)
        )
    ]
    monkeypatch.setattr(tf, "timestamp", clock)
    assert towers.train(3)["input_wait_secs"] == 9.0
    assert now == [12.0]
    assert towers.train(1)["input_wait_secs"] == 3.0


def test_towers_without_averages_keep_none():
    network = networks.plain_network()
    batches = networks.random_batches(3, 8)
    towers = create_trainer(
        strategies.towers, network, Recipe(ema_decay=0.0), batches, 2
    )
    towers.train(3)
    assert not [name for name in towers.state() if name.startswith("averages/")]


@pytest.mark.row(27)
def test_a_replica_that_differs_is_named():
    """reliability.md, row 27."""
    network = networks.plain_network()
    batches = networks.random_batches(2, 8)
    replicas = create_trainer(strategies.replicated, network, Recipe(), batches, 3)
    replicas.train(1)
    replicas.state()
    velocity, *_ = replicas.strategy.copies[2].slots["velocity"]
    velocity.assign_add(tf.ones_like(velocity) * 1e-6)
    with pytest.raises(NumericError, match=r"slots/conv1/kernel/velocity of tower 2"):
        replicas.state()


# Evaluation, and where things are computed.


@pytest.mark.parametrize(
    "cls,num_devices,options",
    [
        slow(strategies.towers, 1, {}),
        (strategies.towers, 3, {}),
        slow(strategies.towers, 8, {}),
        (strategies.replicated, 3, {}),
        slow(strategies.replicated, 8, {}),
        (strategies.model_parallel, 4, {"group_size": 2}),
    ],
)
@pytest.mark.row(24)
def test_evaluation_counts_every_weighted_image_once(cls, num_devices, options):
    network = networks.residual_network()
    batches = networks.random_batches(3, 13)
    for batch in batches:
        batch["weights"] = np.ones(13, np.float32)
    batches[-1]["weights"][5:] = 0
    strategy = create_trainer(cls, network, Recipe(), batches, num_devices, **options)

    num_towers = num_devices // options.get("group_size", 1)
    devices = strategy.devices[:: options.get("group_size", 1)]
    feed = networks.feed_of(batches, shares(13, num_towers), devices)
    counts = strategy.evaluate(feed, len(batches))[False]

    images = np.concatenate([b["images"] for b in batches])[: 13 + 13 + 5]
    labels = np.concatenate([b["labels"] for b in batches])[: 13 + 13 + 5]
    logits = oracle.forward(
        network.described, network.params, network.state, images, training=False
    ).logits
    image_losses, _ = oracle.cross_entropy(logits, labels, 0.1)
    assert counts["images"] == 31
    assert counts["correct"] == np.sum(np.argmax(logits, 1) == labels)
    assert counts["loss"] == pytest.approx(np.sum(image_losses), rel=1e-5)


def test_each_tower_computes_on_its_own_device_and_variables_stay_on_theirs():
    network = networks.residual_network()
    batches = networks.random_batches(2, 12)
    towers = create_trainer(
        strategies.towers, network, Recipe(), batches, 3, parameter_device="/CPU:7"
    )

    # The step as the loop calls it.
    step_call, zeros = towers.loop._step_call, towers._step.zero_metrics()
    graphs = partition_graphs(lambda: step_call(0, towers._feed.batches_of(0), zeros))

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
    # All variables of the copy, its step aside, and whether it is to go on.
    num_variables = len(list(towers.strategy.copies[0].variables()))
    assert ops["7"]["AssignVariable"] == num_variables
    assert not any(ops[tower]["AssignVariable"] for tower in "012")


@pytest.mark.parametrize(
    "cls,options",
    [
        (strategies.towers, {}),
        slow(strategies.replicated, {}),
        slow(strategies.model_parallel, {"group_size": 2}),
    ],
)
def test_a_step_on_cpus_is_called_by_the_loop_and_on_gpus_part_of_it(
    cls, options, monkeypatch
):
    """In a loop what rewrites operations for oneDNN finds them in no certain order."""
    network, batches = networks.residual_network(), networks.random_batches(2, 12)
    states = []
    for of_gpus in (False, True):
        if of_gpus:
            have_steps_of_gpus(monkeypatch)
        strategy = create_trainer(cls, network, Recipe(), batches, 2, **options)
        of_loop = collections.Counter(
            node.op
            for graph in partition_graphs(functools.partial(strategy.train, 2))
            for node in graph.node
        )
        assert of_loop["NextIteration"]
        assert any("Conv2DBackpropFilter" in op for op in of_loop) == of_gpus
        assert bool(of_loop["StatefulPartitionedCall"]) != of_gpus
        states.append(strategy.state())
    assert_close(*states, 1e-6)


# Faults that the oracle must object to, or the suite proves nothing. Each breaks one
# seam between the strategy, the network and the step of a trainer.


def change_step(trainer, **changes):
    """Gives the step of a trainer other parts."""
    for name, value in changes.items():
        object.__setattr__(trainer._step, name, value)


def change_gradients(trainer, change):
    """Changes the gradients of each tower, [device][vector]."""
    compute, size = trainer.network.gradients, trainer.strategy.num_shards

    def gradients(*args, **kwargs):
        results = compute(*args, **kwargs)
        for tower in range(len(trainer.strategy.sizes)):
            devices = slice(size * tower, size * (tower + 1))
            changed = change(tower, [r.gradients for r in results[devices]])
            results[devices] = [
                result._replace(gradients=list(new))
                for result, new in zip(results[devices], changed, strict=True)
            ]
        return results

    trainer.network.gradients = gradients


def scale_gradients(trainer, factors):
    """Multiplies those of each tower by a factor."""
    change_gradients(
        trainer,
        lambda tower, parts: [[factors[tower] * g for g in part] for part in parts],
    )


def summed_gradients(trainer, patch):
    """The towers' gradients are added up."""
    sizes = trainer.strategy.sizes
    scale_gradients(trainer, [sum(sizes) / size for size in sizes])


def equal_weights(trainer, patch):
    """The mean over the towers, although the batch is uneven."""
    sizes = trainer.strategy.sizes
    scale_gradients(trainer, [sum(sizes) / size / len(sizes) for size in sizes])


def skipped_tower(trainer, patch):
    """The last tower's gradients never arrive."""
    scale_gradients(trainer, [1.0] * (len(trainer.strategy.sizes) - 1) + [0.0])


def clipped_before_the_mean(trainer, patch):
    """Every tower clips its own gradients."""

    def change(tower, gradients):
        norm = tf.linalg.global_norm([g for part in gradients for g in part])
        clip_norm = trainer.task.update_fn.clip_norm
        return [tf.clip_by_global_norm(part, clip_norm, norm)[0] for part in gradients]

    change_gradients(trainer, change)


def late_rate(trainer, patch):
    """The schedule counts the steps of one tower, as the tutorial does."""
    update_fn, count = trainer.task.update_fn, len(trainer.strategy.sizes)
    rate_fn = update_fn.learning_rate_fn
    late = dataclasses.replace(
        update_fn, learning_rate_fn=lambda step: rate_fn(step // count)
    )
    change_step(trainer, update_fn=late)


def decay_per_tower(trainer, patch):
    """The weight decay is added once per tower."""

    class DecayOften(losses.WeightDecay):
        def __call__(self, params, gradients):
            for _ in trainer.strategy.sizes:
                decay, gradients = super().__call__(params, gradients)
            return decay, gradients

    patch.setattr(step_module, "WeightDecay", DecayOften)


def norm_of_a_shard(trainer, patch):
    """Every device clips by the norm of its shard."""

    class OwnNorm(Update):
        def __call__(self, layout, count, params, slots, gradients, norm, squares):
            norm = tf.linalg.global_norm(gradients)
            return super().__call__(layout, count, params, slots, gradients, norm)

    update_fn = trainer.task.update_fn
    change_step(trainer, update_fn=OwnNorm(**vars(update_fn)))


# Of the vectors.


def view_off_by_a_row(trainer, patch):
    """The parameters are read one row too low."""
    views = Layout.views
    patch.setattr(
        Layout, "views", lambda self, xs: views(self, [tf.roll(x, 1, 0) for x in xs])
    )


def columns_of_other_parameters(trainer, patch):
    """The coefficients of the weight decay are those of the parameters in reverse."""
    columns = Layout.columns
    patch.setattr(
        Layout, "columns", lambda self, values: columns(self, list(values)[::-1])
    )


def vector_left_out(trainer, patch):
    """The last vector has no gradient."""

    class Others(losses.WeightDecay):
        def __call__(self, params, gradients):
            decay, gradients = super().__call__(params, gradients)
            return decay, [*gradients[:-1], tf.zeros_like(gradients[-1])]

    patch.setattr(step_module, "WeightDecay", Others)


FAULTS = [
    (summed_gradients, "towers"),
    slow(summed_gradients, "replicated"),
    slow(summed_gradients, "model_parallel"),
    slow(equal_weights, "towers"),
    (equal_weights, "replicated"),
    slow(skipped_tower, "towers"),
    slow(skipped_tower, "model_parallel"),
    slow(clipped_before_the_mean, "towers"),
    (clipped_before_the_mean, "replicated"),
    slow(clipped_before_the_mean, "model_parallel"),
    (norm_of_a_shard, "model_parallel"),
    slow(decay_per_tower, "towers"),
    slow(decay_per_tower, "replicated"),
    slow(decay_per_tower, "model_parallel"),
    (late_rate, "towers"),
    (view_off_by_a_row, "towers"),
    (columns_of_other_parameters, "towers"),
    (vector_left_out, "replicated"),
]


def assert_objects(fault, patch, strategy, num_devices, **options):
    """The oracle finds other parameters than a trainer with a fault."""
    network = networks.plain_network()
    batches = networks.random_batches(NUM_STEPS, 13)
    recipe = Recipe(clip_norm=clip_norm_for(network, batches))
    trainer = create_trainer(
        STRATEGIES[strategy], network, recipe, batches, num_devices, **options
    )
    fault(trainer, patch)
    trainer.train(NUM_STEPS)
    with pytest.raises(AssertionError, match=r"Not equal to tolerance .*\nparams/"):
        assert_equal_to_oracle(trainer.state(), recipe.oracle(network, batches))


@pytest.mark.parametrize("fault,strategy", FAULTS)
def test_the_oracle_objects_to_a_fault_of_any_strategy(fault, strategy, monkeypatch):
    if strategy == "model_parallel":
        assert_objects(fault, monkeypatch, strategy, 4, group_size=2)
    else:
        assert_objects(fault, monkeypatch, strategy, 2)


def test_the_oracle_objects_to_a_transfer_of_the_wrong_slice(monkeypatch):
    def swapped_slices(trainer, patch):
        patch.setattr(
            slices, "concatenated", lambda *pieces: tf.concat(pieces[::-1], -1)
        )

    assert_objects(swapped_slices, monkeypatch, "model_parallel", 2, group_size=2)
