"""A comparison in words, as a table, as a picture and as a page."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpusim import figures
from gpusim.tools.compare.comparing import Comparison, Row, Verdict, describe
from gpusim.tools.compare.difference import Difference
from gpusim.tools.compare.runs import Call
from gpusim.tools.page import html_table, image, write_page
from gpusim.tools.tables import Cells, print_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["cells", "drawn", "print_text", "sentences", "write"]

SHOWN, ON_PAGE = 20, 300
"""Rows of the table on a terminal, and on a page."""
NAMED = 4
"""Folds that are named."""
HEADINGS = [
    "call",
    "operation",
    "place",
    "operands",
    "results",
    "elements",
    "max ulp",
    "median ulp",
    "norm",
]
TEXT = HEADINGS[1:5]

WORDS = {
    "dtypes": "dtypes",
    "shapes": "shapes",
    "splits": "split sizes",
    "buckets": "the cut of the same elements into calls",
    "op": "the operator",
    "operation": "the operation",
    "group": "the group",
}
GROWTH = """The difference of the results, call by call: how many elements differ in their bits,
by how many units in the last place (ulp), and the 2-norm of the difference divided by that of a.
NaN is in no ulp. Numbers of ranks stand under operands and results where these differ."""


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
        different = "" if a.ranks == b.ranks else f" ({a.ranks} and {b.ranks} ranks)"
        same = sum(row.results is not None for row in comparison.rows)
        calls = "1 call has" if same == 1 else f"{same:,} calls have"
        return [f"The runs are equal: {calls} the same bits{different}.", *cut]
    return [*_verdict(found, comparison), *_numbers(found), *cut]


def _verdict(found: Verdict, comparison: Comparison) -> list[str]:
    one, other = found.a, found.b
    if one is None or other is None:
        call = one or other
        assert call is not None
        has, lacks = ("a", "b") if other is None else ("b", "a")
        near = found.before_b if other is None else found.before_a
        after = f", after {describe(near)} at {place(near)}" if near is not None else ""
        if found.kind == "end":
            next_call = f"{describe(call)} at {place(call)}"
            text = [f"Run {lacks} ends{after}. Run {has} goes on with {next_call}."]
        else:
            text = [
                f"Run {lacks} lacks a call: {has} calls {describe(call)} at {place(call)}; "
                f"{lacks} does not{after}."
            ]
        return text + ([f"A run ended with {found.error}"] if found.error else [])
    where = f"{describe(one)} at {place(one)}"
    if shorten(one.site) != shorten(other.site):
        where += f"; in b at {place(other)}"
    if found.kind == "other":
        names = ", ".join(WORDS.get(name, f"the {name}") for name in found.differs)
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
        return text + ([f"A run ended with {found.error}"] if found.error else [])
    ranks = _ranks(found.ranks, comparison)
    if found.kind == "collective":
        text = [f"The cause is {where}: its operands are equal and its results differ on {ranks}."]
        for name in ("a", "b"):
            text += _fold(name, found)
        return text
    if found.kind == "results":
        return [f"The first results that differ are those of {where}."]
    text = [f"The cause lies before {where}: its operands differ on {ranks}."]
    if found.before_a is not None and found.before_b is not None:
        text.append(
            f"All that rank {one.rank} called before is equal. The cause lies between "
            f"{describe(found.before_a)} at {place(found.before_a)} and this call."
        )
    else:
        text.append(f"It is the first call of rank {one.rank}: the cause lies before all calls.")
    return text


def _ranks(ranks: Sequence[int], comparison: Comparison) -> str:
    if len(ranks) == comparison.a.ranks:
        return f"all {len(ranks)} ranks" if len(ranks) > 1 else "the rank"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown} of {comparison.a.ranks}"


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


def _numbers(found: Verdict) -> list[str]:
    difference = found.difference
    if difference is None:
        return []
    what = "operands" if found.kind == "operands" else "results"
    text = f"{difference.differing:,} of {difference.elements:,} elements of the {what} differ"
    if difference.max_ulp is not None:
        text += f", by at most {difference.max_ulp:,} ulp (median {difference.median_ulp:,.4g})"
    return [f"{text}; relative norm {difference.relative_norm:.2g}."]


def cells(rows: Sequence[Row], shown: int) -> Cells:
    """The rows of the table: the last equal one, and those from the first difference on.

    If there are more than `shown`, those between are left out at equal distances.
    """
    different = [k for k, row in enumerate(rows) if is_different(row)]
    if not different:
        return []
    chosen = list(range(max(0, different[0] - 1), len(rows)))
    if len(chosen) > shown:
        kept = [chosen[0], chosen[1]]
        step = (len(chosen) - 3) / (shown - 3)
        kept += [chosen[2 + round(k * step)] for k in range(shown - 2)]
        chosen = sorted(set(kept))
    return [_cells(k, rows[k]) for k in chosen]


def is_different(row: Row) -> bool:
    """Whether anything in a row differs."""
    return row.a is None or row.b is None or bool(row.operands) or bool(row.results)


def _cells(number: int, row: Row) -> list[str]:
    if row.a is None or row.b is None:
        site, states = (
            row.place_a or row.place_b,
            ["only in a" if row.b is None else "only in b", ""],
        )
    else:
        site = row.place_a
        states = [
            "not compared" if count is None else _differing(count) if count else "equal"
            for count in (row.operands, row.results)
        ]
    return [str(number), row.operation, shorten(site), *states, *_figures(row.difference)]


def _differing(count: int) -> str:
    return "1 rank differs" if count == 1 else f"{count} ranks differ"


def _figures(difference: Difference | None) -> list[str]:
    if difference is None:
        return [""] * 4
    ulps = [difference.max_ulp, difference.median_ulp]
    return [
        f"{difference.differing:,} / {difference.elements:,}",
        *(
            "" if each is None else f"{each:,.4g}" if isinstance(each, float) else f"{each:,}"
            for each in ulps
        ),
        f"{difference.relative_norm:.2g}",
    ]


def print_text(comparison: Comparison) -> None:
    """Print the answer, and the table if the runs differ."""
    for sentence in sentences(comparison):
        print(sentence)
    rows = cells(comparison.rows, SHOWN)
    if rows:
        print()
        print_table(
            f"Calls of a ({comparison.a.path}) and b ({comparison.b.path})",
            HEADINGS,
            rows,
            left=TEXT,
        )


@contextmanager
def drawn(comparison: Comparison) -> Iterator[Figure]:
    """The difference of the results by call: a mark for each call, while matplotlib has its style.

    Calls whose results are equal, or not compared, are marks below the axis, as are those that
    differ by an unknown amount.
    """
    with figures.styled():
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(6.5, 2.8), layout="constrained")
        axes = figure.subplots()
        marks: dict[str, tuple[list[int], list[float]]] = {
            "differs": ([], []), "equal": ([], []), "differs, amount not known": ([], [])
        }  # fmt: skip
        for k, row in enumerate(comparison.rows):
            if row.difference is not None and 0 < row.difference.relative_norm < float("inf"):
                label, value = "differs", row.difference.relative_norm
            else:
                unknown = row.a is None or row.b is None or row.results
                label = "differs, amount not known" if unknown else "equal"
                value = -0.04 if label == "equal" else -0.08
            marks[label][0].append(k)
            marks[label][1].append(value)
        styles: dict[str, Any] = {
            "differs": {"color": figures.COLOURS[1], "marker": "o"},
            "equal": {"color": figures.COLOURS[2], "marker": "|"},
            "differs, amount not known": {"color": figures.COLOURS[1], "marker": "|"},
        }
        for label, (x, y) in marks.items():
            if x:
                if label != "differs":
                    styles[label]["transform"] = axes.get_xaxis_transform()
                axes.plot(x, y, linestyle="", label=label, clip_on=False, **styles[label])
        if marks["differs"][0]:
            axes.set_yscale("log")
            decades = np.log10([min(marks["differs"][1]), max(marks["differs"][1])])
            axes.set_ylim(10.0 ** np.floor(decades[0]), 10.0 ** (np.floor(decades[1]) + 1))
        else:
            axes.set_yticks([])
        axes.tick_params(axis="x", pad=14)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(-0.5, max(len(comparison.rows), 1) - 0.5)
        axes.set_xlabel("call")
        axes.set_ylabel("relative norm")
        axes.set_title("Difference of the results")
        axes.grid(True, axis="y")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        yield figure


def write(comparison: Comparison, path: Path) -> Path:
    """Write the page into `path`; returns it."""
    first, *rest = sentences(comparison)
    parts = [f"<p><strong>{escape(first)}</strong></p>"]
    if rest:
        parts += ["<ul>", *(f"<li>{escape(sentence)}</li>" for sentence in rest), "</ul>"]
    with drawn(comparison) as figure:
        parts.append(image(figure, "relative norm of the difference of the results, by call"))
    rows = cells(comparison.rows, ON_PAGE)
    if rows:
        parts += [
            "<h2>Call by call</h2>",
            f"<p>{GROWTH}</p>",
            html_table(HEADINGS, rows, left=TEXT[:2]),
        ]
    parts.append("<h2>Runs</h2>")
    runs = [
        [
            name,
            str(run.path),
            str(run.ranks),
            f"{len(run.events):,}",
            run.error or ("" if run.ended else "killed"),
        ]
        for name, run in (("a", comparison.a), ("b", comparison.b))
    ]
    headings = ["run", "record", "ranks", "events", "end"]
    parts.append(html_table(headings, runs, left=["run", "record", "end"]))
    return write_page("Where two runs differ", parts, path)
