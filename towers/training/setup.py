"""The parts of a run and its trainer, and trials of them that write nothing."""

from collections.abc import Callable
from typing import Any, TypeVar

from towers import build
from towers.config import Config
from towers.errors import ConfigError, Preempted, data_errors_of_tensorflow
from towers.optim.schedules import Schedule
from towers.parallel import devices as parallel_devices
from towers.parallel.devices import Devices
from towers.parallel.loop import ACTIVITIES, STARTING_ACTIVITIES
from towers.parallel.trainer import Trainer
from towers.parallel.workers import ALONE, Workers
from towers.run.checkpoint import Checkpoint
from towers.run.cluster_spec import Cluster
from towers.run.display import Display
from towers.run.peers import cluster_of, validate_data
from towers.run.restore import validate_dataset
from towers.run.watchdog import Watchdog

T = TypeVar("T")


def configure_devices(config: Config) -> Devices:
    """The devices of the towers of a run. ConfigError where the machine does not have
    them."""
    devices = build.configure_devices(config)
    if config.deterministic:
        parallel_devices.enable_determinism()
    return devices


def create_trainer(
    config: Config,
    devices: Devices,
    workers: Workers = ALONE,
    *,
    checkpoint: Checkpoint | None = None,
    allow_change: tuple[str, ...] = (),
    schedule_fn: Callable[[Config, int], Schedule] | None = None,
) -> tuple[build.Parts, Trainer]:
    """The parts of a run, and its trainer with the initial parameters.

    Args:
        checkpoint: from which the run is to be continued.
        allow_change: options that may differ from the checkpoint's.
        schedule_fn: as of `build.build`.

    Raises:
        DataError: the data set is missing or invalid.
        ConfigError: the options do not fit it, the devices or the checkpoint.
    """
    part = build.part_of(config, devices, workers)
    parts = build.build(
        config, device_kind=devices.kind, part=part, schedule_fn=schedule_fn
    )
    validate_dataset(parts.data, checkpoint, allow_change)
    validate_data(workers, parts.data, parts.num_examples)
    trainer = build.create_trainer(config, parts, devices, workers)
    if config.device_memory_mb:
        parallel_devices.check_memory(trainer.variable_bytes(), config.device_memory_mb)
    return parts, trainer


# Trials.


def validate_alone(
    flag: str, config: Config, cluster: Cluster | None, allow_public_address: bool
) -> None:
    """Raises ConfigError where a trial would be one of several workers."""
    cluster = cluster_of(config, cluster, allow_public_address)
    if cluster is not None:
        raise ConfigError(
            f"{cluster.origin} names {cluster.size} workers, and --{flag} takes one "
            "process: call it without them, with the --batch_size of one worker"
        )


def watched(
    function: Callable[[Watchdog], T],
    trainer: Trainer,
    config: Config,
    display: Display,
) -> T:
    """The result of a function, which a signal abandons, see `Watchdog.run`.

    Raises:
        Preempted: there was a signal.
        StuckError: a step did not end within `stuck_after_secs`.
    """
    watchdog = Watchdog(
        trainer,
        ACTIVITIES,
        starting=STARTING_ACTIVITIES,
        stuck_after_secs=config.stuck_after_secs,
        tick=display.tick,
    )
    try:
        with display, watchdog, data_errors_of_tensorflow():
            return watchdog.run(function, watchdog)
    except Preempted as error:
        raise Preempted(f"{error}; nothing was written") from None


def take_steps(trainer: Trainer, watchdog: Watchdog, num_steps: int) -> dict[str, Any]:
    """`Trainer.train` inside of `watched`."""
    with watchdog.training():
        metrics = trainer.train(num_steps)
    if not metrics:
        raise Preempted(f"stopped by {watchdog.stopped_by}")
    return metrics
