"""The tables of sweeps and trainings, as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpusim.tools.study.metrics import METRICS
from gpusim.tools.study.paired import PairedTest, compared
from gpusim.tools.tables import Cells, print_table

if TYPE_CHECKING:
    from gpusim.tools.study.rows import Measured, Row

__all__ = [
    "DETAILS",
    "LEFT",
    "MAIN",
    "TESTS",
    "breaks",
    "cells",
    "columns",
    "notes",
    "show",
    "test_cells",
    "texts",
]


@dataclass(frozen=True)
class Column:
    """How a figure is shown: its heading, and the formats of its mean and of its spread."""

    heading: str
    mean: str
    spread: str = ""
    of: Callable[[float], float] = float


COLUMNS = {
    "relative_error": Column("relative error", ".2e", ".0e"),
    "input_error": Column("against the input", ".2e", ".0e"),
    "max_ulp": Column("largest error, ulp", ".3g", ".1g"),
    "bias": Column("bias", "+.1e", ".0e"),
    "mean_error": Column("mean error", "+.1e", ".0e"),
    "cosine": Column("1 - cosine", ".1e", ".0e", lambda cosine: 1 - cosine),
    "error_p50": Column("median", ".1e"),
    "error_p90": Column("90 %", ".1e"),
    "error_p99": Column("99 %", ".1e"),
    "error_max": Column("largest", ".1e"),
    "backward_p50": Column("median / sum |x|", ".1e"),
    "backward_p99": Column("99 % / sum |x|", ".1e"),
    "backward_max": Column("largest / sum |x|", ".1e"),
    "sign_flips": Column("sign flipped", ".2%"),
    "correct": Column("correctly rounded", ".1%"),
    "overflowed": Column("overflow", ".2%"),
    "infinite_input": Column("infinite input", ".2%"),
}
MAIN = (
    "relative_error",
    "input_error",
    "backward_p50",
    "backward_p99",
    "backward_max",
    "bias",
    "correct",
)
DETAILS = ("cosine", "error_p50", "error_p90", "error_p99", "error_max", "max_ulp", "sign_flips")
IF_ANY = ("overflowed", "infinite_input")
"""Figures that are added to a table if they are not zero."""
LEFT = ("tensor", "setting", "format", "text", "figure", "a", "b")
"""The headings of the columns of text."""


def figures(study: Measured, chosen: Sequence[str]) -> list[str]:
    """The figures of a table. **Raises**: ValueError for an unknown one."""
    for name in chosen:
        if name not in METRICS:
            raise ValueError(f"figures: {name!r} given; expected {', '.join(METRICS)}")
    found = [name for name in IF_ANY if any(getattr(row.mean, name) for row in study.rows)]
    return [*chosen, *(name for name in found if name not in chosen)]


def columns(study: Measured, chosen: Sequence[str] = MAIN) -> list[str]:
    """The headings of a table of some figures."""
    first = ["tensor"] if study.tensors else []
    headings = [COLUMNS[name].heading for name in figures(study, chosen)]
    return [*first, "replicas", "setting", *_sent(study), *headings]


def cells(study: Measured, chosen: Sequence[str] = MAIN, *, intervals: bool = False) -> Cells:
    """The rows as text; ± is the standard deviation between inputs or seeds. * is an artefact."""
    names = figures(study, chosen)
    rows = []
    stars = any(row.problems for row in study.rows)
    for row in study.rows:
        first = [row.tensor or "all"] if study.tensors else []
        found = [_cell(row, name, intervals) for name in names]
        star = ("*" if row.problems else " ") if stars else ""
        sent = [f"{row.bytes_sent:,.0f}{star}" for _ in _sent(study)]
        rows.append([*first, f"{row.replicas:,}", row.setting.name, *sent, *found])
    return rows


def _sent(study: Measured) -> list[str]:
    """The heading of the bytes that are sent, where settings differ in what they send."""
    return ["bytes sent"] if any(setting.in_phases for setting in study.settings) else []


def _cell(row: Row, name: str, intervals: bool) -> str:
    column = COLUMNS[name]
    mean, spread = column.of(getattr(row.mean, name)), getattr(row.spread, name)
    if not math.isfinite(mean):
        return "overflow" if row.mean.overflowed else "inf" if math.isinf(mean) else "-"
    if intervals and row.low and row.high:
        ends = sorted(column.of(getattr(end, name)) for end in (row.low, row.high))
        if not all(map(math.isfinite, ends)):
            return f"{mean:{column.mean}}"
        return f"{mean:{column.mean}} [{ends[0]:{column.mean}}, {ends[1]:{column.mean}}]"
    more = f" ± {spread:{column.spread}}" if column.spread and math.isfinite(spread) else ""
    return f"{mean:{column.mean}}{more}"


def breaks(study: Measured) -> set[int]:
    """The rows before which the number of replicas changes."""
    counts = [row.replicas for row in study.rows]
    return {k for k in range(1, len(counts)) if counts[k] != counts[k - 1]}


def notes(study: Measured) -> list[str]:
    """Sentences below the table."""
    share = max(row.mean.infinite_input for row in study.rows)
    infinite = f"{share:.2%} of the elements have an infinite input, and enter no error"
    return [
        *study.about.get("notes", ()),
        *([infinite] if share else []),
        *(f"* {problem}" for problem in study.problems),
    ]


TESTS = ["replicas", "figure", "a", "b", "pairs", "a - b", "interval", "a / b", "p", "Holm's p"]
"""The columns of paired tests."""


def test_cells(tests: Sequence[PairedTest]) -> Cells:
    """Paired tests as text."""
    return [
        [
            f"{test.replicas:,}",
            test.metric,
            test.a.name,
            test.b.name,
            f"{test.pairs} {test.unit}s",
            f"{test.difference:+.2e}",
            f"[{test.low:+.1e}, {test.high:+.1e}]",
            f"{test.ratio:.3g}",
            f"{test.p_value:.3g}",
            f"{test.adjusted:.3g}",
        ]
        for test in tests
    ]


def texts(study: Measured) -> Cells:
    """Each setting, and its Reduction as text."""
    return [[setting.name, setting.text] for setting in study.settings]


def show(study: Measured, chosen: Sequence[str] = MAIN, *, intervals: bool = False) -> None:
    """Print a study's table, and those of its tests and texts."""
    title = f"Error of the {study.op}: {study.input}"
    rows = cells(study, chosen, intervals=intervals)
    print_table(title, columns(study, chosen), rows, breaks(study), LEFT)
    for note in notes(study):
        print(f"\n{note}")
    tests = compared(study)
    if tests:
        print()
        title = "Paired sign-flip tests, two-sided, corrected for all of them by Holm's method"
        print_table(title, TESTS, test_cells(tests), left=LEFT)
    print()
    title = "As text, for --reduction and reduction="
    print_table(title, ["setting", "text"], texts(study), left=LEFT)
