"""A comparison as a table, as a picture and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpusim import figures
from gpusim.tools.compare.comparing import Comparison
from gpusim.tools.compare.rows import Row
from gpusim.tools.compare.words import sentences, shorten
from gpusim.tools.page import html_table, image, write_page
from gpusim.tools.tables import Cells, print_table
from gpusim.words import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["cells", "drawn", "print_text", "sentences", "write"]

SHOWN, ON_PAGE = 20, 300
"""Rows of the table on a terminal, and on a page."""
HEADINGS = [
    "call",
    "operation",
    "place",
    "operands",
    "results",
    "difference",
    "elements",
    "max ulp",
    "median ulp",
    "norm",
]
TEXT = HEADINGS[1:6]

GROWTH = """The difference of the results, call by call: its kind, how many elements differ in their
bits, by how many units in the last place (ulp), and the 2-norm of the difference divided by that of
a. NaN is in no ulp. Numbers of ranks stand under operands and results where these differ."""
KINDS = """Kinds: "rounding" is no more than sums of these dtypes and numbers of terms differ by;
"untold" is within such a bound too, which is so large that it tells nothing; "factor" is a
constant; "carried" has operands that differ before the call; "larger" is more than
rounding; "other" is another call."""


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
    return row.kind not in ("equal", "unknown")


def _cells(number: int, row: Row) -> list[str]:
    if row.a is None or row.b is None:
        site, states = (
            row.place_a or row.place_b,
            ["only in a" if row.b is None else "only in b", ""],
        )
    else:
        site = row.place_a
        alone = row.operands is None  # runs of other numbers of ranks: one result stands for all
        states = [
            "not compared"
            if ranks is None
            else "equal"
            if not ranks
            else "differ"
            if alone
            else _differing(ranks)
            for ranks in (row.operands, row.results)
        ]
    return [str(number), row.operation, shorten(site), *states, _kind(row), *_figures(row)]


def _differing(ranks: int) -> str:
    return f"{count(ranks, 'rank')} {'differs' if ranks == 1 else 'differ'}"


def _kind(row: Row) -> str:
    if row.kind in ("equal", "unknown", "only"):
        return ""
    return f"factor {row.factor[1]}" if row.factor is not None else row.kind


def _figures(row: Row) -> list[str]:
    """Elements, ulps and norm; ulps of last bits alone, as they say nothing of others."""
    difference = row.difference
    if difference is None:
        return [""] * 4
    ulps = [difference.max_ulp, difference.median_ulp] if row.kind == "rounding" else [None, None]
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
    parts = [_runs(comparison), f"<p><strong>{escape(first)}</strong></p>"]
    if rest:
        parts += ["<ul>", *(f"<li>{escape(sentence)}</li>" for sentence in rest), "</ul>"]
    with drawn(comparison) as figure:
        parts.append(image(figure, "relative norm of the difference of the results, by call"))
    rows = cells(comparison.rows, ON_PAGE)
    if rows:
        parts += [
            "<h2>Call by call</h2>",
            f"<p>{escape(GROWTH)}</p>",
            f"<p>{escape(KINDS)}</p>",
            html_table(HEADINGS, rows, left=TEXT[:2]),
        ]
    return write_page("Where two runs differ", parts, path)


def _runs(comparison: Comparison) -> str:
    """Who a and b are: folder, ranks, versions, and when."""
    lines = []
    for name, run in (("a", comparison.a), ("b", comparison.b)):
        about = run.record()
        parts = [count(run.ranks, "rank"), count(len(run.events), "call")]
        parts += [f"{each} {about[each]}" for each in ("gpusim", "torch") if each in about]
        parts += [f"written {about['written']}"] if "written" in about else []
        parts += [run.error or ("complete" if run.ended else "killed before its end")]
        told = escape(f"{run.path}: {', '.join(parts)}")
        lines.append(f'<p class="run"><strong>{name}</strong> {told}</p>')
    return "\n".join(lines)
