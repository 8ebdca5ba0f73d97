"""A study as one HTML file with its pictures and its table; it loads nothing else."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim.tools.page import html_table, image, write_page
from gpusim.tools.study import picture, table
from gpusim.tools.study.metrics import METRICS, RESOLUTION
from gpusim.tools.study.paired import compared

if TYPE_CHECKING:
    from gpusim.tools.study.rows import Measured

__all__ = ["about", "write"]

MEANING = """\
<p>The {op} over the replicas, in each setting, against the exact {op} of the same values (those
that were rounded to the format before they were added). <em>bfloat16 added in float32</em> has
values in bfloat16 and partial sums in float32. <em>Relative error</em> is in the 2-norm over all
elements; <em>against the input</em> it is measured from the exact {op} of the values before they
were rounded. <em>/ sum |x|</em> are quantiles of an element's error over the sum of the magnitudes
that were added to it, and its largest: defined also where a sum cancels. <em>ulp</em> is the unit
in the last place of the format at the exact {op}; <em>bias</em> is the mean signed error over the
root mean square of the exact results; <em>correctly rounded</em> is the share of elements that no
reduction could improve. <em>Median</em>, <em>90&nbsp;%</em> and <em>99&nbsp;%</em> are quantiles
of the relative error of an element, to within {resolution:.1%}, and <em>largest</em> is its
maximum. <em>Sign flipped</em> is the share of elements whose result has the opposite sign of the
exact one. Where inputs or seeds vary, these are means over them; ± is the standard deviation
between the inputs, or the seeds of one input, and the band the {confidence:.0%} confidence
interval of the mean (Student's). Ringed marks and * are artefacts: messages are shorter than the
wire's blocks, or the wire sends more bytes than unrounded values. <em>Overflow</em> is the share
of elements that are not finite although their inputs are; they enter no error. Marks are hollow
where some elements overflow, and crosses at the edge where all do.</p>"""


def write(study: Measured, path: Path) -> Path:
    """Write a sweep's page into `path`; returns it."""
    meaning = MEANING.format(op=study.op, resolution=RESOLUTION, confidence=study.confidence)
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
    if tests := compared(study):
        found = html_table(table.TESTS, table.test_cells(tests), left=table.LEFT)
        parts += ["<h2>Paired sign-flip tests, two-sided, with Holm's correction</h2>", found]
    texts = html_table(["setting", "text"], table.texts(study), left=table.LEFT)
    parts += ["<h2>The settings as text, for --reduction and reduction=</h2>", texts]
    return write_page("Precision study", [*parts, about(study.about)], path)


def about(given: dict[str, Any]) -> str:
    """The end of a page: the command that repeats a study, and its arguments."""
    rest = {name: value for name, value in given.items() if name != "command"}
    return (
        f"<h2>To repeat it</h2><pre>{escape(given['command'])}</pre>"
        f"<h2>Input and parameters</h2><pre>{escape(json.dumps(rest, indent=1))}</pre>"
    )
