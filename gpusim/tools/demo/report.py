"""What the demo prints: a progress bar, the table, and the same table as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gpusim.tools.demo.data import Digits
from gpusim.tools.demo.train import Result
from gpusim.tools.study.output import replacing

__all__ = ["progress", "show", "write_csv"]

COLUMNS = (
    "gradients, summed",
    "test accuracy",
    "final loss",
    "gradient difference",
    "weight difference",
)
CAPTION = (
    "Differences: the largest from the float64 run, of the first step's mean gradient and of the "
    "weights after the last step."
)


@contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A progress bar over all steps of all settings; yields a function to call after each step."""
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=steps)

        def advance(setting: str) -> None:
            bar.update(task, advance=1, description=setting)

        yield advance


def cells(result: Result) -> list[str]:
    """One row of the table."""
    run = result.run
    return [
        run.setting.name,
        f"{run.test_accuracy:.2%}",
        f"{run.losses[-1]:.6f}",
        f"{result.gradient_difference:.1e}",
        f"{result.weight_differences[-1]:.1e}",
    ]


def show(results: Sequence[Result], digits: Digits, epochs: int) -> None:
    """Print the table."""
    heading = (
        f"{digits.replicas} replicas, {digits.share} images each a step, "
        f"{epochs * digits.steps} steps"
    )
    table = Table(
        title=heading,
        title_justify="left",
        caption=CAPTION,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for k, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if k else "left", no_wrap=k == 0)
    for result in results:
        table.add_row(*cells(result))
    Console().print(table)


def write_csv(results: Sequence[Result], path: Path) -> Path:
    """Write the table with all digits; returns `path`."""
    with replacing(path) as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for result in results:
            run = result.run
            differences = result.gradient_difference, result.weight_differences[-1]
            rows.writerow([run.setting.name, run.test_accuracy, run.losses[-1], *differences])
    return path
