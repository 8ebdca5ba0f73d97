"""The tables of sweeps and trainings, as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpusim.tools.study.metrics import METRICS
from gpusim.tools.tables import Cells, print_table

if TYPE_CHECKING:
    from gpusim.tools.study.rows import Measured, Row
    from gpusim.tools.study.runs import Trained

__all__ = [
    "DETAILS",
    "LEFT",
    "MAIN",
    "breaks",
    "cells",
    "columns",
    "notes",
    "show",
    "show_training",
    "texts",
    "training_cells",
    "training_columns",
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
    "sign_flips": Column("sign flipped", ".2%"),
    "correct": Column("correctly rounded", ".1%"),
    "overflowed": Column("overflow", ".2%"),
    "infinite_input": Column("infinite input", ".2%"),
}
MAIN = ("relative_error", "input_error", "max_ulp", "bias", "correct")
DETAILS = ("cosine", "error_p50", "error_p90", "error_p99", "error_max", "sign_flips")
IF_ANY = ("overflowed", "infinite_input")
"""Figures that are added to a table if they are not zero."""
LEFT = ("tensor", "setting", "format", "text")
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


def cells(study: Measured, chosen: Sequence[str] = MAIN) -> Cells:
    """The rows as text; ± is the standard deviation between seeds."""
    names = figures(study, chosen)
    rows = []
    for row in study.rows:
        first = [row.tensor or "all"] if study.tensors else []
        found = [_cell(row, name) for name in names]
        sent = [f"{row.bytes_sent:,.0f}" for _ in _sent(study)]
        rows.append([*first, f"{row.replicas:,}", row.setting.name, *sent, *found])
    return rows


def _sent(study: Measured) -> list[str]:
    """The heading of the bytes that are sent, where settings differ in what they send."""
    return ["bytes sent"] if any(setting.in_phases for setting in study.settings) else []


def _cell(row: Row, name: str) -> str:
    column = COLUMNS[name]
    mean, spread = column.of(getattr(row.mean, name)), getattr(row.spread, name)
    if not math.isfinite(mean):
        return "overflow" if row.mean.overflowed else "inf" if math.isinf(mean) else "-"
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
    return [*study.about.get("notes", ()), *([infinite] if share else [])]


def texts(study: Measured) -> Cells:
    """Each setting, and its Reduction as text."""
    return [[setting.name, setting.text] for setting in study.settings]


def show(study: Measured, chosen: Sequence[str] = MAIN) -> None:
    """Print a study's table."""
    title = f"Error of the {study.op}: {study.input}"
    print_table(title, columns(study, chosen), cells(study, chosen), breaks(study), LEFT)
    for note in notes(study):
        print(f"\n{note}")
    print()
    title = "As text, for --reduction and reduction="
    print_table(title, ["setting", "text"], texts(study), left=LEFT)


def training_columns() -> list[str]:
    return ["format", "test accuracy", "final loss", "progress", "updates that changed nothing"]


def training_cells(training: Trained) -> Cells:
    return [
        [
            row["format"],
            f"{row['test accuracy']:.1%}",
            f"{row['final loss']:.4f}",
            f"{row['progress']:.1%}",
            f"{row['unchanged']:.1%}",
        ]
        for row in training.table
    ]


def show_training(training: Trained) -> None:
    """Print a training study's table."""
    print_table(training.title, training_columns(), training_cells(training))
