"""Bytes that cross devices, compared with the documented formulas."""

import math

import pytest
import traced
from marks import slow

from benchmarks.graphs.crossings import per_step, summed

# Bytes of scalars (metrics, counters, the finite check) and labels.
LITTLE = 1500


def bytes_per_step(trained) -> dict[tuple[str, str], int]:
    return per_step(trained.crossings())


def sizes(trained):
    """Return the bytes of the vectors of parameters and model state."""
    copy = trained.trainer.strategy.copies[0]
    return [
        sum(v.shape.num_elements() * v.dtype.size for v in variables)
        for variables in (copy.params, [*copy.state, *copy.integers])
    ]


def assert_about(actual, expected, little=LITTLE):
    """Compare except for scalars; real differences are many kilobytes."""
    assert expected - 1 < actual <= expected + little, (actual, expected)


@pytest.mark.parametrize(
    "model,num_towers,accumulate_steps", [slow("lenet", 3, 1), ("speedrun", 2, 3)]
)
def test_towers_fetch_all_variables_and_return_gradients_and_state(
    model, num_towers, accumulate_steps
):
    trained = traced.on_gpus(
        strategy="towers",
        model=model,
        width=0.25,
        num_towers=num_towers,
        input="stream",
        accumulate_steps=accumulate_steps,
    )
    variables = num_towers * sum(sizes(trained))
    crossed = summed(bytes_per_step(trained))
    assert_about(crossed["host to GPU"], variables)
    assert_about(crossed["GPU to host"], variables)
    assert crossed["GPU to GPU"] == 0


@pytest.mark.parametrize(
    "all_reduce,num_towers", [slow("star", 3), slow("ring", 3), slow("tree", 4)]
)
def test_replicas_send_what_the_all_reduce_needs(all_reduce, num_towers):
    trained = traced.on_gpus(
        strategy="replicated",
        all_reduce=all_reduce,
        num_towers=num_towers,
        model="speedrun",
        width=0.25,
        input="stream",
    )
    params, state = sizes(trained)
    crossed = bytes_per_step(trained)
    expected = 2 * (num_towers - 1) * (params + state)
    assert_about(summed(crossed)["GPU to GPU"], expected)
    sent = {f"/GPU:{i}": 0 for i in range(num_towers)}
    for (source, destination), count in crossed.items():
        if "host" not in (source, destination):
            sent[source] += count
    busiest = {
        "star": (num_towers - 1) * params,
        "tree": math.ceil(math.log2(num_towers)) * params,
        "ring": 2 * params * (num_towers - 1) / num_towers,
    }
    allowed = (num_towers - 1) * state + 0.01 * params + LITTLE  # the state's is a star
    assert busiest[all_reduce] <= max(sent.values()) <= busiest[all_reduce] + allowed


@pytest.mark.slow
def test_an_asynchronous_tower_fetches_once_and_returns_its_gradients_once():
    trained = traced.on_gpus(strategy="async_towers", num_towers=2)
    variables = 2 * sum(sizes(trained))
    crossed = summed(bytes_per_step(trained))
    assert_about(crossed["host to GPU"], variables)
    assert_about(crossed["GPU to host"], variables)
