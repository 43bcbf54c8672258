"""--recompute: the same bits in less memory."""

import functools
import math

import keras
import networks
import pytest
import small_runs
from marks import slow
from recipes import Recipe, create_trainer

from benchmarks.graphs.executed import step_on_cpus
from towers.errors import ConfigError
from towers.models.create import create_model
from towers.optim.phases import Phase
from towers.parallel.asynchronous import AsynchronousTrainer
from towers.parallel.recompute import segments
from towers.parallel.strategies.model_parallel import model_parallel
from towers.parallel.strategies.replicated import replicated
from towers.parallel.strategies.towers import towers


def trained(network, create, num_devices, options, batches):
    """Return the states after two steps, without recomputation and with it."""
    states = []
    for recompute in (False, True):
        trainer = create_trainer(
            create,
            network,
            Recipe(),
            batches,
            num_devices,
            recompute=recompute,
            **options,
        )
        for _ in batches:
            trainer.train(1)
            states.append(trainer.state())
    return states


@pytest.mark.parametrize(
    "create,num_devices,name,dtype,options",
    [
        (towers, 2, "plain", "float32", {}),
        slow(
            model_parallel,
            4,
            "residual",
            "float32",
            {"group_size": 2, "sync_batch_norm": True},
        ),
        slow(replicated, 3, "residual", "mixed_bfloat16", {}),
        slow(towers, 1, "residual", "float64", {"frozen": True}),
        slow(towers, 1, "residual", "mixed_float16", {"scale_loss": True}),
        slow(AsynchronousTrainer, 1, "residual", "float32", {}),
        slow(replicated, 2, "plain", "float32", {"compile_towers": True}),
    ],
)
def test_recomputation_changes_no_bit(create, num_devices, name, dtype, options):
    network, batches = networks.NETWORKS[name](dtype), networks.random_batches(2, 12)
    assert len(segments(network.model)) > 1
    if options.pop("frozen", False):
        names = {x.path for x in network.model.trainable_variables[:4]}
        options["phases"] = [Phase(math.inf, network.model, frozenset(names))]
    *expected, first, last = trained(network, create, num_devices, options, batches)
    small_runs.assert_equal_states(first, expected[0])
    small_runs.assert_equal_states(last, expected[1])


def forward_convolutions(trainer):
    """Count those of an executed step, and of these the ones that need a gradient."""
    graphs = step_on_cpus(trainer)
    nodes = {node.name: node for graph in graphs for node in graph.node}

    @functools.cache
    def needs_gradient(name):
        inputs = (x.lstrip("^").partition(":")[0] for x in nodes[name].input)
        return any("Backprop" in nodes[x].op or needs_gradient(x) for x in inputs)

    names = [k for k, x in nodes.items() if "Conv2D" in x.op and "Back" not in x.op]
    return len(names), sum(map(needs_gradient, names))


@pytest.mark.parametrize("options", [{}, slow({"sync_batch_norm": True})])
def test_segments_are_computed_again_after_the_gradients_behind_them(options):
    """So that their activations are not kept; Grappler merges no two convolutions."""
    shape = (16, 16, 3)
    model = create_model("resnet20", image_shape=shape, num_classes=5)
    batches = networks.random_batches(1, 8, image_shape=shape)
    network = networks.Network(model, [], {})
    counts = [
        forward_convolutions(
            create_trainer(
                towers, network, Recipe(), batches, 2, recompute=recompute, **options
            )
        )
        for recompute in (False, True)
    ]
    (once, none), (both, again) = counts
    assert none == 0 and both == once + again and again > once / 2


def test_a_network_without_a_place_to_cut_is_refused():
    images = keras.Input((2,), name="images")
    model = keras.Model(images, keras.layers.Dense(2, name="logits")(images))
    with pytest.raises(ConfigError, match="divides"):
        segments(model)
