"""The same training by a trainer and by the oracle, and comparisons of the two."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence

import networks
import numpy as np
import pytest
import tensorflow as tf
from engines import oracle, oracle_layers

from towers.config import factories
from towers.optim import losses, optimizers, schedules
from towers.optim.update import Update
from towers.parallel import compilation
from towers.parallel.coordinator import Coordinator
from towers.parallel.copies import Initial
from towers.parallel.strategies.towers import towers
from towers.parallel.trainer import (
    EvaluationOptions,
    Network,
    Objective,
    StepOptions,
    SynchronousTrainer,
    Trainer,
)
from towers.parallel.workers import SINGLE_WORKER

# A stair of the schedule falls within a few steps.
NUM_EXAMPLES = 50
DECAY_FACTOR, EPOCHS_PER_DECAY = 0.5, 1.5

# How near to 0 the input of a rectifier may come before rounding in float32 decides
# whether it is open; the gradient jumps there.
NEAR_ZERO = 5e-7


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An optimizer of the oracle, and what else shapes an update."""

    optimizer: str = "momentum"
    clip_norm: float = 0.0
    ema_decay: float = 0.999
    label_smoothing: float = 0.1
    learning_rate: float = 0.05

    @property
    def momentum(self) -> float:
        return 0.0 if self.optimizer == "sgd" else 0.9

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Those of the oracle's optimizer."""
        return {"momentum": self.momentum} if self.momentum else {}

    def loss_fn(self, logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        """The trainer's."""
        return losses.cross_entropy(logits, labels, self.label_smoothing)

    def update(self, images_per_step: int) -> Update:
        """The trainer's, with its schedule by the images seen."""
        schedule = schedules.create_schedule(
            "exponential",
            self.learning_rate,
            num_examples=NUM_EXAMPLES,
            warmup_epochs=0,
            decay_factor=DECAY_FACTOR,
            epochs_per_decay=EPOCHS_PER_DECAY,
        )
        name = "nesterov" if self.optimizer == "nesterov" else "sgd"
        return Update(
            optimizers.create_optimizer(name, momentum=self.momentum),
            lambda step: schedule(step * images_per_step),
            self.clip_norm,
            self.ema_decay,
        )

    @property
    def rate_fn(self) -> Callable[[int], float]:
        """The oracle's schedule: images seen -> learning rate."""
        return oracle.staircase(
            self.learning_rate, DECAY_FACTOR, NUM_EXAMPLES, EPOCHS_PER_DECAY
        )

    def oracle(
        self,
        network: networks.Network,
        batches: Sequence[Mapping[str, np.ndarray]],
        num_towers: int = 1,
        accumulate_steps: int = 1,
        **options,
    ) -> oracle.OracleResult:
        """What the oracle makes of the same batches."""
        return oracle.train(
            network.described,
            network.params,
            network.state,
            networks.oracle_batches(batches),
            optimizer=self.optimizer,
            learning_rate=self.rate_fn,
            weight_decay=network.decay,
            label_smoothing=self.label_smoothing,
            clip_norm=self.clip_norm,
            ema_decay=self.ema_decay,
            num_towers=num_towers,
            accumulate_steps=accumulate_steps,
            **options,
            **self.hyperparameters,
        )


def record_events(coordinator: Coordinator, record: list[tuple[str, int, int]]) -> None:
    """Appends each ("fetch" or "apply", tower, number of that tower's update counted
    from 0) in the order in which they take place."""

    def recorded(event, hold):
        @contextlib.contextmanager
        def holding(tower):
            with hold(tower) as value:
                yield value
                record.append((event, tower, coordinator.begun[tower] - 1))

        return holding

    coordinator.fetch = recorded("fetch", coordinator.fetch)
    coordinator.apply = recorded("apply", coordinator.apply)


# Parts of a trainer, whichever strategy it has, and all their options.
PARTS = Network, Objective, StepOptions, EvaluationOptions
OPTIONS = {f.name for part in PARTS for f in dataclasses.fields(part)}


def create_trainer(
    create: Callable,
    network: networks.Network,
    recipe: Recipe,
    batches: Sequence[Mapping[str, np.ndarray]],
    num_devices: int,
    **options,
) -> Trainer:
    """A trainer on so many CPU devices that trains on the batches.

    Args:
        create: a strategy, or an asynchronous trainer, whose strategy is `towers`.
        **options: of the trainer, the strategy; a feed.
    """
    images_per_step = len(batches[0]["labels"])
    values = {
        "model": network.model,
        "loss_fn": recipe.loss_fn,
        "micro_batch_size": images_per_step // options.get("accumulate_steps", 1),
    }
    values |= {k: v for k, v in options.items() if k in OPTIONS}
    others = {k: v for k, v in options.items() if k not in OPTIONS}
    update_fn = others.pop("update_fn", None) or recipe.update(images_per_step)
    workers, create_fn = others.pop("workers", SINGLE_WORKER), SynchronousTrainer
    if isinstance(create, type):
        create, create_fn, others = towers, functools.partial(create, **others), {}
    if "workers" in inspect.signature(create).parameters:
        others["workers"] = workers
    strategy = create(
        Initial.of(values["model"]),
        update_fn,
        [f"/CPU:{device}" for device in range(num_devices)],
        values["micro_batch_size"],
        **others,
    )
    values["feed"] = options.get("feed") or networks.feed_of(
        batches, strategy.sizes, strategy.devices[:: strategy.num_shards]
    )
    network, objective, steps, evaluations = (
        part(**factories.named_by(part, values)) for part in PARTS
    )
    return create_fn(
        strategy, network, objective, update_fn, steps, evaluations, workers
    )


def assert_equal_to_oracle(
    state: Mapping[str, np.ndarray],
    expected: oracle.OracleResult,
    tolerance: float = 1e-5,
) -> None:
    """Parameters, slots, averages and model state agree; none is missing or left."""
    wanted = {f"params/{k}": v for k, v in expected.params.items()}
    wanted |= {f"state/{k}": v for k, v in expected.state.items()}
    wanted |= {f"averages/{k}": v for k, v in expected.averages.items()}
    for slot, values in expected.slots.items():
        wanted |= {f"slots/{k}/{slot}": v for k, v in values.items()}
    assert_close(state, wanted | {"step": state["step"]}, tolerance)


def with_images_off_kinks(
    check: Callable[[int], None], dtype: str, patch: pytest.MonkeyPatch
) -> None:
    """Compares with the oracle; in float32 with other images where the input of a
    rectifier came too near to 0.

    Args:
        check: seed of the images -> raises an AssertionError where it is not equal.
        dtype: of the network.
    """
    margins, relu = [], oracle_layers.relu

    def watched_relu(x):
        margins.append(np.abs(x).min())
        return relu(x)

    patch.setattr(oracle_layers, "relu", watched_relu)
    for seed in range(3):
        margins.clear()
        try:
            check(seed)
            break
        except AssertionError:
            if dtype == "float64" or min(margins) > NEAR_ZERO or seed == 2:
                raise


def parted(state: Mapping, prefix: str) -> tuple[dict, dict]:
    """The numbers whose names begin so, and the rest of the state."""
    own = {k: v.item() for k, v in state.items() if k.startswith(prefix)}
    return own, {k: v for k, v in state.items() if k not in own}


def have_steps_of_gpus(patch: pytest.MonkeyPatch) -> None:
    """Trainers that are created from now on have steps as those of GPUs: part of the
    loop, and never waited for."""
    patch.setattr(compilation, "CPU_TOWERS", compilation.GPU_LOOP)
    patch.setattr(compilation, "CPU_STEP", compilation.GPU_LOOP)


def assert_close(
    state: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    tolerance: float = 1e-5,
) -> None:
    """The same names, with values within the tolerance."""
    assert set(state) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(
            state[name], value, atol=tolerance, rtol=tolerance, err_msg=name
        )


def clip_norm_for(
    network: networks.Network, batches: Sequence[Mapping[str, np.ndarray]]
) -> float:
    """A bound that clips some steps and not others.

    Where all are clipped, a gradient of the wrong length passes unnoticed.
    """
    [report] = Recipe().oracle(network, batches[:1]).reports
    return 0.9 * report.gradient_norm


def assert_some_are_clipped(
    reports: Sequence[oracle.StepReport], recipe: Recipe
) -> None:
    """Some steps, or asynchronous updates, and not all."""
    norms = [report.gradient_norm for report in reports]
    assert min(norms) < recipe.clip_norm < max(norms)


def assert_metrics(metrics: Mapping, report: oracle.StepReport) -> None:
    """The metrics of a step are those of the oracle's."""
    assert metrics["step"] == report.step + 1
    for name in ("loss", "total_loss", "accuracy", "learning_rate", "gradient_norm"):
        assert metrics[name] == pytest.approx(getattr(report, name), rel=1e-4), name
