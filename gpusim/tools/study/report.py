"""A study as one HTML file with its pictures and its table; it loads nothing else."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim.tools.page import html_table, image, write_page
from gpusim.tools.study import picture, table
from gpusim.tools.study.metrics import METRICS, RESOLUTION

if TYPE_CHECKING:
    from gpusim.tools.study.rows import Measured
    from gpusim.tools.study.runs import Trained

__all__ = ["write", "write_training"]

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


def write(study: Measured, path: Path) -> Path:
    """Write a sweep's page into `path`; returns it."""
    meaning = MEANING.format(op=study.op, resolution=RESOLUTION)
    parts = [f"<p>Input: {escape(study.input)}.</p>", meaning]
    for metric in picture.pictures(study):
        with picture.drawn(study, metric) as figure:
            parts += [
                f"<h2>{escape(METRICS[metric].capitalize())}</h2>",
                image(figure, METRICS[metric]),
            ]
    if any(setting.in_phases for setting in study.settings):
        with picture.trade_off(study, "relative_error") as figure:
            parts += ["<h2>Error and bytes sent</h2>", image(figure, "error against bytes sent")]
    for title, chosen in (("Errors", table.MAIN), ("Errors of elements", table.DETAILS)):
        cells, columns = table.cells(study, chosen), table.columns(study, chosen)
        parts += [f"<h2>{title}</h2>", html_table(columns, cells, table.breaks(study), table.LEFT)]
    parts += [f"<p>{escape(note)}.</p>" for note in table.notes(study)]
    texts = html_table(["setting", "text"], table.texts(study), left=table.LEFT)
    parts += ["<h2>The settings as text, for --reduction and reduction=</h2>", texts]
    return write_page("Precision study", [*parts, _about(study.about)], path)


def write_training(training: Trained, path: Path) -> Path:
    """Write a training study's page into `path`; returns it."""
    parts = [f"<p>{escape(training.title[0].upper() + training.title[1:])}.</p>", TRAINING_MEANING]
    with picture.drawn_training(training) as figure:
        parts.append(image(figure, "loss, accuracy and progress by epoch"))
    rows = html_table(table.training_columns(), table.training_cells(training), left=table.LEFT)
    parts += ["<h2>After the last epoch</h2>", rows, _about(training.about)]
    return write_page("Training study", parts, path)


def _about(about: dict[str, Any]) -> str:
    rest = {name: value for name, value in about.items() if name != "command"}
    return (
        f"<h2>To repeat it</h2><pre>{escape(about['command'])}</pre>"
        f"<h2>Input and parameters</h2><pre>{escape(json.dumps(rest, indent=1))}</pre>"
    )
