"""The output of `gpusim twin`: tables for the terminal, and the table of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...twins import SETTINGS, TWINS
from ..tables import print_table
from .checking import Agreement
from .inferring import Match

__all__ = ["check", "infer", "markdown", "twins"]


def twins(names: Sequence[str]) -> None:
    """All twins, and how each was checked."""
    known = TWINS | SETTINGS
    rows = [[name, known[name].engine, known[name].checked, known[name].fold] for name in names]
    headings = ["twin", "engine", "checked", "fold"]
    print_table("Twins", headings, rows, left=headings)


def check(rows: Sequence[Agreement], missing: Sequence[str]) -> None:
    """The comparisons, the differences, and the twins whose engine was not found."""
    lines, breaks = [], set()
    for index, row in enumerate(rows):
        if index and row.twin != rows[index - 1].twin:
            breaks.add(index)
        lines.append(
            [
                row.twin,
                row.version,
                row.dtype,
                str(row.ranks),
                str(row.sizes),
                f"{row.elements:,}",
                _share(row.agreeing, row.elements),
                _verdict(row),
            ]
        )
    headings = ["twin", "engine", "type", "ranks", "sizes", "elements", "agree", ""]
    left = {"twin", "engine", "type", ""}
    if lines:
        print_table("Twins and engines", headings, lines, breaks, left)
        print()
    if missing:
        print(f"Not compared, as no engine for them is here: {', '.join(missing)}")
    agreeing, elements = sum(r.agreeing for r in rows), sum(r.elements for r in rows)
    differing = len({row.twin for row in rows if not row.equal})
    print(f"{agreeing:,} of {elements:,} elements agree; {differing} twins differ.")


def _verdict(row: Agreement) -> str:
    if not row.alike:
        return "the ranks' results differ"
    return "" if row.equal else f"differs, at {row.worst:,} elements"


def _share(part: int, whole: int) -> str:
    """The number of agreeing elements, or "all"."""
    if part == whole:
        return "all"
    return f"{part:,}"


def markdown(rows: Sequence[Agreement], names: Sequence[str]) -> None:
    """A line for each twin: its engine, its fold, and the comparisons of this run."""
    print("| twin | engine | its fold | compared |")
    print("|---|---|---|---|")
    for name in names:
        twin = (TWINS | SETTINGS)[name]
        found = [row for row in rows if row.twin == name]
        print(f"| `{name}` | {twin.engine} | {twin.fold} | {_compared(found, twin.checked)} |")


def _compared(rows: Sequence[Agreement], checked: str) -> str:
    if not rows:
        return checked
    elements, agreeing = (sum(getattr(row, f) for row in rows) for f in ("elements", "agreeing"))
    ranks = sorted({row.ranks for row in rows})
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
    equal = "all equal" if agreeing == elements else f"{agreeing:,} equal"
    return f"{elements:,} elements, {equal}; {ranks[0]} to {ranks[-1]} ranks; {dtypes}"


def infer(found: Sequence[Match], inputs: NDArray[Any]) -> None:
    """The folds that give the sum, or else the nearest ones."""
    members, elements = inputs.shape
    equal = [f for f in found if f.equal]
    values = f"{members} ranks, {elements:,} elements of {np.dtype(inputs.dtype).name}"
    if equal:
        print(f"{values}: reproduced, bit for bit, by")
        for f in equal:
            print(f"  {f.candidate.name}")
        return
    if found:
        print(f"{values}: no known fold reproduces all of them; the nearest are")
    else:
        print(f"{values}: no known fold reproduces any of them")
    for f in found[:5]:
        share = f.agreeing / max(1, f.elements)
        print(f"  {f.candidate.name}: {f.agreeing:,} of {f.elements:,} elements ({share:.1%})")
    print("Means, wires and levels are not tried.")
