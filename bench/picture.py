"""A picture of a run: time over the memory's limit, by participant, collective and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from bench.cases import size_name
from bench.results import LIMIT, OURS, Outcome, Results
from bench.table import factor
from gpusim import figures
from gpusim.optional import require

#: By participant: its label, the marker, and the number of its colour. gpusim is drawn on top.
MARKERS = {
    "JAX shard_map": ("JAX shard_map", "s", 1),
    "JAX vmap": ("JAX vmap", "D", 4),
    "LocalTensor": ("torch LocalTensor", "^", 3),
    "MPI 2": ("MPI, 2 processes", "v", 2),
    "NumPy": ("NumPy", "x", 6),
    "memcpy": ("memcpy", "|", 6),
    "gpusim, NumPy kernels": ("gpusim, NumPy's kernels", "o", 5),
    OURS: ("gpusim", "o", 0),
}
HOLLOW = ("gpusim, NumPy kernels",)
LIMITED = "the memory's limit"
WIDTH, ROW, MARGIN = 9.0, 0.175, 1.5  # inches: of the figure, of a row, and of all else


def check(path: Path) -> None:
    """Check that a picture can be drawn into this file, before anything is measured.

    **Raises**: ValueError for a suffix that names no format; FileNotFoundError without the folder;
    ModuleNotFoundError without matplotlib.
    """
    figures.check_suffix(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: its folder does not exist")
    require("pictures need", "matplotlib")


def largest(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Of each collective and dtype the case that moves most bytes; by collective, as measured.

    **Raises**: ValueError if no case has both a time of gpusim and the memory's limit.
    """
    found: dict[tuple[str, str], Outcome] = {}
    for outcome in outcomes:
        key = outcome.case.collective, outcome.case.variant
        if outcome.ratio(OURS, LIMIT) is not None:
            found[key] = max(found.get(key, outcome), outcome, key=lambda o: o.case.moved_bytes)
    if not found:
        raise ValueError("no case has a time of gpusim and the memory limit: nothing to draw")
    order = list(dict.fromkeys(collective for collective, _ in found))
    return sorted(found.values(), key=lambda outcome: order.index(outcome.case.collective))


def draw(results: Results, path: Path) -> None:
    """Draw the picture into a file.

    **Raises**: as `check` and `largest`.
    """
    check(path)
    outcomes = largest(results.outcomes)
    groups = [list(group) for _, group in groupby(outcomes, lambda o: o.case.collective)]
    rows = len(outcomes) + len(groups) - 1  # a row of space between collectives
    with figures.figure(path, WIDTH, MARGIN + ROW * rows) as ax:
        line, places = 0, []
        for group in groups:
            places += [(float(line + k), outcome) for k, outcome in enumerate(group)]
            line += len(group) + 1
        limit = ax.axvline(1, color="#666666", linestyle=figures.DASHED, linewidth=1)
        limit.set_label(LIMITED)
        for name, (label, marker, colour) in MARKERS.items():
            ratios = [(outcome.ratio(name, LIMIT), y) for y, outcome in places]
            shown = [(ratio, y) for ratio, y in ratios if ratio is not None]
            if shown:
                chosen = figures.COLOURS[colour]
                inside = {"markerfacecolor": "white"} if name in HOLLOW else {}
                ax.plot(
                    *zip(*shown, strict=True), marker, color=chosen, label=label, **inside,
                    markersize=6 if name == OURS else 5, zorder=3 if name == OURS else 2.5,
                )  # fmt: skip
        beside = [(y, factor(outcome.ratio(OURS, LIMIT)), "black") for y, outcome in places]
        for y, text, shade in [*beside, (-1, "gpusim", figures.COLOURS[0])]:
            ax.annotate(
                text, (1, y), xycoords=("axes fraction", "data"), xytext=(4, 0), color=shade,
                textcoords="offset points", va="center", annotation_clip=False,
            )  # fmt: skip
        ax.set_xscale("log")
        ax.set_yticks([y for y, _ in places], [label_of(o, outcomes) for _, o in places])
        ax.set_ylim(line - 1.3, -0.7)
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="both", zorder=0)
        bandwidth = (results.bandwidth or 0) / 1e9
        ax.set_xlabel(f"← faster      time / time to copy the bytes once ({bandwidth:.0f} GB/s)")
        machine = results.machine
        ax.figure.suptitle(
            f"{machine['cpu']}, {machine['cores']} cores, {results.started}, load average "
            f"{results.load_before} to {results.load_after}\n"
            f"Fastest calls; {size_name(outcomes[0].case.size)} elements unless given",
            x=0.01, ha="left", fontsize=9,
        )  # fmt: skip
        handles, labels = ax.get_legend_handles_labels()
        ax.figure.legend(
            handles[::-1], labels[::-1], loc="outside lower center", ncols=5, frameon=False
        )


def label_of(outcome: Outcome, outcomes: Sequence[Outcome]) -> str:
    """A row's label: the collective, the dtype, and the size where it is not the first row's."""
    case = outcome.case
    size = "" if case.size == outcomes[0].case.size else f", {size_name(case.size)}"
    return f"{case.collective} {case.variant}{size}"
