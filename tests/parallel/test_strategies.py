"""Every synchronous strategy computes what one device does on the whole batch."""

import collections
import dataclasses
import itertools

import networks
import numpy as np
import pytest
import small_runs
from engines.pairs import pairwise
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

from benchmarks.graphs.executed import partition_graphs
from towers.config import choices
from towers.errors import NumericError
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.strategies.auto import auto
from towers.parallel.strategies.model_parallel import model_parallel
from towers.parallel.strategies.replicated import replicated
from towers.parallel.strategies.towers import towers

pytestmark = pytest.mark.usefixtures("several_vectors")

NUM_STEPS = 6
STRATEGIES = {
    "towers": towers,
    "replicated": replicated,
    "model_parallel": model_parallel,
}


def test_every_strategy_is_compared_with_the_oracle():
    """Other strategies have test files of their own."""
    elsewhere = {"auto", "multi_worker", "async_towers"}
    assert choices.STRATEGIES.keys() - STRATEGIES == elsewhere


@pytest.mark.parametrize("num_devices", [1, 3])
def test_auto_keeps_one_copy_on_cpus(num_devices):
    """For GPUs see test_gpu_graphs."""
    network = networks.NETWORKS["plain"]("float32")
    batches = networks.random_batches(1, 12, seed=0)
    for reduction in ({}, {"all_reduce": "ring", "all_reduce_dtype": "bfloat16"}):
        options = network, Recipe(), batches, num_devices
        strategy = create_trainer(auto, *options, **reduction).strategy
        assert len(strategy.copies) == 1
        assert strategy.readers == [0] * num_devices
        assert strategy.description[1:] == [
            f"{k}={x} has no effect with strategy=towers" for k, x in reduction.items()
        ]


# The suite: strategy x towers x network x optimizer x accumulation x batch, and type.

AXES = {
    "place": [  # strategy, towers that share a batch, devices of each
        *itertools.product(["towers", "replicated"], [1, 2, 3, 4, 8], [1]),
        *itertools.product(["model_parallel"], [1, 2, 3, 4], [2]),
        *itertools.product(["model_parallel"], [1, 2], [4]),
    ],
    "network": ["plain", "local", "sync"],  # the others have batch normalization
    # In float64, where rounding hides nothing, that which does all that the others do.
    "optimizer": ["nesterov", "momentum", "sgd"],
    "accumulate_steps": [1, 3],
    "batch_size": [16, 13],  # of a micro-batch
    "dtype": ["float32", "float64"],
}
ALL_REDUCE = {3: "tree", 4: "ring"}  # of so many replicas; else star
TOLERANCES = {"float32": 1e-5, "float64": 1e-10}


@dataclasses.dataclass(frozen=True)
class Case:
    """A strategy and everything that its result could depend on."""

    place: tuple[str, int, int]
    network: str
    optimizer: str
    accumulate_steps: int
    batch_size: int
    dtype: str

    def __str__(self):
        return " ".join(map(str, (*self.place, *dataclasses.astuple(self)[1:])))

    def check(self, seed):
        """Train on images of a seed, and compare."""
        (strategy, num_towers, group_size), steps = self.place, self.accumulate_steps
        kind = "plain" if self.network == "plain" else "residual"
        network = networks.NETWORKS[kind](self.dtype)
        images = steps * self.batch_size
        batches = networks.random_batches(NUM_STEPS, images, seed=seed)
        recipe = Recipe(self.optimizer, clip_norm_for(network, batches))
        expected = recipe.oracle(
            network, batches, 1 if self.network == "sync" else num_towers, steps
        )
        assert_some_are_clipped(expected.reports, recipe)
        options = {"accumulate_steps": steps, "sync_batch_norm": self.network == "sync"}
        if strategy == "replicated":
            options["all_reduce"] = ALL_REDUCE.get(num_towers, "star")
        if strategy == "model_parallel":
            options["group_size"] = group_size
        create, num_devices = STRATEGIES[strategy], num_towers * group_size
        trainer = create_trainer(
            create, network, recipe, batches, num_devices, **options
        )
        step = 0
        for num_steps in (1, 2, 3):
            metrics, step = trainer.train(num_steps), step + num_steps
            report, losses = expected.reports[step - 1], metrics["tower_losses"]
            assert_metrics(metrics, report)
            assert losses.shape == (num_towers,)
            if self.network != "sync":  # which the oracle computes as one tower
                np.testing.assert_allclose(losses, report.tower_losses, rtol=1e-4)
        assert_equal_to_oracle(trainer.state(), expected, TOLERANCES[self.dtype])


