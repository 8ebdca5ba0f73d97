"""The output of `gpusim twin`: tables for the terminal, and the table of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...twins import SETTINGS, TWINS
from ...words import count
from ..tables import print_table
from .checking import Agreement
from .inferring import Match
from .revealing import Revealed
from .run_engines import INSTALLS

__all__ = ["check", "infer", "markdown", "twins"]


def twins(names: Sequence[str]) -> None:
    """All twins, and how each was checked."""
    known = TWINS | SETTINGS
    rows = [[name, known[name].engine, known[name].checked, known[name].fold] for name in names]
    headings = ["twin", "engine", "checked", "fold"]
    print_table("Twins", headings, rows, left=headings)


def check(
    rows: Sequence[Agreement], missing: Sequence[str], revealed: Sequence[Revealed] = ()
) -> None:
    """The comparisons, the differences, and the twins whose engine was not found."""
    lines, breaks = [], set()
    trees = {(row.twin, row.dtype, row.ranks): row for row in revealed}
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
                _revealed(trees.get((row.twin, row.dtype, row.ranks))),
                _verdict(row),
            ]
        )
    headings = ["twin", "engine", "type", "ranks", "sizes", "elements", "agree", "trees", ""]
    left = {"twin", "engine", "type", "trees", ""}
    if lines:
        print_table("Twins and engines", headings, lines, breaks, left)
        print()
    for text in lacking(missing):
        print(text)
    if not rows:
        print("Nothing was compared.")
        return
    agreeing, elements = sum(r.agreeing for r in rows), sum(r.elements for r in rows)
    if revealed:
        known, whole = sum(r.agreeing for r in revealed), sum(r.elements for r in revealed)
        print(
            f"{known:,} of {count(whole, 'element')} have the tree that was revealed of the engine."
        )
    differing = len(
        {row.twin for row in rows if not row.equal} | {r.twin for r in revealed if not r.equal}
    )
    print(
        f"{agreeing:,} of {count(elements, 'element')} agree; {count(differing, 'twin')} "
        f"{'differs' if differing == 1 else 'differ'}."
    )


def lacking(names: Sequence[str]) -> list[str]:
    """The lines about twins that were not compared: which engine each needs, and what installs it.

    >>> lacking(["gloo-ring"])
    ["Not compared, as gloo did not run here: gloo-ring (pip install 'gpusim[torch]')"]
    """
    known = TWINS | SETTINGS
    lines = []
    for worker in dict.fromkeys(known[name].worker for name in names):
        those = ", ".join(name for name in names if known[name].worker == worker)
        if worker:
            lines.append(
                f"Not compared, as {worker} did not run here: {those} ({INSTALLS[worker]})"
            )
        else:
            lines.append(f"Not compared, as this command starts no engine for them: {those}")
    return lines


def _verdict(row: Agreement) -> str:
    if not row.alike:
        return "the ranks' results differ"
    return "" if row.equal else f"differs, {_at(row.worst)}"


def _at(size: int | None) -> str:
    """The size of a sum that differs, where one does."""
    return "" if size is None else f"at {count(size, 'element')}"


def _revealed(row: Revealed | None) -> str:
    """The engine's trees, and where they differ from the twin's."""
    if row is None:
        return "not revealed"
    trees = count(row.trees, "tree")
    if row.equal:
        return f"all, {trees}"
    return f"{row.agreeing:,} of {row.elements:,}, {trees}; others {_at(row.worst)}"


def _share(part: int, whole: int) -> str:
    """The number of agreeing elements, or "all"."""
    if part == whole:
        return "all"
    return f"{part:,}"


def markdown(
    rows: Sequence[Agreement], names: Sequence[str], revealed: Sequence[Revealed] = ()
) -> None:
    """A line for each twin: its engine, its fold, and the comparisons of this run."""
    print("| twin | engine | its fold | compared |")
    print("|---|---|---|---|")
    for name in names:
        twin = (TWINS | SETTINGS)[name]
        found = [row for row in rows if row.twin == name]
        compared = _compared(found, twin.checked)
        trees = [row for row in revealed if row.twin == name]
        if trees:
            equal = "all equal" if all(row.equal for row in trees) else "not all equal"
            compared += f"; trees of {sum(row.elements for row in trees):,} revealed, {equal}"
        print(f"| `{name}` | {twin.engine} | {twin.fold} | {compared} |")


def _compared(rows: Sequence[Agreement], checked: str) -> str:
    if not rows:
        return checked
    elements, agreeing = (sum(getattr(row, f) for row in rows) for f in ("elements", "agreeing"))
    ranks = sorted({row.ranks for row in rows})
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
    equal = "all equal" if agreeing == elements else f"{agreeing:,} equal"
    sizes = f"{ranks[0]} to {ranks[-1]} ranks" if len(ranks) > 1 else count(ranks[0], "rank")
    return f"{count(elements, 'element')}, {equal}; {sizes}; {dtypes}"


def infer(found: Sequence[Match], inputs: NDArray[Any]) -> None:
    """The folds that give the sum, or else the nearest ones."""
    members, elements = inputs.shape
    equal = [f for f in found if f.equal]
    size = f"{count(members, 'rank')}, {count(elements, 'element')}"
    values = f"{size} of {np.dtype(inputs.dtype).name}"
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
        print(
            f"  {f.candidate.name}: {f.agreeing:,} of {count(f.elements, 'element')} ({share:.1%})"
        )
    print("Means, wires and levels are not tried.")
