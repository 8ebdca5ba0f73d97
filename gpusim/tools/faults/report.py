"""The report of a campaign: a table of kinds and verdicts, the worst plans, JSON and a page."""

from __future__ import annotations

import shlex
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from gpusim.tools.page import html_table, write_page
from gpusim.tools.tables import Cells, print_table
from gpusim.torch.distributed.faults.plans import KINDS, plan_text

from .campaign import Campaign, Judged
from .verdicts import BAD, VERDICTS

__all__ = ["again", "as_json", "show", "table", "write"]

MOST_WORST = 5
"""How many bad plans of each verdict the text names."""

MOST_PLACES = 12
"""How many places of the program the text names."""

SEVERAL = "several"
HEADINGS = ["fault", *VERDICTS, "plans"]
WIDTH = 100


def table(found: Campaign) -> tuple[list[str], Cells]:
    """Verdicts by kind of fault: headings, and rows whose last one has the sums."""
    counts: dict[str, Counter[str]] = {}
    for each in found.judged:
        kind = each.plan[0].kind if len(each.plan) == 1 else SEVERAL
        counts.setdefault(kind, Counter())[each.verdict.name] += 1
    order = [kind for kind in (*KINDS, SEVERAL) if kind in counts]
    rows = [_row(kind, counts[kind]) for kind in order]
    if len(rows) > 1:
        rows.append(_row("all", sum(counts.values(), Counter())))
    return HEADINGS, rows


def _row(name: str, counts: Counter[str]) -> list[str]:
    return [name, *(str(counts[each] or "") for each in VERDICTS), str(sum(counts.values()))]


def places(found: Campaign) -> tuple[list[str], Cells]:
    """Verdicts by the place in the program where the first fault happened."""
    counts: dict[str, Counter[str]] = {}
    for each in found.judged:
        if each.site:
            counts.setdefault(each.site, Counter())[each.verdict.name] += 1
    ordered = sorted(counts.items(), key=lambda each: (_badness(each[1]), each[0]))
    shown = [each for each in VERDICTS if any(own[each] for own in counts.values())]
    rows = [
        [name, *(str(own[each] or "") for each in shown), str(sum(own.values()))]
        for name, own in ordered
    ]
    return ["place", *shown, "plans"], rows


def _badness(counts: Counter[str]) -> int:
    return -sum(counts[name] for name in BAD)


def again(command: str, judged: Judged) -> str:
    """The command that repeats a plan's verdict.

    **Arguments**: `command` has {plan} where the plan is to stand.
    """
    return command.replace("{plan}", shlex.quote(plan_text(judged.plan)))


def show(found: Campaign, title: str, command: str) -> None:
    """Print the report."""
    headings, rows = table(found)
    print_table(title, headings, rows, {len(rows) - 1} if len(rows) > 1 else (), ("fault",))
    headings, rows = places(found)
    if rows:
        print()
        print_table("Where the fault was", headings, rows[:MOST_PLACES], (), ("place",))
        if len(rows) > MOST_PLACES:
            more = len(rows) - MOST_PLACES
            print(f"and {more} place{'s' * (more > 1)} more")
    for text in sentences(found, command):
        print()
        print(text)


def sentences(found: Campaign, command: str) -> list[str]:
    """All that the report says beside the tables, in paragraphs."""
    texts = []
    for name in VERDICTS:
        bad = [each for each in found.worst if each.verdict.name == name]
        if bad:
            lines = [f"{name}:"]
            lines += [f"  {plan_text(e.plan)}: {e.verdict.why}" for e in bad[:MOST_WORST]]
            if len(bad) > MOST_WORST:
                lines.append(f"  and {len(bad) - MOST_WORST} more")
            texts.append("\n".join(lines))
    if found.smallest is not None:
        one = found.smallest
        texts.append(
            f"The smallest found that is {one.verdict.name}: {plan_text(one.plan)}\n"
            f"  {one.verdict.why}\n  {again(command, one)}"
        )
    if found.reference.changing:
        changing = found.reference.changing
        shown = ", ".join(changing[:MOST_WORST])
        more = f" and {len(changing) - MOST_WORST} more" if len(changing) > MOST_WORST else ""
        texts.append(f"Not compared, as two runs without faults differ in it: {shown}{more}")
    if not found.reference.observation.bits:
        texts.append(
            "Weights are not compared, as no rank has an optimizer of torch.optim; last lines and "
            "files are"
        )
    if not found.worst:
        texts.append("No plan ends silently different, hung or without a name")
    return texts


def as_json(found: Campaign, settings: str, command: str) -> dict[str, Any]:
    """The report for programs."""
    usual = found.reference.observation
    made: dict[str, Any] = {
        "settings": settings,
        "ranks": found.ranks,
        "verdicts": dict(Counter(each.verdict.name for each in found.judged)),
        "plans": [_one(each) for each in found.judged],
        "smallest": None,
        "not_compared": list(found.reference.changing),
        "calls": [len(each.calls) for each in usual.seen],
        "writes": [len(each.writes) for each in usual.seen],
        "waits": [len(each.waits) for each in usual.seen],
        "seconds": round(found.seconds, 3),
        "processor_seconds": round(found.processor, 3),
    }
    if found.smallest is not None:
        made["smallest"] = {**_one(found.smallest), "command": again(command, found.smallest)}
    return made


def _one(each: Judged) -> dict[str, Any]:
    name, why = each.verdict
    own = {"plan": plan_text(each.plan), "verdict": name, "why": why}
    return {**own, "site": each.site, "starts": each.attempts}


def write(found: Campaign, title: str, command: str, path: Path) -> Path:
    """Write the report as a page, with all bad plans."""
    headings, rows = table(found)
    parts = [html_table(headings, rows, {len(rows) - 1} if len(rows) > 1 else (), ("fault",))]
    headings, rows = places(found)
    if rows:
        parts += ["<h2>Where the fault was</h2>", html_table(headings, rows, (), ("place",))]
    if found.worst:
        rows = [[e.verdict.name, plan_text(e.plan), e.verdict.why] for e in found.worst]
        columns = ["verdict", "plan", "why"]
        parts += ["<h2>Bad plans</h2>", html_table(columns, rows, (), columns)]
    if found.smallest is not None:
        parts += [
            "<h2>The smallest</h2>",
            f"<p>{escape(found.smallest.verdict.why)}</p>",
            f"<pre>{escape(again(command, found.smallest))}</pre>",
        ]
    return write_page(title, parts, path)
