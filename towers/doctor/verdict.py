"""The bottlenecks of a run, from what was measured; docs/doctor.md has the parts of its
time, which add up to the seconds of a step."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from towers.config import Config
from towers.errors import ConfigError

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


@dataclasses.dataclass(frozen=True)
class Measured:
    """Times in seconds.

    Attributes:
        kind: of the devices, CPU or GPU.
        num_towers: that train together.
        images: of a step, all towers together.
        step_secs: a step on the run's own input.
        ready_secs: the same on a batch in memory.
        gradients_secs: the gradients of all towers, on a batch in memory.
        double_secs: the same with twice the images; not less.
        eval_secs: an evaluation.
        checkpoint_secs: how much longer steps take with a checkpoint.
        num_steps, num_evaluations: of the whole run.
        error_secs: of the parts of a step.
        data_mb: of the decoded training images; 0 where crops of files are decoded,
            which are not kept.
        in_memory: whether they lie in memory from the start.
        is_resident: whether GPUs hold them.
        is_cached: whether they are decoded in the first epoch alone.
    """

    kind: str
    num_towers: int
    images: int
    step_secs: float
    ready_secs: float
    gradients_secs: float
    double_secs: float
    eval_secs: float
    checkpoint_secs: float
    num_steps: int
    num_evaluations: int
    error_secs: float = 0.0
    data_mb: float = 0.0
    in_memory: bool = True
    is_resident: bool = False
    is_cached: bool = False


class Finding(NamedTuple):
    """A bottleneck: a part of the run's time, its share, and what to try."""

    subject: str
    share: float
    text: str


class Verdict(NamedTuple):
    """The parts of a run's time, and the bottlenecks among them.

    Attributes:
        secs: name -> seconds of a step; "gradients" are without "fixed".
        findings: the largest share first.
        images_per_sec: of the whole run, with evaluations and checkpoints.
        without_findings: the same without the time of the findings.
    """

    secs: dict[str, float]
    findings: list[Finding]
    images_per_sec: float
    without_findings: float


def judge(measured: Measured, config: Config) -> Verdict:
    """The bottlenecks of a run with this config."""
    secs = _parts(measured, config)
    total = sum(secs.values())
    findings = [
        Finding(subject, secs[subject] / total, text)
        for subject, text in _texts(measured, config, secs, total)
        if secs[subject] >= max(LEAST_SHARE * total, measured.error_secs)
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
        others = [", fewer --num_towers"] * (m.num_towers > 1)
        others += [", --compile=xla"] * (
            m.kind == "GPU" and _is_another(config, compile="xla")
        )
        others = " or".join("".join(others).rsplit(",", 1))
        share = max(1, m.images // config.accumulate_steps // m.num_towers)
        yield (
            "fixed",
            f"{share} image{'s' * (share > 1)} a tower are few: twice as many take "
            f"{m.double_secs / m.gradients_secs:.2f} times as long. Try "
            f"--batch_size={times * config.batch_size}{others}.",
        )
    yield "synchronization", _synchronization_text(m, config, secs)
    if m.num_evaluations > 1:
        times = secs["evaluations"] / (total - secs["evaluations"]) / GOOD_SHARE
        every = _round_up(times * config.eval_every_epochs)
        every = min(every, config.num_epochs)
        yield (
            "evaluations",
            f"{m.num_evaluations:,} evaluations of {time_text(m.eval_secs)} each. Try "
            f"--eval_every_epochs={every:g}.",
        )
    text = f"Each checkpoint costs {time_text(m.checkpoint_secs)}. Try"
    between = m.checkpoint_secs / GOOD_SHARE
    if config.checkpoint_every_steps:
        steps = _round_up(between / (total - secs["checkpoints"]))
        text += f" --checkpoint_every_steps={max(1, steps):.0f}, or 0 to go by the"
        text += " clock, see --checkpoint_every_secs."
    else:
        text += f" --checkpoint_every_secs={_round_up(between):g}."
    yield "checkpoints", text


def _input_advice(m, config):
    may_be_resident = not m.is_resident and _is_another(config, input="resident")
    if m.kind == "GPU" and m.in_memory and may_be_resident:
        return "Try --input=resident, or a cheaper --augment."
    if m.in_memory:
        cores = "; on a CPU the towers need the same cores" * (m.kind == "CPU")
        return f"Try a cheaper --augment{cores}."
    if config.choice_of("dataset").is_in_a_file:
        return (
            "Keep images in memory in the `read` of your data set, or use more cores."
        )
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
    return (
        f"{text} Try a larger --batch_size, or "
        f"--accumulate_steps={steps * config.accumulate_steps}, which do it less often."
    )


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
