"""Pictures of timetables: time goes to the right, and every stage of every IPU has a row.

The colours of forward, backward and update differ in lightness, too, and boxes have the number of
their micro-batch, so that they can be read in grey and by the colour-blind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpusim.optional import require
from gpusim.tools.schedule.tasks import KINDS, Task, Timetable
from gpusim.tools.study.output import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "SUFFIXES", "draw", "write"]

SUFFIXES = (".svg", ".png", ".pdf")
COLOURS = {"forward": "#A6D3F0", "backward": "#B34700", "update": "#1B1B1B"}
NUMBERS = {
    "forward": "#000000",
    "backward": "#FFFFFF",
    "update": "#FFFFFF",
}  # what is written on it
IDLE = "#F1F1F1"
STYLE: Any = {  # matplotlib's stubs list every key by name
    "axes.edgecolor": "#666666",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 8,
    "legend.fontsize": 8,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",  # text stays text: searchable, and read aloud
    "svg.hashsalt": "gpusim",  # the same timetable gives the same file
}
# Where no date is asked for, the same timetable gives the same bytes.
UNDATED: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
    ".png": {},
}

NARROWEST, WIDEST = 6.5, 30.0  # inches
UNIT = 0.22  # inches of one forward pass: as wide as two digits
LETTER = 0.065  # inches of a label's letter
SMALLEST = 0.13  # inches of a forward pass in which there is room for numbers
MOST = 20_000  # tasks: beyond that nobody sees anything, and drawing takes minutes


def write(table: Timetable, path: str | PathLike[str], *, note: str = "") -> Figure:
    """Draw a timetable into a file.

    Args:
        path: ends in .svg, .png or .pdf.
        note: a line to write below the figures.

    Returns:
        The figure.

    Raises:
        ValueError: for other endings, and for more tasks than can be seen.
        ModuleNotFoundError: without matplotlib, with the command that installs it.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{target}: expected a name that ends in {' or '.join(SUFFIXES)}")
    with styled():
        figure = draw(table, note=note)
        with replacing(target, "wb") as file:
            about = UNDATED[suffix] | {"Title": summary(table)}
            figure.savefig(file, format=suffix[1:], dpi=200, metadata=about)
    return figure


@contextmanager
def styled() -> Iterator[None]:
    """A block in which matplotlib has the pictures' style; ModuleNotFoundError without it."""
    require("pictures need", "matplotlib")
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def draw(table: Timetable, *, note: str = "") -> Figure:
    """A figure of matplotlib. Errors as for `write`."""
    if len(table.tasks) > MOST:
        raise ValueError(
            f"the timetable has {len(table.tasks):,} tasks, and at most {MOST:,} can be drawn: "
            "choose fewer micro-batches"
        )
    with styled():
        from matplotlib.figure import Figure

        labels = [label_of(table, place) for place in range(len(table.stages))]
        margin = 0.5 + LETTER * max(map(len, labels))
        width = min(max(UNIT * table.length + margin, NARROWEST), WIDEST)
        figure = Figure(figsize=(width, 1.5 + 0.34 * len(table.stages)), layout="constrained")
        lines = [*summary(table).split("; "), *([note] if note else [])]
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=9)
        axes = figure.subplots()
        rows = rows_of(table)
        frame(axes, table, rows, labels)
        numbered = (width - margin) / table.length >= SMALLEST
        of_ipu = {
            ipu: [row for row, stage in zip(rows, table.stages, strict=True) if stage.ipu == ipu]
            for ipu in table.ipus
        }
        for task in table.tasks:
            own = of_ipu[task.ipu] if task.stage is None else [rows[task.stage]]
            box(axes, task, own, numbered)
        legend(axes, table)
        return figure


def summary(table: Timetable) -> str:
    """The figures of a timetable, in words.

    >>> from gpusim.tools.schedule import Stage, pipelined
    >>> print(summary(pipelined([Stage(0), Stage(1)], 8)))
    Pipelined: 2 IPUs, 2 stages (3 with backward), 8 micro-batches; bubble 11% of the IPUs' time
    """
    stages = counted(len(table.stages), "stage")
    if table.strategy == "Phased":
        phases = counted(len({stage.phase for stage in table.stages}), "phase")
        stages = f"{stages} in {phases}"
    if table.backward:
        stages += f" ({table.steps} with backward)"
    batches = counted(table.micro_batches, "micro-batch", "micro-batches")
    figures = f"{counted(len(table.ipus), 'IPU')}, {stages}, {batches}"
    return f"{table.strategy}: {figures}; bubble {table.bubble:.0%} of the IPUs' time"


def counted(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"


def rows_of(table: Timetable) -> list[int]:
    """The row of each stage: by IPU, and then in order."""
    order = sorted(range(len(table.stages)), key=lambda place: (table.stages[place].ipu, place))
    rows = [0] * len(order)
    for row, place in enumerate(order):
        rows[place] = row
    return rows


def label_of(table: Timetable, place: int) -> str:
    stage = table.stages[place]
    return f"IPU {stage.ipu}: {shortened(', '.join(stage.blocks)) or f'stage {place}'}"


def frame(axes: Axes, table: Timetable, rows: list[int], labels: list[str]) -> None:
    """Everything around the boxes."""
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    for row in rows:
        idle = Rectangle((0, row + 0.06), table.length, 0.88, facecolor=IDLE, linewidth=0)
        axes.add_patch(idle)
    for ipu in table.ipus[1:]:
        own = [row for row, stage in zip(rows, table.stages, strict=True) if stage.ipu == ipu]
        axes.axhline(min(own), color="#666666", linewidth=0.5)
    axes.set_yticks([row + 0.5 for row in rows], labels)
    axes.tick_params("y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.set_xlim(0, table.length)
    axes.set_ylim(len(rows), 0)
    unit = "time, in forward passes of one stage"
    axes.set_xlabel(f"{unit} (a backward pass: {table.backward:g})" if table.backward else unit)


def shortened(text: str, most: int = 32) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def box(axes: Axes, task: Task, rows: list[int], numbered: bool) -> None:
    """One task, over these neighbouring rows; its gid says in the SVG what it is."""
    from matplotlib.patches import Rectangle

    top, height = min(rows), len(rows)
    parts = [task.kind, f"ipu{task.ipu}"]
    if task.stage is not None:
        parts += [f"stage{task.stage}", f"microbatch{task.micro_batch}"]
    patch = Rectangle(
        (task.start, top + 0.06),
        task.end - task.start,
        height - 0.12,
        facecolor=COLOURS[task.kind],
        edgecolor="#FFFFFF",
        linewidth=0.6,
        gid="-".join(parts),
    )
    axes.add_patch(patch)
    if numbered and task.micro_batch is not None:
        axes.text(
            (task.start + task.end) / 2,
            top + 0.5,
            str(task.micro_batch),
            color=NUMBERS[task.kind],
            ha="center",
            va="center_baseline",
            fontsize=7,
        )


def legend(axes: Axes, table: Timetable) -> None:
    from matplotlib.patches import Patch

    kinds = [kind for kind in KINDS if any(task.kind == kind for task in table.tasks)]
    patches = [Patch(color=COLOURS[kind], label=kind) for kind in kinds]
    patches.append(Patch(color=IDLE, label="idle"))
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
