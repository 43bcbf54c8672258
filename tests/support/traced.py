"""Trainers traced for GPUs that are not there."""

from benchmarks.graphs import placement, traced
from benchmarks.graphs.operations import called
from towers.build import assembly, builder
from towers.config import Config
from towers.data.batches import EvalBatches
from towers.parallel.copies import Weights

SMALL = {"dataset": "synthetic", "augment": "none", "batch_size": 8, "num_towers": 2}
SMALL |= {"compile": "none"}
LOOPS = ("While", "StatelessWhile")


def on_gpus(**fields) -> traced.Traced:
    """A trainer with `num_towers` GPUs, a small synthetic data set by default."""
    return traced.on_gpus(Config(**SMALL | fields))


def evaluation(trained: traced.Traced) -> placement.Call:
    """The compiled call of an evaluation."""
    config, trainer = trained.config, trained.trainer
    parts = builder.build(config, for_training=False)
    batches = EvalBatches(parts.data.test, parts.augment, config.batch_size)
    feed = assembly.create_eval_feed(batches, trainer)
    return placement.Call(trainer.evaluator._calls(feed, (Weights.RAW,)).graph)


def loop_body(trained: traced.Traced):
    """The graph of a step, in the loop of a synchronous trainer."""
    [call] = trained.calls()
    [loop] = [op for op in call.graph.get_operations() if op.type in LOOPS]
    return called(call.graph, loop)["body"]
