"""The parts of a run's time, the bottlenecks among them, and the report."""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from towers import build, build_trainer, console
from towers.config import Config
from towers.doctor.measure import MEASURE_SECS, Measured, measure, without_learning
from towers.errors import ConfigError, RunFolderError, data_errors_of_tensorflow
from towers.run.folder import RunFolder, nearest_existing
from towers.run.standardization import with_resize_of_weights
from towers.training.banner import print_banner, print_entry

# Part of a step -> its name in the report.
PARTS = {
    "gradients": "computing, for each image",
    "fixed": "fixed cost of a step",
    "synchronization": "synchronization and update",
    "input": "waiting for images",
    "evaluations": "evaluations",
    "checkpoints": "checkpoints",
}

# Of the time of a run; what takes less is not mentioned, nor what takes less than the
# error of the measurement.
LEAST_SHARE = 0.1

# A batch is too small if doubling it raises the images per second by this factor or
# more, on CPUs and GPUs.
LEAST_GAIN = 1.2

# Of evaluations and of checkpoints, with the period that is recommended.
GOOD_SHARE = 0.05

# Most times the batch, and micro-batches, that are recommended.
MOST_TIMES = 16


class Finding(NamedTuple):
    """A bottleneck: a part of the run's time, its share, and what to try."""

    subject: str
    share: float
    text: str


class Verdict(NamedTuple):
    """The seconds of a step by part ("gradients" are without "fixed"), the bottlenecks,
    largest first, and images per second of the whole run, with and without these."""

    secs: dict[str, float]
    findings: list[Finding]
    images_per_sec: float
    without_findings: float


