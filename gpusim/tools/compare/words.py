"""A comparison in sentences."""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpusim.tools.compare.cause_words import words_of
from gpusim.tools.compare.chains import Interval
from gpusim.tools.compare.comparing import Comparison, Verdict
from gpusim.tools.compare.pairing import describe
from gpusim.tools.compare.rows import classes_of
from gpusim.tools.compare.runs import Call
from gpusim.words import count, every, listed, named

__all__ = ["sentences", "shorten"]

NAMED = 4
"""Folds that are named."""

TERMS = {
    "dtypes": "dtypes",
    "shapes": "shapes",
    "splits": "split sizes",
    "buckets": "the cut of the same elements into calls",
    "op": "the operator",
    "operation": "the operation",
    "group": "the group",
}
ROWS = {
    "rounding": "different by rounding alone",
    "untold": "by no more than coarse rounding may, which tells nothing",
    "factor": "by a constant factor",
    "larger": "by more than rounding",
    "carried": "with operands that differ already",
    "differs": "by an amount that is not known",
    "only": "in one run only",
    "other": "other calls",
    "unknown": "not compared",
}
"""Classes of rows in words, in the order in which they are counted."""


def place(call: Call) -> str:
    """Where a call is: train.py:7 (call 3 of rank 0)."""
    return f"{shorten(call.site)} (call {call.sequence} of rank {call.rank})"


def shorten(site: str) -> str:
    """A call site relative to the current folder."""
    return site.removeprefix(os.getcwd() + os.sep)


def sentences(comparison: Comparison) -> list[str]:
    """The result of the comparison, in sentences; the first one is the answer."""
    found, a, b = comparison.verdict, comparison.a, comparison.b
    cut = [
        f"The record of {name} has no end: its last calls may lack results."
        for name, run in (("a", a), ("b", b))
        if not run.ended
    ]
    if found is None:
        cut += [
            f"Run {name} ended with {run.error}" for name, run in (("a", a), ("b", b)) if run.error
        ]
        different = "" if a.ranks == b.ranks else f" ({a.ranks} and {count(b.ranks, 'rank')})"
        same = sum(row.results is not None for row in comparison.rows)
        calls = "1 call has" if same == 1 else f"{same:,} calls have"
        return [f"The runs are equal: {calls} the same bits{different}.", *cut]
    told = _verdict(found, comparison)
    told += words_of(found.cause, (a.ranks, b.ranks))
    if a.ranks != b.ranks:
        told += _across(comparison)
    ended = [f"A run ended with {found.error}"] if found.error else []
    return [*told, *_numbers(found), *ended, *cut]


# ---------------------------------------------------------------- the place


def _verdict(found: Verdict, comparison: Comparison) -> list[str]:
    one, other = found.a, found.b
    if one is None or other is None:
        return _lacking(found)
    where = f"{describe(one)} at {place(one)}"
    if os.path.basename(one.site) != os.path.basename(other.site):
        where += f"; in b at {place(other)}"
    if found.kind == "other":
        return [*_other(found, one, other), *_interval(found.interval)]
    ranks = _ranks(found.ranks, comparison)
    if found.kind == "collective":
        text = [f"The cause is {where}: its operands are equal and its results differ on {ranks}."]
        for name in ("a", "b"):
            text += _fold(name, found)
        return text
    if found.kind == "results":
        more = " by more than rounding or a factor" if comparison.first_larger is not None else ""
        return [f"The first results that differ{more} are those of {where}."]
    text = [f"The cause lies at or before {where}: its operands differ on {ranks}."]
    return text + _interval(found.interval)


