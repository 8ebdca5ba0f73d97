"""A study as one HTML file with its pictures and its table; it loads nothing else."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpusim
from gpusim import figures
from gpusim.files import atomic_write
from gpusim.tools.study import picture, table
from gpusim.tools.study.metrics import METRICS, RESOLUTION
from gpusim.tools.tables import Cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpusim.tools.study.results import Study
    from gpusim.tools.study.training import Training

__all__ = ["write", "write_training"]

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 68rem;
       margin: 2rem auto; padding: 0 1rem; }}
p {{ max-width: 48rem; }} h1 {{ font-size: 1.5rem; }}
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
@media print {{ body {{ max-width: none; margin: 0; font-size: 11px; }}
  .wide {{ overflow-x: visible; }} th, td {{ padding: .1rem .25rem; }} table {{ font-size: 8px; }}
  tr, img, h2 {{ break-inside: avoid; }} h2 {{ break-after: avoid; }} }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
<footer>gpusim {version}</footer>
</body>
</html>
"""

MEANING = """<p>The {op} over the replicas, in each setting, against the exact {op} of the same
values (those that were rounded to the format before they were added). <em>bfloat16 added in
float32</em> has values in bfloat16 and partial sums in float32. <em>Relative error</em> is
in the 2-norm over all elements; <em>against the input</em> it is measured from the exact {op} of
the values before they were rounded. <em>ulp</em> is the unit in the last place of the format at
the exact {op}; <em>bias</em> is the mean signed error over the root mean square of the exact
results; <em>correctly rounded</em> is the share of elements that no reduction could improve.
<em>Median</em>, <em>90&nbsp;%</em> and <em>99&nbsp;%</em> are quantiles of the relative error of
an element, to within {resolution:.1%}, and <em>largest</em> is its maximum. <em>Sign flipped</em>
is the share of elements whose result has the opposite sign of the exact one. Where seeds vary,
these are means over the seeds; ± and the band are the standard deviation between them.
<em>Overflow</em> is the share of elements that are not finite although their inputs are; they enter
no error. Marks are hollow where some elements overflow, and crosses at the edge where all
do.</p>"""

TRAINING_MEANING = """<p><em>Progress</em> is the part of the weights' displacement in float32 that
this training has made too; <em>updates that changed nothing</em> left the weight with the bits it
had. An update of less than half a unit in the last place does so whenever it is rounded to nearest;
rounded stochastically, it now and then moves the weight by a whole unit, and the mean is
right.</p>"""


def write(study: Study, path: Path) -> Path:
    """Write a sweep's page into `path`; returns it."""
    meaning = MEANING.format(op=study.op, resolution=RESOLUTION)
    parts = [f"<p>Input: {escape(study.input)}.</p>", meaning]
    for metric in picture.pictures(study):
        with picture.drawn(study, metric) as figure:
            parts += [
                f"<h2>{escape(METRICS[metric].capitalize())}</h2>",
                _image(figure, METRICS[metric]),
            ]
    for title, chosen in (("Errors", table.MAIN), ("Errors of elements", table.DETAILS)):
        cells, columns = table.cells(study, chosen), table.columns(study, chosen)
        parts += [f"<h2>{title}</h2>", _table(columns, cells, table.breaks(study))]
    parts += [f"<p>{escape(note)}.</p>" for note in table.notes(study)]
    return _write("Precision study", [*parts, _about(study.about)], path)


def write_training(training: Training, path: Path) -> Path:
    """Write a training study's page into `path`; returns it."""
    parts = [f"<p>{escape(training.title[0].upper() + training.title[1:])}.</p>", TRAINING_MEANING]
    with picture.drawn_training(training) as figure:
        parts.append(_image(figure, "loss, accuracy and progress by epoch"))
    rows = _table(table.training_columns(), table.training_cells(training))
    parts += ["<h2>After the last epoch</h2>", rows, _about(training.about)]
    return _write("Training study", parts, path)


def _write(title: str, parts: Sequence[str], path: Path) -> Path:
    page = PAGE.format(title=title, body="\n".join(parts), version=escape(gpusim.__version__))
    with atomic_write(path) as file:
        file.write(page)
    return path


def _image(figure: Figure, alternative: str) -> str:
    drawing = io.BytesIO()
    figures.save(figure, drawing, ".svg")
    data = base64.b64encode(drawing.getvalue()).decode()
    return f'<img alt="{escape(alternative)}" src="data:image/svg+xml;base64,{data}">'


def _table(headings: Sequence[str], rows: Cells, breaks: Collection[int] = ()) -> str:
    text = [' class="text"' if heading in table.LEFT else "" for heading in headings]
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


def _about(about: dict[str, Any]) -> str:
    rest = {name: value for name, value in about.items() if name != "command"}
    return (
        f"<h2>To repeat it</h2><pre>{escape(about['command'])}</pre>"
        f"<h2>Input and parameters</h2><pre>{escape(json.dumps(rest, indent=1))}</pre>"
    )
