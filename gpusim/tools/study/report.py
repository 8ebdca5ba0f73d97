"""A study as one HTML file with its pictures and its table; it loads nothing else."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpusim
from gpusim import figures
from gpusim.files import atomic_write
from gpusim.tools.study import picture
from gpusim.tools.study.metrics import METRICS
from gpusim.tools.study.table import cells, columns, training_cells, training_columns
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
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem;
       margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin-top: 2.5rem; }}
img {{ width: 100%; max-width: 48rem; height: auto; }}
table {{ border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .15rem .7rem; text-align: right; white-space: nowrap; }}
th.text, td.text {{ text-align: left; }}
thead th {{ border-bottom: 1px solid #888; }} tr.gap td {{ border-top: 1px solid #ddd; }}
.wide {{ overflow-x: auto; }} footer {{ color: #666; font-size: .85rem; margin-top: 3rem; }}
pre {{ overflow-x: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
<footer>gpusim {version}</footer>
</body>
</html>
"""

MEANING = """<p>The sum over the replicas, in each setting, against the exact sum of the same
values (those that were rounded to the format before they were added). <em>Relative error</em> is
in the 2-norm over all elements; <em>ulp</em> is the unit in the last place of the format at the
exact sum; <em>bias</em> is the mean signed error over the root mean square of the exact sums;
<em>correctly rounded</em> is the share of elements that no reduction could improve. Where seeds
vary, these are means over the seeds; ± and the band are the standard deviation between them.
Elements that are not finite enter no error; hollow marks show that there are some.</p>"""

TRAINING_MEANING = """<p><em>Progress</em> is the part of the weights' displacement in float32 that
this training has made too; <em>updates that changed nothing</em> left the weight with the bits it
had. An update of less than half a unit in the last place does so whenever it is rounded to nearest;
rounded stochastically, it now and then moves the weight by a whole unit, and the mean is
right.</p>"""


def write(study: Study, path: Path) -> Path:
    """Write a sweep's page into `path`; returns it."""
    parts = [f"<p>Input: {escape(study.input)}.</p>", MEANING]
    for metric in picture.PICTURES:
        with picture.drawn(study, metric) as figure:
            parts += [
                f"<h2>{escape(METRICS[metric].capitalize())}</h2>",
                _image(figure, f"{METRICS[metric]} against the number of replicas"),
            ]
    parts += ["<h2>All figures</h2>", _table(columns(study), cells(study)), _about(study.about)]
    return _write("Precision study", parts, path)


def write_training(training: Training, path: Path) -> Path:
    """Write a training study's page into `path`; returns it."""
    parts = [f"<p>{escape(training.title[0].upper() + training.title[1:])}.</p>", TRAINING_MEANING]
    with picture.drawn_training(training) as figure:
        parts.append(_image(figure, "loss, accuracy and progress by epoch"))
    table = _table(training_columns(), training_cells(training))
    parts += ["<h2>After the last epoch</h2>", table, _about(training.about)]
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


def _table(headings: Sequence[str], rows: Cells) -> str:
    text = [' class="text"' if heading in ("setting", "format") else "" for heading in headings]
    head = "".join(f"<th{t}>{escape(h)}</th>" for t, h in zip(text, headings, strict=True))
    body = []
    for k, row in enumerate(rows):
        gap = ' class="gap"' if k and row[0] != rows[k - 1][0] and headings[0] == "replicas" else ""
        made = "".join(f"<td{t}>{escape(cell)}</td>" for t, cell in zip(text, row, strict=True))
        body.append(f"<tr{gap}>{made}</tr>")
    lines = "\n".join(body)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody>'
        "</table></div>"
    )


def _about(about: dict[str, Any]) -> str:
    return f"<h2>To repeat it</h2><pre>{escape(json.dumps(about, indent=1))}</pre>"