def diagnose(
    workdir: str | os.PathLike,
    config: Config,
    measure_secs: float = MEASURE_SECS,
    num_workers: int = 1,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> Verdict:
    """Prints why a run is not faster. Nothing is written into its folder. Of several
    workers one is measured, with its share of the images."""
    folder, config = RunFolder(workdir), with_resize_of_weights(config, None)
    timed = without_learning(config)
    devices = build_trainer.configure_devices(config)
    has_workers = config.choice_of("strategy").processes
    if has_workers:
        images = -(-config.batch_size // num_workers)
        repeats = min(config.repeats, images)
        timed = dataclasses.replace(timed, batch_size=images, repeats=repeats)
    parts = build.build(timed, device_kind=devices.kind)
    trainer = build_trainer.create_trainer(timed, parts, devices)
    print_banner(config, folder, devices, parts, trainer, origins)
    if has_workers:
        share = f"{timed.batch_size} of the {config.batch_size} images"
        print_entry("workers", f"one is measured, with {share}, without the others")
    place = nearest_existing(folder.path.resolve().parent)
    try:
        with data_errors_of_tensorflow():
            measured = measure(timed, parts, devices, trainer, place, measure_secs)
    except OSError as error:
        raise RunFolderError(f"{place} cannot be written: {error.strerror}") from None

    verdict = judge(measured, config)
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
        print_entry(f"{finding.share:.0%}", finding.text)
    speed = f"run: {verdict.images_per_sec:,.0f} images/s"
    if verdict.findings:
        speed += f", {verdict.without_findings:,.0f} without these costs"
    console.line(speed)
    return verdict


def judge(measured: Measured, config: Config) -> Verdict:
    """The bottlenecks of a run with this config."""
    secs = _parts(measured, config)
    total = sum(secs.values())
    least_secs = max(LEAST_SHARE * total, measured.error_secs)
    findings = [
        Finding(subject, secs[subject] / total, text)
        for subject, text in _texts(measured, config, secs, total)
        if secs[subject] >= least_secs
    ]
    findings.sort(key=lambda finding: -finding.share)
    lost = sum(finding.share for finding in findings)
    speed = measured.images / total
    return Verdict(secs, findings, speed, speed / (1 - lost))


def _parts(m: Measured, config: Config) -> dict[str, float]:
    """Name -> seconds of a step of the run."""
    secs = {"input": max(0.0, m.step_secs - m.ready_secs)}
    if m.is_cached:
        secs["input"] /= max(1.0, config.num_epochs)
    gradients = m.ready_secs
    if not config.choice_of("strategy").asynchronous:  # whose towers do not wait
        gradients = min(m.gradients_secs, m.ready_secs)
    secs["synchronization"] = m.ready_secs - gradients
    fixed = max(0.0, 2 * m.gradients_secs - m.double_secs) / m.gradients_secs
    secs["fixed"] = fixed * gradients * (1 - 1 / MOST_TIMES)
    secs["gradients"] = gradients - secs["fixed"]
    secs["evaluations"] = m.eval_secs * m.num_evaluations / m.num_steps
    per_step, total = 0.0, sum(secs.values())
    if config.checkpoint_every_steps:
        per_step += 1 / config.checkpoint_every_steps
    if config.checkpoint_every_secs:
        per_step += total / config.checkpoint_every_secs
    secs["checkpoints"] = m.checkpoint_secs * per_step
    return secs


def _texts(m, config, secs, total) -> Iterator[tuple[str, str]]:
    """Subject and text of every possible finding."""
    yield "input", f"A step waits for its images. {_input_advice(m, config)}"
    grows = m.double_secs - m.gradients_secs
    times = _power_of_two(4 * (m.gradients_secs - grows) / max(grows, 1e-9))
    if 2 * m.gradients_secs >= LEAST_GAIN * m.double_secs:
        ways = [f"--batch_size={times * config.batch_size}"]
        ways += ["fewer --num_towers"] * (m.num_towers > 1)
        if m.kind == "GPU" and _is_another(config, compile="xla"):
            ways.append("--compile=xla")
        share = max(1, m.images // config.accumulate_steps // m.num_towers)
        yield (
            "fixed",
            f"{share} image{'s' * (share > 1)} a tower are few: twice as many take "
            f"{m.double_secs / m.gradients_secs:.2f} times as long. Try "
            f"{' or '.join(', '.join(ways).rsplit(', ', 1))}.",
        )
    yield "synchronization", _synchronization_text(m, config, secs)
    if m.num_evaluations > 1:
        times = secs["evaluations"] / (total - secs["evaluations"]) / GOOD_SHARE
        every = min(_round_up(times * config.eval_every_epochs), config.num_epochs)
        yield (
            "evaluations",
            f"{m.num_evaluations:,} evaluations of {time_text(m.eval_secs)} each. Try "
            f"--eval_every_epochs={every:g}.",
        )
    between = m.checkpoint_secs / GOOD_SHARE
    way = f"--checkpoint_every_secs={_round_up(between):g}."
    if config.checkpoint_every_steps:
        steps = _round_up(between / (total - secs["checkpoints"]))
        way = f"--checkpoint_every_steps={max(1, steps):.0f}, or 0 to go by the clock, "
        way += "see --checkpoint_every_secs."
    cost = time_text(m.checkpoint_secs)
    yield "checkpoints", f"Each checkpoint costs {cost}. Try {way}"


def _input_advice(m, config):
    may_be_resident = not m.is_resident and _is_another(config, input="resident")
    if m.kind == "GPU" and m.in_memory and may_be_resident:
        return "Try --input=resident, or a cheaper --augment."
    if m.in_memory:
        cores = "; on a CPU the towers need the same cores" * (m.kind == "CPU")
        return f"Try a cheaper --augment{cores}."
    if config.choice_of("dataset").is_in_a_file:
        return "Keep images in memory in your data set's `read`, or use more cores."
    if m.data_mb > config.image_cache_mb:
        size = f"{_round_up(m.data_mb):.0f}"
        return f"Try --image_cache_mb={size} to decode once, or a smaller --image_size."
    return "Try a smaller --image_size, a cheaper --augment, or more processor cores."


def _is_another(config, **changes):
    """True if a config with these changes is another one, and valid."""
    try:
        return dataclasses.replace(config, **changes) != config
    except ConfigError:
        return False


def _synchronization_text(m, config, secs):
    what = "To average and update the parameters" if m.num_towers > 1 else "The update"
    text = f"{what} takes {time_text(secs['synchronization'])} a step."
    if m.kind == "GPU" and m.num_towers > 1 and config.strategy == "towers":
        return f"{text} Try --strategy=replicated, or a larger --batch_size."
    if config.strategy == "async_towers":
        return text
    computing = secs["gradients"] + secs["fixed"]
    steps = _power_of_two(secs["synchronization"] / max(computing, 1e-9) / GOOD_SHARE)
    way = f"--accumulate_steps={steps * config.accumulate_steps}"
    return f"{text} Try a larger --batch_size, or {way}, which do it less often."


def _power_of_two(number):
    """The next one from 2 to MOST_TIMES."""
    return int(2 ** math.ceil(math.log2(min(max(number, 2), MOST_TIMES))))


def _round_up(number):
    """Rounds to 1, 2 or 5 times a power of ten."""
    if number <= 0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(number))
    return next(k * unit for k in (1, 2, 5, 10) if k * unit >= number * (1 - 1e-9))


def time_text(secs: float) -> str:
    """Seconds, or milliseconds, with two or more digits."""
    if secs >= 1:
        return f"{secs:.1f} s" if secs < 10 else f"{secs:,.0f} s"
    return f"{1e3 * secs:.0f} ms" if secs >= 0.01 else f"{1e3 * secs:.2g} ms"