def _lacking(found: Verdict) -> list[str]:
    call = found.a or found.b
    assert call is not None
    has, lacks = ("a", "b") if found.b is None else ("b", "a")
    near = found.previous_b if found.b is None else found.previous_a
    after = f" after {describe(near)} at {place(near)}" if near is not None else ""
    if found.kind == "end":
        next_call = f"{describe(call)} at {place(call)}"
        return [f"Run {lacks} ends{after}. Run {has} goes on with {next_call}."]
    begin = f"Run {lacks} lacks a call"
    if "order" in found.cause.about:
        begin = "The runs make calls in another order"
    text = f"{begin}: {has} calls {describe(call)} at {place(call)}"
    if near is not None:
        text += f", and {lacks} goes on{after} without it"
    return [f"{text}.", f"The cause lies at or before this call of {has}."]


def _other(found: Verdict, one: Call, other: Call) -> list[str]:
    names = ", ".join(TERMS.get(name, f"the {name}") for name in found.differs)
    text = [
        f"The runs make different calls: a {describe(one)} at {place(one)}, b "
        f"{describe(other)} at {place(other)}.",
        f"They differ in {names}.",
    ]
    for name in ("send_counts", "receive_counts"):
        sides = getattr(one, name), getattr(other, name)
        if "splits" in found.differs and sides[0] != sides[1]:
            what = "sends" if name == "send_counts" else "receives"
            text.append(f"Rank {one.rank} {what} {sides[0]} elements in a, {sides[1]} in b.")
    return text


def _interval(interval: Interval) -> list[str]:
    """The lower bound in words, or the nearest equal call, which is none."""
    if interval.kind == "until" and "a" in interval.equal:
        near = interval.equal["a"]
        return [f"The call of this place before it, {place(near)}, is equal."]
    if interval.kind != "turn":
        return []
    after, until = interval.after["a"], interval.until["a"]
    return [
        f"The same call a turn of the loop or more before, {place(after)}, is equal. If a turn "
        f"makes this call once, the cause takes effect between call {after.sequence} and call "
        f"{until.sequence}: on a line that runs there, or by a value that is set before and first "
        "used there, such as a learning rate.",
    ]


def _ranks(ranks: Sequence[int], comparison: Comparison) -> str:
    if len(ranks) == comparison.a.ranks:
        return every(len(ranks), "rank")
    return f"{named('rank', ranks)} of {comparison.a.ranks}"


def _fold(name: str, found: Verdict) -> list[str]:
    recorded = found.reductions.get(name)
    stated = ""
    if recorded:
        stated = f" Its record says {recorded}."
    names = found.folds.get(name)
    if names is None:
        return [f"{name}:{stated.replace('Its', 'its', 1)}"] if stated else []
    if not names:
        return [f"{name}: no known fold gives this result; wires and levels are not tried.{stated}"]
    rest = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return [f"{name}: added as {', '.join(names[:NAMED])}{rest}.{stated}"]


# ---------------------------------------------------------------- figures


def _numbers(found: Verdict) -> list[str]:
    difference = found.difference
    if difference is None:
        return []
    what = "operands" if found.kind == "operands" else "results"
    text = f"{difference.differing:,} of {difference.elements:,} elements of the {what} differ"
    small = found.kind == "collective" or found.cause.name == "rounding"
    if difference.max_ulp is not None and small:
        text += f", by at most {difference.max_ulp:,} ulp (median {difference.median_ulp:,.4g})"
    return [f"{text}; relative norm {difference.relative_norm:.2g}."]


def _across(comparison: Comparison) -> list[str]:
    """The classes of all rows, of runs of different numbers of ranks."""
    rows, classes = comparison.rows, classes_of(comparison.rows)
    same = classes.get("equal", 0)
    parts = [f"{count(same, 'call')} {'is' if same == 1 else 'are'} equal"]
    factors = sorted({row.factor[1] for row in rows if row.factor is not None})
    for name, text in ROWS.items():
        if name in classes:
            more = f" ({', '.join(factors[:4])})" if name == "factor" else ""
            parts.append(f"{classes[name]:,} {text}{more}")
    told = [f"Of the {count(len(rows), 'call')}, {listed(parts)}."]
    if comparison.first_larger is None and not {"differs", "untold"} & classes.keys():
        told.append("None differs otherwise: these are last bits, and sums over other ranks.")
    return told
