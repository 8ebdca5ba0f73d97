"""Progress on standard error: a bar on a terminal with rich, else lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpusim.optional import available

__all__ = ["Advance", "progress", "silent", "waiting"]

Advance = Callable[[str, float], None]
"""Called after each piece of work, with its name and its amount."""

PATIENCE = 5.0
"""Seconds between two lines."""


def silent(name: str, work: float) -> None:
    """Show nothing."""


@contextmanager
def progress(total: float, done: float = 0.0) -> Iterator[Advance]:
    """Show progress towards `total`, of which `done` is done already."""
    if sys.stderr.isatty() and available("rich"):
        with _bar(total, done) as advance:
            yield advance
    else:
        yield _lines(total, done)


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show on a terminal that something runs whose end is not known, and for how long."""
    if not (sys.stderr.isatty() and available("rich")):
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        shown.add_task(text, total=None)
        yield


@contextmanager
def _bar(total: float, done: float) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:44}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, completed=0)
        bar.update(task, completed=done)

        def advance(name: str, work: float) -> None:
            bar.update(task, advance=work, description=name)

        yield advance


def _lines(total: float, done: float) -> Advance:
    shown = time.monotonic()

    def advance(name: str, work: float) -> None:
        nonlocal done, shown
        done += work
        if time.monotonic() - shown >= PATIENCE:
            shown = time.monotonic()
            print(f"{done / total:4.0%}  {name}", file=sys.stderr, flush=True)

    return advance
