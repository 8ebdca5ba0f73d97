"""The table of all pairs, and the first difference of each, for people, as JSON and as a page."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from gpusim.tools.page import html_table, write_page

from .findings import DIFFERENT, REFUSED, SAME, Finding, Pair
from .running import Table

__all__ = ["record", "sentences", "write"]


def sentences(found: Table) -> list[str]:
    """The report as lines.

    >>> from gpusim.tools.resume.running import Plan
    >>> plan = Plan(("train.py",), (), (), (2,), (1, 2))
    >>> finding = Finding("optimizer", "exp_avg of Net.weight", "it is not there", 0, 3)
    >>> pairs = [Pair(2, 1, 3, "different", (finding,)), Pair(2, 2, 3, "same")]
    >>> print("\\n".join(sentences(Table(plan, pairs))))
    1 of 2 pairs: the resumed run is the one that was never interrupted; 1 different
    <BLANKLINE>
    saved on    resumed on 1    2
    2 ranks        DIFFERENT  same
    <BLANKLINE>
    saved on 2, resumed on 1: optimizer: exp_avg of Net.weight, step 3, rank 0: it is not there
    """
    lines = [_headline(found), "", *_table(found)]
    if any(pair.verdict != SAME for pair in found.pairs):
        lines.append("")
    for pair in found.pairs:
        lines += _of_pair(pair)
    lines += [f"note: {text}" for text in found.said]
    return lines


def _headline(found: Table) -> str:
    counts = {
        verdict: sum(pair.verdict == verdict for pair in found.pairs)
        for verdict in (SAME, DIFFERENT, REFUSED)
    }
    text = (
        f"{counts[SAME]} of {len(found.pairs)} pairs: the resumed run is the one that was never "
        "interrupted"
    )
    for verdict in (DIFFERENT, REFUSED):
        if counts[verdict]:
            text += f"; {counts[verdict]} {verdict}"
    return text


def _mark(pair: Pair) -> str:
    return pair.verdict if pair.verdict == SAME else pair.verdict.upper()


def _table(found: Table) -> Iterator[str]:
    loads = found.plan.loads
    by_sizes = {(pair.save, pair.load): _mark(pair) for pair in found.pairs}
    head = ["resumed on " * (n == 0) + str(load) for n, load in enumerate(loads)]
    rows = [("saved on", head)]
    for save in found.plan.saves:
        name = f"{save} rank{'s' * (save > 1)}"
        rows.append((name, [by_sizes.get((save, load), "") for load in loads]))
    left = max(len(name) for name, _ in rows)
    widths = [max(len(cells[n]) for _, cells in rows) for n in range(len(loads))]
    for name, cells in rows:
        shown = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        yield f"{name.ljust(left)}  {shown}".rstrip()


def _of_pair(pair: Pair) -> Iterator[str]:
    start = f"saved on {pair.save}, resumed on {pair.load}: "
    if pair.verdict == REFUSED:
        yield f"{start}refused: {pair.error}"
    if pair.first is not None:
        yield start + _of_finding(pair.first)
        more = list(dict.fromkeys(each.state for each in pair.findings[1:]))
        if more:
            yield f"  other states that differ: {', '.join(more)}"


def _of_finding(finding: Finding) -> str:
    text = f"{finding.state}: {finding.name}"
    text += f", step {finding.step}" if finding.step is not None else ""
    text += f", rank {finding.rank}" if finding.rank is not None else ""
    text += f": {finding.text}"
    return f"{text}; loaded at {shown(finding.site)}" if finding.site else text


def shown(site: str) -> str:
    """A file:line, by the path from the working directory if the file is below it."""
    below = os.path.relpath(site) if site else ""
    return site if below.startswith("..") else below


def record(found: Table) -> dict[str, Any]:
    """The report as JSON has it; see docs/resume.md."""
    pairs = []
    for pair in found.pairs:
        own = pair.as_json()
        for finding in [own["first"], *own["findings"]]:
            if finding is not None and finding["file"]:
                finding["file"] = shown(finding["file"])
        pairs.append(own)
    return {
        "same": found.is_same,
        "script": list(found.plan.words),
        "save_ranks": list(found.plan.saves),
        "load_ranks": list(found.plan.loads),
        "pairs": pairs,
        "said": found.said,
    }


def write(found: Table, page: Path) -> None:
    """Write the report as an HTML page. **Raises**: OSError if it cannot be written."""
    rows = [
        [
            str(pair.save),
            str(pair.load),
            str(pair.step),
            _mark(pair),
            pair.error or "; ".join(_of_finding(each) for each in pair.findings),
        ]
        for pair in found.pairs
    ]
    parts = [
        f"<p><strong>{escape(_headline(found))}</strong></p>",
        f"<pre>{escape(chr(10).join(_table(found)))}</pre>",
        html_table(
            ["saved on", "resumed on", "after step", "verdict", "states that differ"],
            rows,
            left=("verdict", "states that differ"),
        ),
        *(f"<p>{escape(text)}</p>" for text in found.said),
    ]
    write_page(f"gpusim resume: {'Same' if found.is_same else 'Different'}", parts, page)
