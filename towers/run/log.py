"""The lines of a training's log."""

from collections.abc import Mapping


def duration(secs: float) -> str:
    """Such as "42 s", "3 min 20 s" or "2 h 05 min"."""
    secs = round(secs)
    if secs < 60:
        return f"{secs} s"
    if secs < 3600:
        return f"{secs // 60} min {secs % 60:02d} s"
    return f"{secs // 3600} h {secs % 3600 // 60:02d} min"


def log_line(
    record: Mapping[str, float],
    last_step: int,
    steps_per_sec: float | None,
    start_secs: float,
) -> str:
    """The log line of a step.

    Args:
        record: "step", "epoch", "loss", "learning_rate", and once they are known
            "images_per_sec" and "input_wait_percent"; "skipped_steps" where steps may
            be skipped.
        last_step: of the run.
        steps_per_sec: for the time left; None until it is known.
        start_secs: duration of the first call.
    """
    step = record["step"]
    speed = f"first step, with tracing and compiling: {start_secs:.1f} s"
    if steps_per_sec:
        left = duration((last_step - step) / steps_per_sec)
        speed = (
            f"{record['images_per_sec']:,.0f} images/s  "
            f"input wait {record['input_wait_percent']:.1f}%  {left} left"
        )
    skipped = ""
    if "skipped_steps" in record:
        skipped = f"skipped steps {record['skipped_steps']}  "
    return (
        f"step {step}/{last_step} ({step / last_step:.1%})  "
        f"epoch {record['epoch']:.2f}  loss {record['loss']:.4f}  "
        f"learning rate {record['learning_rate']:.4g}  {skipped}{speed}"
    )
