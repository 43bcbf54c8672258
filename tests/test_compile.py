"""--compile=xla: the same training, each tower's part compiled as one."""

import networks
import pytest
import small_runs
from recipes import (
    Recipe,
    assert_close,
    assert_equal_to_oracle,
    create_trainer,
    have_steps_of_gpus,
)

from benchmarks.graphs import placement
from towers.parallel import strategies
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.training import train


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls,num_towers,name,accumulate_steps",
    [
        (strategies.towers, 2, "plain", 1),
        (AsynchronousTrainer, 1, "residual", 1),
        (strategies.replicated, 2, "residual", 2),
    ],
)
def test_compiled_towers_equal_the_oracle(cls, num_towers, name, accumulate_steps):
    network = networks.NETWORKS[name]()
    batches = networks.random_batches(3, 12 * accumulate_steps)
    options = {"accumulate_steps": accumulate_steps} if accumulate_steps > 1 else {}
    towers = create_trainer(
        cls, network, Recipe(), batches, num_towers, compile_towers=True, **options
    )
    towers.train(3)
    expected = Recipe().oracle(network, batches, num_towers, accumulate_steps)
    assert_equal_to_oracle(towers.state(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["momentum", "nesterov"])
def test_on_gpus_the_update_is_compiled_as_well(optimizer, monkeypatch):
    have_steps_of_gpus(monkeypatch)
    network, recipe = networks.residual_network(), Recipe(optimizer)
    batches = networks.random_batches(3, 13)
    towers = create_trainer(
        strategies.replicated, network, recipe, batches, 2, compile_towers=True
    )
    towers.train(3)
    assert_equal_to_oracle(towers.state(), recipe.oracle(network, batches, 2))


def test_what_is_compiled_stays_on_its_tower():
    network = networks.residual_network()
    batches = networks.random_batches(1, 12)
    towers = create_trainer(
        strategies.towers, network, Recipe(), batches, 3, compile_towers=True
    )
    [graph] = towers.trace()
    every = list(placement.placements(graph))
    compiled = [p for p in every if p.compiled]
    assert {p.device for p in compiled} == {"/CPU:0", "/CPU:1", "/CPU:2"}
    assert any(p.op.type == "Conv2DBackpropFilter" for p in compiled)
    assert not any("Variable" in p.op.type for p in compiled)
    assert not any("Backprop" in p.op.type for p in every if not p.compiled)


@pytest.mark.slow
def test_a_run_may_be_continued_with_another_compiler(tmp_path, monkeypatch):
    small_runs.use(monkeypatch, small_runs.dropout_network)
    whole = train(tmp_path / "whole", small_runs.small_config()).state
    folder = tmp_path / "both"
    train(folder, small_runs.small_config(compile="xla", num_towers=2, max_steps=5))
    assert_close(train(folder, small_runs.small_config()).state, whole, 1e-4)
