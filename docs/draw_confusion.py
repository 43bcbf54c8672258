"""Draws the confusion matrix of a run that was evaluated, as an SVG picture.

    python docs/draw_confusion.py runs/photos confusion.svg

It is made for about twenty classes at most.
"""

import argparse
import html
import json
import pathlib

WIDTH, TOP, LEFT = 700, 96, 150
# Of all rows together, and of one at most.
HEIGHT, MOST = 600, 54
STYLE = """\
    text { font-family: sans-serif; font-size: 13px; fill: #1b1f24; }
    .small { font-size: 11px; fill: #57606a; }
    .end { text-anchor: end; }
    .middle { text-anchor: middle; }
    .light { fill: #ffffff; }
    .right { fill: #1f5fbf; stroke: #d0d7de; }
    .wrong { fill: #c0392b; stroke: #d0d7de; }"""


def draw_matrix(result: dict) -> str:
    """The SVG as text.

    Args:
        result: what `result.json` holds; the moving averages of the parameters are
            drawn where the run keeps them.
    """
    kind = "_ema" if "test_confusion_matrix_ema" in result else ""
    matrix = result[f"test_confusion_matrix{kind}"]
    classes = result[f"test_classes{kind}"]
    side = min(MOST, HEIGHT // len(classes))
    right, bottom = LEFT + side * len(classes), TOP + side * len(classes)
    parts = [
        f'<text x="{LEFT}" y="20">predicted as</text>',
        f'<text class="end" x="{LEFT - 8}" y="{TOP - 8}">class</text>',
        f'<text class="small end" x="{right + 52}" y="{TOP - 8}">recall</text>',
        f'<text class="small end" x="{LEFT - 8}" y="{bottom + 18}">precision</text>',
    ]
    for place, (row, counts) in enumerate(zip(classes, matrix, strict=True)):
        name = html.escape(row["name"][:18])
        middle, down = LEFT + side * (place + 0.5), TOP + side * (place + 0.5) + 5
        parts += [
            f'<text class="end" x="{LEFT - 8}" y="{down:g}">{name}</text>',
            f'<text x="{middle:g}" y="{TOP - 8}" '
            f'transform="rotate(-35 {middle:g} {TOP - 8})">{name}</text>',
            f'<text class="small end" x="{right + 52}" y="{down:g}">'
            f"{row['recall']:.2f}</text>",
            f'<text class="small middle" x="{middle:g}" y="{bottom + 18}">'
            f"{row['precision']:.2f}</text>",
            *_cells(counts, place, TOP + side * place, side),
        ]
    height = bottom + 30
    drawn = "\n".join(f"  {part}" for part in parts)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" \
width="{WIDTH}" height="{height}" role="img" aria-labelledby="title">
  <title id="title">Confusion matrix of {result["test_images"]} test images\
</title>
  <style>
{STYLE}
  </style>
  <rect width="{WIDTH}" height="{height}" fill="#ffffff"/>
{drawn}
</svg>
"""


def _cells(counts: list[int], label: int, top: float, side: int) -> list[str]:
    """A row: the more images of the class, the darker."""
    parts = []
    for place, count in enumerate(counts):
        share = count / max(sum(counts), 1)
        left, kind = LEFT + side * place, "right" if place == label else "wrong"
        parts.append(
            f'<rect class="{kind}" x="{left}" y="{top}" width="{side}" '
            f'height="{side}" fill-opacity="{share:.2f}"/>'
        )
        if count:
            light = " light" if share > 0.5 else ""
            parts.append(
                f'<text class="middle{light}" x="{left + side / 2:g}" '
                f'y="{top + side / 2 + 5:g}">{count}</text>'
            )
    return parts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=pathlib.Path, help="folder of the run")
    parser.add_argument("picture", type=pathlib.Path, help="SVG file to write")
    options = parser.parse_args()
    result = json.loads((options.run / "result.json").read_text())
    options.picture.write_text(draw_matrix(result))
