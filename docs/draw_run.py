"""Draws the loss and the test accuracy of a run, as an SVG picture.

python docs/draw_run.py runs/quickstart run.svg
"""

import argparse
import json
import pathlib

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 700, 250, 50, 650, 40, 210
STYLE = """\
    text { font-family: sans-serif; font-size: 13px; fill: #1b1f24; }
    .small { font-size: 11px; fill: #57606a; }
    .end { text-anchor: end; }
    .axes { fill: none; stroke: #8c959f; }
    .loss { fill: none; stroke: #1f5fbf; stroke-width: 2; stroke-linejoin: round; }
    .accuracy { fill: #c0392b; }"""


def picture(records: list[dict]) -> str:
    """The SVG as text, from the lines of a `metrics.jsonl`."""
    last = records[-1]["step"]
    most = max(record["loss"] for record in records if "loss" in record)

    def place(step, share):
        x = LEFT + (RIGHT - LEFT) * step / last
        return f"{x:.1f} {BOTTOM - (BOTTOM - TOP) * share:.1f}"

    losses = [place(r["step"], r["loss"] / most) for r in records if "loss" in r]
    dots, label = [], ""
    for record in records:
        accuracy = record.get("test_accuracy_ema", record.get("test_accuracy"))
        if accuracy is not None:
            x, y = place(record["step"], accuracy).split()
            dots.append(f'<circle class="accuracy" cx="{x}" cy="{y}" r="4"/>')
            label = f'<text class="small end" x="{x}" y="{float(y) - 8:g}">'
            label += f"{accuracy:.4f}</text>"
    dots.append(label)
    drawn = "\n".join(f"  {dot}" for dot in dots)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" \
width="{WIDTH}" height="{HEIGHT}" role="img" aria-labelledby="title">
  <title id="title">Training loss and test accuracy of a run over its steps</title>
  <style>
{STYLE}
  </style>
  <rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>
  <path class="axes" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>
  <text class="small end" x="{LEFT - 5}" y="{TOP + 4}">{most:.1f}</text>
  <text class="small end" x="{LEFT - 5}" y="{BOTTOM + 4}">0</text>
  <text class="small end" x="{RIGHT + 40}" y="{TOP + 4}">1.0</text>
  <text class="small end" x="{RIGHT}" y="{BOTTOM + 16}">step {last}</text>
  <text x="{LEFT}" y="20">training loss (line, left); test accuracy of the moving \
averages (dots, right)</text>
  <path class="loss" d="M{" L".join(losses)}"/>
{drawn}
</svg>
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    options = parser.parse_args()
    lines = (options.workdir / "metrics.jsonl").read_text().splitlines()
    options.output.write_text(picture([json.loads(line) for line in lines]))
