"""Pages of HTML that load nothing else: with pictures and tables, wide, narrow, dark or printed."""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import gpusim
from gpusim import figures
from gpusim.files import atomic_write
from gpusim.tools.tables import Cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["html_table", "image", "write_page"]

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 68rem;
       margin: 2rem auto; padding: 0 1rem; }}
p {{ max-width: 48rem; }} .run {{ margin: .3rem 0; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5rem; }}
h2 {{ font-size: 1.1rem; margin-top: 2.5rem; }}
img {{ width: 100%; max-width: 48rem; height: auto; }}
table {{ border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .15rem .5rem; text-align: right; vertical-align: top; }}
th {{ vertical-align: bottom; }} td {{ white-space: nowrap; }}
th.text, td.text {{ text-align: left; white-space: normal; overflow-wrap: anywhere; }}
td.text {{ min-width: 10rem; }}
thead th {{ border-bottom: 1px solid #888; }} tr.gap td {{ border-top: 1px solid #ddd; }}
.wide {{ overflow-x: auto; }} footer {{ color: #666; font-size: .85rem; margin-top: 3rem; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f4f4; padding: .5rem; }}
@media (max-width: 50rem) {{ body {{ margin: 1rem auto; }} table {{ font-size: .7rem; }}
  th, td {{ padding: .1rem .25rem; }} td.text {{ min-width: 6rem; }} }}
@media screen and (prefers-color-scheme: dark) {{
  body {{ color: #ddd; background: #1a1a1a; }} img {{ filter: invert(.9) hue-rotate(180deg); }}
  pre {{ background: #2a2a2a; }} tr.gap td {{ border-top-color: #444; }}
  footer {{ color: #aaa; }} }}
@media print {{ body {{ max-width: none; margin: 0; font-size: 11px; }}
  .wide {{ overflow-x: visible; }} th, td {{ padding: .1rem .25rem; }} table {{ font-size: 8px; }}
  tr, img, h2, .run {{ break-inside: avoid; }} h2 {{ break-after: avoid; }} }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
<footer>gpusim {version}</footer>
</body>
</html>
"""


def write_page(title: str, parts: Sequence[str], path: Path) -> Path:
    """Write a page of these parts, which are HTML, into `path`; returns it."""
    page = PAGE.format(
        title=escape(title), body="\n".join(parts), version=escape(gpusim.__version__)
    )
    with atomic_write(path) as file:
        file.write(page)
    return path


def image(figure: Figure, alternative: str) -> str:
    """A figure as an element of a page."""
    drawing = io.BytesIO()
    figures.save(figure, drawing, ".svg")
    data = base64.b64encode(drawing.getvalue()).decode()
    return f'<img alt="{escape(alternative)}" src="data:image/svg+xml;base64,{data}">'


def html_table(
    headings: Sequence[str], rows: Cells, breaks: Collection[int] = (), left: Collection[str] = ()
) -> str:
    """A table, with the columns of text on the `left`; `breaks` are the rows after a gap."""
    text = [' class="text"' if heading in left else "" for heading in headings]
    head = "".join(f"<th{t}>{escape(h)}</th>" for t, h in zip(text, headings, strict=True))
    body = []
    for k, row in enumerate(rows):
        gap = ' class="gap"' if k in breaks else ""
        made = "".join(f"<td{t}>{escape(cell)}</td>" for t, cell in zip(text, row, strict=True))
        body.append(f"<tr{gap}>{made}</tr>")
    lines = "\n".join(body)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody>'
        "</table></div>"
    )
