"""The report: checks, what was measured, and the bottlenecks."""

import dataclasses
import os
import textwrap
import time
from collections.abc import Iterable

from towers import build, console
from towers.config import Config
from towers.config.checks import check_environment
from towers.doctor.checks import Check, check_data, check_processor, check_versions
from towers.doctor.measure import MEASURE_SECS, measure
from towers.doctor.steps import without_learning
from towers.doctor.verdict import (
    LEAST_SHARE,
    WIDTH,
    Measured,
    Verdict,
    judge,
    time_text,
)
from towers.errors import RunFolderError, data_errors_of_tensorflow
from towers.parallel.devices import enable_determinism
from towers.run.folder import RunFolder, nearest_existing

# Part of a step -> what it is called in the report.
PARTS = {
    "gradients": "computing, for each image",
    "fixed": "fixed cost of a step",
    "contention": "contention between towers",
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
) -> Verdict:
    """Prints why a run is not faster. Nothing is written in its folder, and only
    temporary files next to it.

    Args:
        workdir: the run's folder, which need not exist.
        config: of the run.
        measure_secs: time for the rounds of measuring.
        num_workers: of which one is measured, with its share of the images.

    Raises:
        TowersError: what the run would raise too, such as a DataError.
    """
    check_environment()
    whole = config
    folder = nearest_existing(RunFolder(workdir).path.resolve().parent)
    say = console.line
    say("checks")
    _print(check_versions())
    devices = build.configure_devices(config)
    if config.deterministic:
        enable_determinism()
    _print(check_processor(devices))
    if config.choice_of("strategy").processes:
        images = -(-config.batch_size // num_workers)
        share = f"{images} of the {config.batch_size} images"
        words = f"one worker is measured, with {share}, without the others"
        _print([Check(words, False)])
        repeats = min(config.repeats, images)
        config = dataclasses.replace(config, batch_size=images, repeats=repeats)
    config, started = without_learning(config), time.monotonic()
    parts = build.build(config, device_kind=devices.kind)
    _print(check_data(parts, time.monotonic() - started))
    trainer = build.create_trainer(config, parts, devices)
    try:
        say("measuring")
        with data_errors_of_tensorflow():
            measured = measure(
                config,
                parts,
                devices,
                trainer,
                folder,
                secs=measure_secs,
                say=lambda line: say(f"  {line}"),
            )
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written: {error.strerror}") from None
    verdict = judge(measured, whole)
    for line in [*measured_lines(measured, verdict), *verdict_lines(verdict)]:
        say(line)
    return verdict


def measured_lines(measured: Measured, verdict: Verdict) -> list[str]:
    """The times, and the share of each in that of the run."""
    total = sum(verdict.secs.values())
    lines = [f"a step of {measured.images:,} images takes {time_text(total)}"]
    for name, words in PARTS.items():
        secs = verdict.secs[name]
        if secs >= 0.001 * total:
            lines.append(f"  {words:<30} {time_text(secs):>8} {secs / total:6.1%}")
    share = measured.double_secs / measured.tower_secs
    error = measured.error_secs / total
    if error >= LEAST_SHARE:
        lines.append(f"parts of less than {error:.0%} are not judged: the times varied")
    lines.append(f"one tower takes {share:.2f} times as long for twice the images")
    if measured.num_towers > 1:
        factor = measured.num_towers * measured.one_secs / measured.ready_secs
        lines.append(
            f"{measured.num_towers} towers do {factor:.2f} times the images a second "
            "of one alone"
        )
    return lines


def verdict_lines(verdict: Verdict) -> list[str]:
    """The bottlenecks."""
    if not verdict.findings:
        return [
            "no bottleneck found",
            f"run: {verdict.images_per_sec:,.0f} images/s",
        ]
    lines = ["bottlenecks"]
    for finding in verdict.findings:
        lines += finding.lines()
    lines.append(
        f"run: {verdict.images_per_sec:,.0f} images/s, "
        f"{verdict.without_findings:,.0f} without these costs"
    )
    return lines


def _print(checks: Iterable[Check]) -> None:
    for check in checks:
        head = f"  {'ok' if check.is_fine else '!':<3} "
        for line in textwrap.wrap(
            check.text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)
        ):
            console.line(line)
