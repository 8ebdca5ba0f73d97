"""A comparison of two programs in words, as JSON and as a page."""

from __future__ import annotations

import os
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from gpusim.tools.page import html_table, write_page
from gpusim.tools.tables import Cells
from gpusim.words import count

from .comparing import Comparison
from .items import Item
from .reasons import Finding, explain

__all__ = ["record", "sentences", "write"]

SHOWN, ON_PAGE = 6, 400
WHAT = {"weight gradient, clipped": "weight gradient", "bits": "random bits"}


def record(found: Comparison) -> dict[str, Any]:
    """The comparison as JSON has it; see docs/equal.md."""
    finding = explain(found)
    result: dict[str, Any] = {
        "equal": None if found.failure else found.equal,
        "failure": found.failure or None,
        "ranks": found.candidate.ranks,
        "reference_ranks": found.reference.ranks,
        "tensors": len(found.compared),
        "related": len(found.related),
        "relations": dict(relations(found)),
        "first": None,
        "before": [_short(item) for item in found.before()],
        "unrelated": [_short(item) for item in found.unrelated],
        "claims": [_short(item) for item in found.claims],
        "not_compared": {why: sorted(names) for why, names in sorted(found.skipped.items())},
        "said": [*found.said, *notes(found)],
    }
    if found.first is not None and finding is not None:
        result["first"] = {
            **_short(found.first),
            "ranks_right": list(finding.right),
            "error": finding.error if finding.error == finding.error else None,
            "reason": finding.reason,
            "text": finding.text,
            "module": finding.module[0],
            "site": finding.module[1],
            "last_collective": finding.call,
        }
    return result


def _short(item: Item) -> dict[str, Any]:
    return {
        "what": WHAT.get(item.kind, item.kind),
        "name": item.name or item.root,
        "leaf": item.leaf,
        "step": item.step,
        "relation": None if item.relation is None else str(item.relation),
    }


def relations(found: Comparison) -> list[tuple[str, int]]:
    """How often each relation occurs, the most frequent first."""
    counts = Counter(
        "all equal" if item.relation and item.relation.trivial else str(item.relation)
        for item in found.related
    )
    return counts.most_common()


def notes(found: Comparison) -> list[str]:
    """The changes that tracers made to the programs, and the dtypes that stayed narrow."""
    said: dict[str, None] = {}
    for trace in (found.reference, found.candidate):
        for own in trace.ends("notes"):
            said |= dict.fromkeys(own or {})
    narrow: dict[str, str] = {}
    for trace in (found.reference, found.candidate):
        for own in trace.ends("narrow"):
            narrow |= own or {}
    said |= dict.fromkeys(f"{name} stayed: first in the {at}" for name, at in narrow.items())
    left = sum(own.get("left_out", 0) for own in _ends(found))
    if left:
        said[f"{count(left, 'tensor')} were left out: --trace-limit is reached"] = None
    return list(said)


def _ends(found: Comparison) -> list[dict[str, Any]]:
    return [own.end for trace in (found.reference, found.candidate) for own in trace.by_rank]


def sentences(found: Comparison) -> list[str]:
    """The result in lines; the first one is the answer."""
    lines = []
    finding = explain(found)
    if found.failure:
        lines.append(f"NO ANSWER: {found.failure}")
    elif found.first is None or finding is None:
        lines.append(
            f"EQUAL: the program on {count(found.candidate.ranks, 'rank')} computes what the "
            "reference "
            f"computes: {len(found.related):,} of {count(len(found.compared), 'tensor')} are "
            "related."
        )
    else:
        lines += different(found, found.first, finding)
    counts = relations(found)
    shown = [f"{text} {count:,}" for text, count in counts[:SHOWN]]
    if shown:
        rest = f"; {len(counts) - SHOWN} more" if len(counts) > SHOWN else ""
        lines.append(f"  relations: {'; '.join(shown)}{rest}")
    inner = [item for item in found.unrelated if found.equal]
    if inner:
        lines.append(
            f"  {count(len(inner), 'tensor')} inside of modules are related to none, without "
            "effect: "
            f"first the {inner[0].label}"
        )
    if found.claims:
        claim = found.claims[0]
        lines.append(
            f"  {len(found.claims)} DTensors are not what their placements say: first the "
            f"{claim.label}, which is {claim.relation}"
        )
    for why, names in sorted(found.skipped.items()):
        shown = sorted(names)
        more = f" and {len(shown) - 2} more" if len(shown) > 2 else ""
        lines.append(f"  not compared, {why}: {', '.join(shown[:2])}{more}")
    lines += [f"  {text}" for text in (*found.said, *notes(found))]
    return lines


def different(found: Comparison, item: Item, finding: Finding) -> list[str]:
    """The verdict on the first tensor without a relation."""
    many = len(item.ranks)
    right = ", ".join(map(str, finding.right)) or "none"
    error = f"; error {finding.error:.1e} of its largest element" if finding.error > 0 else ""
    lines = [
        f"DIFFERENT: the first tensor that is not the reference's is the {item.label}.",
        f"  reason: {finding.reason}: {finding.text}"
        if not finding.text.startswith(finding.reason)
        else f"  reason: {finding.text}",
        f"  right on ranks: {right} of {many}{error}",
    ]
    kind, site = finding.module
    if kind:
        lines.append(f"  module: {kind}{f' at {shorten(site)}' if site else ''}")
    if finding.call:
        lines.append(f"  last collective before it: {shorten(finding.call)}")
    before = found.before()
    if before:
        lines.append("  related before it:")
        lines += [f"    {each.label}: {each.relation}" for each in before]
    lines.append(
        f"  {len(found.related):,} of {count(len(found.compared), 'tensor')} are related; "
        f"{len(found.unrelated):,} are not"
    )
    return lines


def shorten(text: str) -> str:
    """A text with call sites relative to the current folder."""
    return text.replace(os.getcwd() + os.sep, "")


def write(found: Comparison, path: Path) -> None:
    """Write the page."""
    first, *rest = sentences(found)
    parts = [f"<p><strong>{escape(first)}</strong></p>", f"<pre>{escape(chr(10).join(rest))}</pre>"]
    parts += [
        "<h2>Tensors in the order of computation</h2>",
        "<p>R: all ranks have the same. S(d): each has a piece in dimension d. P: parts that add "
        "up. A number behind 'over' is that of the ranks in each group.</p>",
        html_table(
            ["order", "step", "what", "name", "relation", "ranks"],
            rows(found),
            left=("what", "name", "relation", "ranks"),
        ),
    ]
    title = "Equal" if found.equal else "No answer" if found.failure else "Different"
    write_page(f"gpusim equal: {title}", parts, path)


def rows(found: Comparison) -> Cells:
    """The rows of the page's table: all, or those round the first without a relation."""
    items = found.compared
    at = items.index(found.first) if found.first in items else 0
    low = max(0, min(at - ON_PAGE // 2, len(items) - ON_PAGE))
    cells = []
    for n, item in enumerate(items[low : low + ON_PAGE], low + 1):
        relation = "all equal" if item.relation and item.relation.trivial else str(item.relation)
        if item is found.first:
            relation = f"FIRST WITHOUT A RELATION {item.problem}".rstrip()
        elif item.relation is None:
            relation = "none"
        cells.append(
            [
                str(n),
                str(item.step),
                WHAT.get(item.kind, item.kind),
                f"{item.name or item.root}{item.leaf if item.kind != 'bits' else ''}",
                relation,
                ", ".join(map(str, item.ranks)),
            ]
        )
    return cells
