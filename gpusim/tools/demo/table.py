"""The demo's table, printed and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from gpusim.files import atomic_write
from gpusim.tools.demo.training import Comparison
from gpusim.tools.digits import Digits
from gpusim.tools.tables import print_table
from gpusim.words import count

__all__ = ["show", "write_csv"]

COLUMNS = (
    "gradients, summed",
    "test accuracy",
    "final loss",
    "gradient difference",
    "weight difference",
)
CAPTION = (
    "Differences: the largest from the float64 run, of the first step's mean gradient and of the\n"
    "weights after the last step."
)


def cells(result: Comparison) -> list[str]:
    """One row of the table."""
    run = result.run
    return [
        run.variant.name,
        f"{run.test_accuracy:.2%}",
        f"{run.losses[-1]:.6f}",
        f"{result.gradient_difference:.1e}",
        f"{result.weight_differences[-1]:.1e}",
    ]


def show(results: Sequence[Comparison], data: Digits, epochs: int) -> None:
    """Print the table."""
    heading = (
        f"{count(data.replicas, 'replica')}, {data.share} images each a step, "
        f"{count(epochs * data.steps, 'step')}"
    )
    print_table(heading, COLUMNS, [cells(result) for result in results], left=COLUMNS[:1])
    print(f"\n{CAPTION}")


def write_csv(results: Sequence[Comparison], path: Path) -> Path:
    """Write the table with all digits; returns `path`."""
    with atomic_write(path) as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for result in results:
            run = result.run
            differences = result.gradient_difference, result.weight_differences[-1]
            rows.writerow([run.variant.name, run.test_accuracy, run.losses[-1], *differences])
    return path
