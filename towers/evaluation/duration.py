"""The duration of an evaluation, estimated."""

import time
from collections.abc import Callable

from towers import build
from towers.config import Config
from towers.data.batches import EvalBatches
from towers.evaluation.restored import evaluated_weights
from towers.parallel.trainer import Trainer

# Batches that are always timed.
TIMED_BATCHES = 4


def evaluation_secs(
    config: Config,
    parts: build.Parts,
    trainer: Trainer,
    *,
    secs: float = 0.0,
    heartbeat: Callable[[], None] = lambda: None,
) -> float:
    """Seconds of an evaluation during training, from some of its batches.

    Args:
        config: of the run.
        parts, trainer: made of it.
        secs: to time more batches than TIMED_BATCHES in.
        heartbeat: called after each compiled call.
    """
    _, source = parts.eval_split
    batches = EvalBatches(source, parts.augment, config.batch_size, parts.share)
    feed = build.create_eval_feed(batches, trainer)
    weights = evaluated_weights(config)

    def evaluate(num_batches):
        started = time.perf_counter()
        trainer.evaluate(feed, num_batches, weights, heartbeat)
        return time.perf_counter() - started

    evaluate(1)  # compiles
    count = min(len(batches), TIMED_BATCHES)
    timed_secs = evaluate(count)
    more = min(len(batches), int(secs * count / timed_secs))
    if more > count:
        count, timed_secs = more, evaluate(more)
    return timed_secs * len(batches) / count
