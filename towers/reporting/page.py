"""A web page in one file: its style, and its parts. Every text is escaped here."""

import base64
import html
import io
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from towers.data.files.paths import shown
from towers.reporting.charts import COLORS, Series

# Pixels of the longer side of a picture; smaller images are not resized.
_LONGEST, _SMALL = 160, 64

_STYLE = """\
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --muted: #59636e;
  --grid: #d8dee4; --panel: #f6f8fa; --wrong: #b42318; --link: #1f5fbf; }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --text: #e6e9ed;
  --muted: #9aa4af; --grid: #343b44; --panel: #1d2229; --wrong: #ff8a80;
  --link: #6ca6ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1400px; padding: 16px clamp(14px, 2.5vw, 36px) 40px;
  background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 20px; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 10px; padding-top: 12px;
  border-top: 1px solid var(--grid); }
p { margin: 4px 0; max-width: 75ch; overflow-wrap: anywhere; }
a { color: var(--link); }
.muted { color: var(--muted); }
.figure { font-size: 44px; line-height: 1.1; font-weight: 650; margin: 6px 0; }
.figure small { font-size: 17px; font-weight: 400; display: inline-block;
  line-height: 1.3; }
dl.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(132px, 1fr));
  gap: 10px; margin: 16px 0 0; }
dl.tiles > div { background: var(--panel); border-radius: 6px; padding: 8px 12px; }
dt { color: var(--muted); font-size: 13px; } dd { margin: 0; font-size: 18px; }
dd small { font-size: 13px; color: var(--muted); display: block; }
.row { display: flex; flex-wrap: wrap; gap: 20px 28px; align-items: flex-start; }
.row > * { min-width: 0; max-width: 100%; }
.grid { display: grid; gap: 20px 28px; align-items: end;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); }
figure { margin: 0; } figcaption { font-size: 14px; margin-bottom: 2px; }
.grid figcaption b { display: block; }
figcaption b { font-weight: 600; }
.key { white-space: nowrap; color: var(--muted); margin-right: 12px; font-size: 13px;
  display: inline-block; max-width: 100%; overflow: hidden; text-overflow: ellipsis;
  vertical-align: bottom; }
.key i { display: inline-block; width: 16px; border-top: 3px solid; margin-right: 5px;
  vertical-align: middle; }
img { display: block; max-width: 100%; height: auto; border-radius: 4px; }
.wide { overflow-x: auto; } .wide img { max-width: none; }
table { border-collapse: collapse; font-size: 14px; }
th, td { padding: 3px 14px 3px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--grid); overflow-wrap: break-word; max-width: 60ch; }
th { color: var(--muted); font-weight: 500; }
td.short { white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.images { display: grid; gap: 14px;
  grid-template-columns: repeat(auto-fill, minmax(112px, 1fr)); }
.images figcaption { font-size: 13px; line-height: 1.35; overflow-wrap: anywhere; }
.images img { width: 100%; max-width: 160px; aspect-ratio: 1; object-fit: contain;
  background: var(--panel); border-radius: 4px; display: block; }
.images img.small { image-rendering: pixelated; }
.wrong { color: var(--wrong); }
.name { display: block; overflow: hidden; text-overflow: ellipsis;
  white-space: nowrap; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--panel);
  border-radius: 6px; padding: 10px 12px; font-size: 13px; margin: 8px 0; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--muted); }
"""

# Characters of a cell that is not broken into lines.
_SHORT = 20

# Markup, which is put into a page without escaping.
Html = str


def page(title: str, parts: Iterable[Html]) -> Html:
    """The whole page, in UTF-8."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def text(value: object) -> Html:
    """A text; control characters, and bytes that are no text, as escapes."""
    return html.escape(shown(str(value), 10**6))


def section(title: str, *parts: Html) -> Html:
    """A part of the page; empty without content."""
    content = "\n".join(filter(None, parts))
    return (
        f"<section>\n<h2>{text(title)}</h2>\n{content}\n</section>" if content else ""
    )


def paragraph(words: str) -> Html:
    return f'<p class="muted">{text(words)}</p>'


def row(*parts: Html) -> Html:
    """Parts next to each other, as far as there is room."""
    return f'<div class="row">{"".join(parts)}</div>'


def grid(*parts: Html) -> Html:
    """Parts of one width in columns."""
    return f'<div class="grid">{"".join(parts)}</div>'


def tiles(values: Iterable[tuple[str, str, str]]) -> Html:
    """Figures: name, value and a remark."""
    cells = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)} <small>{text(remark)}</small>"
        "</dd></div>"
        for name, value, remark in values
    )
    return f'<dl class="tiles">{cells}</dl>'


def chart(title: str, image: Html, series: Sequence[Series] = (), wide=False) -> Html:
    """A chart with its title and legend; a wide one scrolls."""
    kind = ' class="wide"' if wide else ""
    caption = f"<figcaption><b>{text(title)}</b>{legend(series)}</figcaption>"
    return f"<figure{kind}>{caption}{image}</figure>"


def legend(series: Sequence[Series]) -> Html:
    """The names of curves, with their colors."""
    return "".join(
        f'<span class="key"><i style="color:{COLORS[s.color % len(COLORS)]}'
        f"{';border-top-style:dashed' if s.color >= len(COLORS) else ''}"
        f'{";border-top-width:1px" if s.is_faint else ""}"></i>{text(s.name)}</span>'
        for s in series
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table whose numbers are on the right: floats with four digits."""

    def line(cells, tag):
        return f"<tr>{''.join(_cell(cell, tag) for cell in cells)}</tr>"

    body = [list(cells) for cells in rows]
    is_number = [
        bool(body) and all(isinstance(cells[i], int | float) for cells in body)
        for i in range(len(head))
    ]
    titles = "".join(
        f"<th{' class=number' if number else ''}>{text(name)}</th>"
        for name, number in zip(head, is_number, strict=True)
    )
    lines = "\n".join(line(cells, "td") for cells in body)
    head = f"<thead><tr>{titles}</tr></thead>" if any(head) else ""
    return f'<div class="wide"><table>{head}<tbody>{lines}</tbody></table></div>'


def _cell(value, tag):
    if isinstance(value, float):
        return f'<{tag} class="number">{value:.4f}</{tag}>'
    if isinstance(value, int):
        return f'<{tag} class="number">{value:,}</{tag}>'
    kind = ' class="short"' if len(str(value)) <= _SHORT else ""
    return f"<{tag}{kind}>{text(value)}</{tag}>"


def details(summary: str, content: Html) -> Html:
    """A section that expands on a click."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def pictures(cells: Iterable[tuple[np.ndarray, str, Sequence[Html]]]) -> Html:
    """Images with the text that appears over them, and the lines below."""
    figures = "\n".join(
        f'<figure title="{text(title)}">{_image(pixels)}'
        f"<figcaption>{'<br>'.join(lines)}</figcaption></figure>"
        for pixels, title, lines in cells
    )
    return f'<div class="images">{figures}</div>'


def _image(pixels):
    """An image, uint8 [height, width, channels], as an element."""
    channels = pixels.shape[-1]
    image = Image.fromarray(pixels[..., :3] if channels >= 3 else pixels[..., 0])
    is_small = max(image.size) <= _SMALL
    kind, options = "PNG", {"optimize": True}
    if not is_small:
        image.thumbnail((_LONGEST, _LONGEST))
        kind, options = "JPEG", {"quality": 85}
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    data = base64.b64encode(buffer.getvalue()).decode()
    style = ' class="small"' if is_small else ""
    return f'<img{style} alt="" src="data:image/{kind.lower()};base64,{data}">'
