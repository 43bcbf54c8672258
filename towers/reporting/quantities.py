"""Numbers with their units, as texts."""


def counted(number: float, noun: str) -> str:
    """Return a number of things, such as "1 epoch" or "1,200 steps"."""
    text = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{text} {noun}{'' if number == 1 else 's'}"


def duration(secs: float) -> str:
    """Return a time, such as "42 s", "3 min 20 s" or "2 h 05 min"."""
    secs = round(secs)
    if secs < 60:
        return f"{secs} s"
    if secs < 3600:
        return f"{secs // 60} min {secs % 60:02d} s"
    return f"{secs // 3600} h {secs % 3600 // 60:02d} min"