# Likely to go wrong together: uneven shares, several micro-batches, shared moments or
# not, a velocity. Each value of each axis but for the places is here.
FAST = [
    Case(("towers", 2, 1), "sync", "momentum", 3, 13, "float32"),
    Case(("replicated", 3, 1), "local", "nesterov", 3, 13, "float64"),
    Case(("model_parallel", 2, 2), "sync", "nesterov", 1, 13, "float64"),
]


def marked_cases():
    """Yield few slow cases with each pair of values of any two axes."""

    def is_possible(case):
        return case["dtype"] == "float32" or case["optimizer"] == "nesterov"

    chosen = pairwise(AXES, [vars(x) for x in FAST], is_possible)
    for case in dict.fromkeys(Case(**x) for x in chosen):
        marks = [] if case in FAST else [pytest.mark.slow]
        yield pytest.param(case, id=str(case), marks=marks)


@pytest.mark.parametrize("case", list(marked_cases()))
def test_training_equals_the_oracle(case, monkeypatch):
    with_images_off_kinks(case.check, case.dtype, monkeypatch)


def test_steps_of_gpus_equal_the_oracle(monkeypatch):
    """Steps are part of the loop, and select between old and new values."""
    have_steps_of_gpus(monkeypatch)
    case = Case(("replicated", 4, 1), "plain", "sgd", 1, 16, "float32")
    with_images_off_kinks(case.check, case.dtype, monkeypatch)


# The number of towers makes another strategy here.
KINDS = {
    "towers 3": (towers, 3, {}),
    "towers 1": (towers, 1, {}),
    "replicated 2": (replicated, 2, {"all_reduce": "tree"}),
    "model_parallel 2x2": (model_parallel, 4, {"group_size": 2}),
    # Several of them update in an order of their own.
    "async_towers 1": (AsynchronousTrainer, 1, {}),
}


@pytest.mark.row(11)
@pytest.mark.parametrize(
    "name,kinds",
    [
        ("plain", ["towers 3", "model_parallel 2x2"]),
        slow("plain", KINDS),
        slow("residual", KINDS),
    ],
)
def test_any_strategy_continues_the_state_of_any_other(name, kinds):
    network = networks.NETWORKS[name]()
    batches = networks.random_batches(6, 13)
    strategies, saved, whole = {}, {}, {}
    for kind in kinds:
        cls, num_devices, options = KINDS[kind]
        if name == "residual" and num_devices > 1:
            # With local moments each would rightly go its own way.
            options = options | {"sync_batch_norm": True}
        strategies[kind] = create_trainer(
            cls, network, Recipe(), batches, num_devices, **options
        )
        strategies[kind].train(3)
        saved[kind] = strategies[kind].state()
        strategies[kind].train(3)
        whole[kind] = strategies[kind].state()
    for writer in kinds:
        for strategy in strategies.values():
            strategy.load(saved[writer])
            small_runs.assert_equal_states(strategy.state(), saved[writer])
            assert strategy.train(3)["step"] == 6
            assert_close(strategy.state(), whole[writer])


@pytest.mark.parametrize("cls", [towers, AsynchronousTrainer])
def test_request_stop_before_the_first_step_takes_none(cls):
    network, batches = networks.plain_network(), networks.random_batches(3, 8)
    towers = create_trainer(cls, network, Recipe(), batches, 2)
    assert towers.progress() == (0, "tracing the step")
    towers.request_stop()
    assert towers.train(3) == {}
    assert towers.progress() == (0, "idle")


@pytest.mark.row(27)
def test_a_replica_that_differs_is_named():
    network = networks.plain_network()
    batches = networks.random_batches(2, 8)
    replicas = create_trainer(replicated, network, Recipe(), batches, 3)
    replicas.state()
    params, *_ = replicas.strategy.copies[2].params
    params.assign(params * (1 + 1e-6))
    with pytest.raises(NumericError, match=r"params/conv1/kernel of tower 2"):
        replicas.state()


# Where things are computed.


def test_each_tower_computes_on_its_own_device_and_variables_stay_on_theirs():
    network = networks.residual_network()
    batches = networks.random_batches(2, 12)
    trainer = create_trainer(
        towers, network, Recipe(), batches, 3, parameter_device="/CPU:7"
    )

    # The step as the loop calls it.
    step_call, zeros = trainer.loop._step_call, trainer.train_step.zero_metrics()
    graphs = partition_graphs(lambda: step_call(0, trainer.feed.batches_of(0), zeros))

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
    num_variables = len(list(trainer.strategy.copies[0].variables()))
    assert ops["7"]["AssignVariable"] == num_variables
    assert not any(ops[tower]["AssignVariable"] for tower in "012")
