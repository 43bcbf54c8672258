"""A function that is traced once and copied into every graph that calls it."""

import networks
from recipes import Recipe, create_trainer

from towers.optim.phases import Phase
from towers.parallel.strategies.towers import towers


def test_towers_with_equally_many_images_share_a_trace():
    """Ten images for four towers, in shares of 3 and of 2; phases have own traces."""
    plain, batches = networks.plain_network(), networks.random_batches(2, 10)
    frozen = frozenset({"conv1/kernel"})
    phases = [Phase(1, plain.model), Phase(9, plain.model, frozen)]
    options = (towers, plain, Recipe(), batches, 4)
    trainer = create_trainer(*options, phases=phases)
    trainer.trace()
    traces = [
        x._function.experimental_get_tracing_count()
        for x in trainer.towers._gradient_fns.values()
    ]
    assert traces == [2, 2]
