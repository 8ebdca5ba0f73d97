"""The tables of sweeps and trainings, as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gpusim.tools.tables import Cells, print_table

if TYPE_CHECKING:
    from gpusim.tools.study.results import Row, Study
    from gpusim.tools.study.training import Training

__all__ = [
    "cells",
    "columns",
    "show",
    "show_training",
    "training_cells",
    "training_columns",
]


def columns(study: Study) -> list[str]:
    """The headings; the column of overflows only if there are any."""
    overflow = ["not finite"] if any(row.mean.overflowed for row in study.rows) else []
    figures = ["relative error", "largest error, ulp", "bias", "correctly rounded"]
    return ["replicas", "setting", *figures, *overflow]


def cells(study: Study) -> Cells:
    """The rows as text; ± is the standard deviation between seeds."""
    overflow = any(row.mean.overflowed for row in study.rows)
    return [_row(row)[: None if overflow else -1] for row in study.rows]


def _row(row: Row) -> list[str]:
    mean, spread = row.mean, row.spread
    return [
        f"{row.replicas:,}",
        row.setting.name,
        _number(mean.relative_error, ".2e") + _spread(spread.relative_error, ".0e"),
        _number(mean.max_ulp, ".3g") + _spread(spread.max_ulp, ".1g"),
        _number(mean.bias, "+.1e") + _spread(spread.bias, ".0e"),
        _number(mean.correct, ".1%"),
        _number(mean.overflowed, ".2%"),
    ]


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"


def _spread(value: float, form: str) -> str:
    return f" ± {value:{form}}" if math.isfinite(value) else ""


def show(study: Study) -> None:
    """Print a study's table."""
    rows = cells(study)
    breaks = {k for k in range(1, len(rows)) if rows[k][0] != rows[k - 1][0]}
    print_table(f"Error of the sum: {study.input}", columns(study), rows, breaks)


def training_columns() -> list[str]:
    return ["format", "test accuracy", "final loss", "progress", "updates that changed nothing"]


def training_cells(training: Training) -> Cells:
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


def show_training(training: Training) -> None:
    """Print a training study's table."""
    print_table(training.title, training_columns(), training_cells(training))
