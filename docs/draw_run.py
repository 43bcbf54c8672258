"""Draws the loss and the accuracy of a run, as an SVG picture.

    python docs/draw_run.py runs/quickstart run.svg

The run may still be going on.
"""

import argparse
import html
import json
import pathlib

WIDTH, HEIGHT, TOP, BOTTOM = 700, 250, 46, 214
STYLE = """\
    text { font-family: sans-serif; font-size: 13px; fill: #1b1f24; }
    .name { font-weight: bold; }
    .small { font-size: 11px; fill: #57606a; }
    .end { text-anchor: end; }
    .axes { fill: none; stroke: #8c959f; }
    .line { fill: none; stroke-width: 2; stroke-linejoin: round; }"""
BLUE, GREEN, GRAY = "#1f5fbf", "#2e7d32", "#8c959f"


def panel(left: int, title: str, lines: dict, last_step: int, highest: float) -> str:
    """Curves over the steps; `lines` are (color, points) by their names."""
    right = left + 280
    parts = [
        f'<text class="name" x="{left}" y="32">{title}</text>',
        f'<path class="axes" d="M{left} {TOP}V{BOTTOM}H{right}"/>',
        f'<text class="small end" x="{left - 5}" y="{TOP + 8}">{highest:g}</text>',
        f'<text class="small end" x="{left - 5}" y="{BOTTOM}">0</text>',
        f'<text class="small end" x="{right}" y="{BOTTOM + 15}">step {last_step:,}'
        "</text>",
    ]
    for number, (name, (color, points)) in enumerate(lines.items()):
        path = " ".join(
            f"{left + 280 * step / last_step:.1f} "
            f"{BOTTOM - (BOTTOM - TOP) * value / highest:.1f}"
            for step, value in points
        )
        y = BOTTOM - 30 + 17 * number if len(lines) > 1 else TOP + 14
        parts += [
            f'<path class="line" stroke="{color}" d="M{path}"/>',
            f'<text class="end" x="{right}" y="{y}" style="fill: {color}">{name}'
            "</text>",
        ]
    return "".join(f"\n  {part}" for part in parts)


def draw_run(name: str, records: list[dict]) -> str:
    """The SVG as text, from the lines of `metrics.jsonl`."""

    def points(key):
        return [(x["step"], x[key]) for x in records if x.get(key) is not None]

    losses = points("loss")
    kinds = {
        "parameters": (GRAY, points("test_accuracy")),
        "moving averages": (GREEN, points("test_accuracy_ema")),
    }
    accuracies = {kind: line for kind, line in kinds.items() if line[1]}
    last_step = max(x["step"] for x in records)
    highest = max(loss for _, loss in losses)
    name = html.escape(name)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" \
width="{WIDTH}" height="{HEIGHT}" role="img" aria-labelledby="title">
  <title id="title">Loss and test accuracy of the run {name}</title>
  <style>
{STYLE}
  </style>
  <rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\
{panel(46, f"{name}: loss", {"loss": (BLUE, losses)}, last_step, round(highest, 1))}\
{panel(390, "test accuracy", accuracies, last_step, 1.0)}
</svg>
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("picture", type=pathlib.Path)
    args = parser.parse_args()
    lines = (args.workdir / "metrics.jsonl").read_text().splitlines()
    picture = draw_run(args.workdir.name, [json.loads(line) for line in lines])
    args.picture.write_text(picture)
