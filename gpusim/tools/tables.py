"""Tables on standard output: rich's on a terminal that is wide enough, else plain columns."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from shutil import get_terminal_size

from gpusim.optional import available

__all__ = ["Cells", "print_table"]

Cells = list[list[str]]


def print_table(
    title: str,
    headings: Sequence[str],
    rows: Cells,
    breaks: Collection[int] = (),
    left: Collection[str] = ("setting", "format"),
    width: int | None = None,
) -> None:
    """Print columns, those `left` aligned to the left; `breaks` are the rows after a gap.

    `width` is that of a pipe or a file, for rich's tables there too; None: plain columns there.
    """
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    terminal = sys.stdout.isatty()
    wide = sum(widths) + 3 * len(widths) <= get_terminal_size().columns  # rich cuts wider tables
    if (width is not None or (wide and terminal)) and available("rich"):
        _print_rich(title, headings, rows, breaks, left, None if terminal else width)
        return
    print(title)
    print()
    for k, row in enumerate([headings, *rows]):
        if k - 1 in breaks:
            print()
        parts = [
            cell.ljust(width) if heading in left else cell.rjust(width)
            for cell, width, heading in zip(row, widths, headings, strict=True)
        ]
        print("  ".join(parts).rstrip())


def _print_rich(
    title: str,
    headings: Sequence[str],
    rows: Cells,
    breaks: Collection[int],
    left: Collection[str],
    width: int | None,
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for k, row in enumerate(rows):
        table.add_row(*map(Text, row), end_section=k + 1 in breaks)
    Console(width=width).print(table)
