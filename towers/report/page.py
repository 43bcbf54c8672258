"""A web page in one file: its style and its parts, which escape their texts."""

import base64
import html
import io
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
from PIL import Image

from towers.messages import shown
from towers.report.charts import COLORS, Series

# Maximum size of a picture in pixels, and of one that is not resized.
_LONGEST, _SMALL = 160, 64

_STYLE = pathlib.Path(__file__).with_suffix(".css").read_text("utf-8")

# Maximum number of characters of a cell without line breaks.
_SHORT = 20

# Markup, which is not escaped.
Html = str


def page(title: str, parts: Iterable[Html]) -> Html:
    """Return the whole page, in UTF-8."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def text(value: object) -> Html:
    """Escape a text; control characters and invalid bytes become escape sequences."""
    return html.escape(shown(str(value), 10**6))


def section(title: str, *parts: Html) -> Html:
    """Return a part of the page."""
    content = "\n".join(parts)
    return f"<section>\n<h2>{text(title)}</h2>\n{content}\n</section>"


def paragraph(words: str) -> Html:
    """Return a paragraph in small gray letters."""
    return f'<p class="muted">{text(words)}</p>'


def row(*parts: Html) -> Html:
    """Put parts next to each other, as far as there is room."""
    return f'<div class="row">{"".join(parts)}</div>'


def grid(*parts: Html) -> Html:
    """Put parts of one width into columns."""
    return f'<div class="grid">{"".join(parts)}</div>'


def tiles(values: Iterable[tuple[str, str, str]]) -> Html:
    """Return names, values and remarks as tiles."""
    cells = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)} <small>{text(remark)}</small>"
        "</dd></div>"
        for name, value, remark in values
    )
    return f'<dl class="tiles">{cells}</dl>'


def chart(title: str, image: Html, series: Sequence[Series] = (), wide=False) -> Html:
    """Return a chart with its title and legend; a wide one scrolls."""
    kind = ' class="wide"' if wide else ""
    caption = f"<figcaption><b>{text(title)}</b>{_legend(series)}</figcaption>"
    return f"<figure{kind}>{caption}{image}</figure>"


def _legend(series):
    return "".join(
        f'<span class="key"><i style="color:{COLORS[s.color % len(COLORS)]}'
        f"{';border-top-style:dashed' if s.color >= len(COLORS) else ''}"
        f'{";border-top-width:1px" if s.is_faint else ""}"></i>{text(s.name)}</span>'
        for s in series
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """Return a table with numbers on the right, floats with four digits."""
    titles, body = "", [list(cells) for cells in rows]
    for i, name in enumerate(head):
        is_number = body and all(isinstance(cells[i], int | float) for cells in body)
        titles += f"<th{' class=number' if is_number else ''}>{text(name)}</th>"
    lines = "\n".join(f"<tr>{''.join(map(_cell, cells))}</tr>" for cells in body)
    head = f"<thead><tr>{titles}</tr></thead>" if any(head) else ""
    return f'<div class="wide"><table>{head}<tbody>{lines}</tbody></table></div>'


def _cell(value):
    if isinstance(value, int | float):
        number = f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
        return f'<td class="number">{number}</td>'
    if isinstance(value, list):
        value = "{:.4f} to {:.4f}".format(*value)
    kind = ' class="short"' if len(str(value)) <= _SHORT else ""
    return f"<td{kind}>{text(value)}</td>"


def details(summary: str, content: Html) -> Html:
    """Return a section that expands on a click."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def pictures(cells: Iterable[tuple[np.ndarray, str, Sequence[Html]]]) -> Html:
    """Return images with the text that appears over them, and the lines below."""
    figures = "\n".join(
        f'<figure title="{text(title)}">{_image(pixels)}'
        f"<figcaption>{'<br>'.join(lines)}</figcaption></figure>"
        for pixels, title, lines in cells
    )
    return f'<div class="images">{figures}</div>'


def _image(pixels):
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
