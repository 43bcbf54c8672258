"""The report: what was measured, and the bottlenecks."""

import dataclasses
import os
from collections.abc import Mapping
from types import MappingProxyType

from towers import build, build_trainer, console
from towers.config import Config
from towers.config.checks import check_environment
from towers.doctor.measure import MEASURE_SECS, measure, without_learning
from towers.doctor.verdict import LEAST_SHARE, Measured, Verdict, judge, time_text
from towers.errors import RunFolderError, data_errors_of_tensorflow
from towers.run.banner import entry
from towers.run.folder import RunFolder, nearest_existing
from towers.training.setup import print_banner

# Part of a step -> its name in the report.
PARTS = {
    "gradients": "computing, for each image",
    "fixed": "fixed cost of a step",
    "synchronization": "synchronization and update",
    "input": "waiting for images",
    "evaluations": "evaluations",
    "checkpoints": "checkpoints",
}


def diagnose(
    workdir: str | os.PathLike,
    config: Config,
    measure_secs: float = MEASURE_SECS,
    num_workers: int = 1,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> Verdict:
    """Prints why a run is not faster. Nothing is written in its folder, and only
    temporary files next to it.

    Args:
        workdir: the run's folder, which need not exist.
        config: of the run.
        measure_secs: time for the rounds of measuring.
        num_workers: workers of the run; one is measured, with its share of the images.
        origins: as of `towers.dry_run`.

    Raises:
        TowersError: what the run would raise too, such as a DataError.
    """
    check_environment()
    folder, timed = RunFolder(workdir), without_learning(config)
    devices = build_trainer.configure_devices(config)
    if config.choice_of("strategy").processes:
        images = -(-config.batch_size // num_workers)
        repeats = min(config.repeats, images)
        timed = dataclasses.replace(timed, batch_size=images, repeats=repeats)
    parts = build.build(timed, device_kind=devices.kind)
    trainer = build_trainer.create_trainer(timed, parts, devices)
    print_banner(config, folder, devices, parts, trainer, origins)
    if config.choice_of("strategy").processes:
        share = f"{timed.batch_size} of the {config.batch_size} images"
        _print("workers", f"one is measured, with {share}, without the others")
    place = nearest_existing(folder.path.resolve().parent)
    try:
        with data_errors_of_tensorflow():
            measured = measure(timed, parts, devices, trainer, place, measure_secs)
    except OSError as error:
        raise RunFolderError(f"{place} cannot be written: {error.strerror}") from None
    verdict = judge(measured, config)
    _print_verdict(measured, verdict)
    return verdict


def _print(name: str, text: str) -> None:
    for line in entry(name, text):
        console.line(line)


def _print_verdict(measured: Measured, verdict: Verdict) -> None:
    """The parts of a step, with their share of the run's time, and the bottlenecks."""
    total = sum(verdict.secs.values())
    console.line(f"a step of {measured.images:,} images takes {time_text(total)}")
    for name, title in PARTS.items():
        secs = verdict.secs[name]
        if secs >= 0.001 * total:
            console.line(f"  {title:<30} {time_text(secs):>8} {secs / total:6.1%}")
    error = measured.error_secs / total
    if error >= LEAST_SHARE:
        console.line(f"parts of less than {error:.0%} are not judged: times varied")
    console.line("bottlenecks" if verdict.findings else "no bottleneck found")
    for finding in verdict.findings:
        _print(f"{finding.share:.0%}", finding.text)
    speed = f"run: {verdict.images_per_sec:,.0f} images/s"
    if verdict.findings:
        speed += f", {verdict.without_findings:,.0f} without these costs"
    console.line(speed)
