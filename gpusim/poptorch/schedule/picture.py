"""Pictures of pipeline schedules: time goes to the right, every stage of every IPU has a row.

Colours differ in lightness too, and each box has the number of its micro-batch. A picture can be
read in grey, and by people who do not see colours.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

from ... import figures
from .tasks import KINDS, PipelineSchedule, Task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "SUFFIXES", "draw", "summary", "write"]

SUFFIXES = (".svg", ".png", ".pdf")
COLOURS = {"forward": "#A6D3F0", "backward": "#B34700", "update": "#1B1B1B"}
NUMBERS = {"forward": "#000000", "backward": "#FFFFFF", "update": "#FFFFFF"}
IDLE = "#F1F1F1"
STYLE = {
    "axes.spines.left": False,
    "svg.fonttype": "none",  # text stays text: searchable, and read aloud
}

NARROWEST, WIDEST = 6.5, 30.0  # inches
UNIT = 0.22  # inches of one forward pass: as wide as two digits
LETTER = 0.065  # inches of a label's letter
SMALLEST = 0.13  # inches of a forward pass that has room for a number
MOST = 20_000  # tasks; with more, boxes are too small to see and drawing takes minutes


def write(schedule: PipelineSchedule, path: str | PathLike[str], *, note: str = "") -> Figure:
    """Draw a schedule into a file.

    **Arguments**:

    - `path`: ends in .svg, .png or .pdf.
    - `note`: a line to write below the summary.

    **Returns**: The figure.

    **Raises**:

    - ValueError: for another suffix, and for more than 20,000 tasks.
    - ModuleNotFoundError: without matplotlib; the message names the command that installs it.
    """
    figures.check_suffix(path, SUFFIXES)
    with figures.styled(STYLE):
        figure = draw(schedule, note=note)
        figures.write(figure, path, Title=summary(schedule))
    return figure


def draw(schedule: PipelineSchedule, *, note: str = "") -> Figure:
    """Draw a schedule as a matplotlib figure. Errors are those of `write`."""
    if len(schedule.tasks) > MOST:
        raise ValueError(
            f"the schedule has {len(schedule.tasks):,} tasks, and at most {MOST:,} can be drawn: "
            "choose fewer micro-batches"
        )
    with figures.styled(STYLE):
        from matplotlib.figure import Figure

        labels = [label_of(schedule, place) for place in range(len(schedule.stages))]
        margin = 0.5 + LETTER * max(map(len, labels))
        width = min(max(UNIT * schedule.length + margin, NARROWEST), WIDEST)
        figure = Figure(figsize=(width, 1.5 + 0.34 * len(schedule.stages)), layout="constrained")
        lines = [*summary(schedule).split("; "), *([note] if note else [])]
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=9)
        axes = figure.subplots()
        rows = rows_of(schedule)
        frame(axes, schedule, rows, labels)
        numbered = (width - margin) / schedule.length >= SMALLEST
        of_ipu = {
            ipu: [row for row, stage in zip(rows, schedule.stages, strict=True) if stage.ipu == ipu]
            for ipu in schedule.ipus
        }
        for task in schedule.tasks:
            own = of_ipu[task.ipu] if task.stage is None else [rows[task.stage]]
            box(axes, task, own, numbered)
        legend(axes, schedule)
        return figure


def summary(schedule: PipelineSchedule) -> str:
    """The main numbers of a schedule, in words.

    >>> from gpusim.poptorch.schedule import PipelineStage, pipelined
    >>> print(summary(pipelined([PipelineStage(0), PipelineStage(1)], 8)))
    Pipelined: 2 IPUs, 2 stages (3 with backward), 8 micro-batches; bubble 11% of the IPUs' time
    """
    stages = counted(len(schedule.stages), "stage")
    if schedule.strategy == "Phased":
        phases = counted(len({stage.phase for stage in schedule.stages}), "phase")
        stages = f"{stages} in {phases}"
    if schedule.backward:
        stages += f" ({schedule.steps} with backward)"
    batches = counted(schedule.micro_batches, "micro-batch", "micro-batches")
    figures = f"{counted(len(schedule.ipus), 'IPU')}, {stages}, {batches}"
    return f"{schedule.strategy}: {figures}; bubble {schedule.bubble:.0%} of the IPUs' time"


def counted(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"


def rows_of(schedule: PipelineSchedule) -> list[int]:
    """The row of each stage: rows are sorted by IPU, then by stage."""
    order = sorted(
        range(len(schedule.stages)), key=lambda place: (schedule.stages[place].ipu, place)
    )
    rows = [0] * len(order)
    for row, place in enumerate(order):
        rows[place] = row
    return rows


def label_of(schedule: PipelineSchedule, place: int) -> str:
    stage = schedule.stages[place]
    return f"IPU {stage.ipu}: {shortened(', '.join(stage.blocks)) or f'stage {place}'}"


def frame(axes: Axes, schedule: PipelineSchedule, rows: list[int], labels: list[str]) -> None:
    """Draw the rows, axes and labels."""
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    for row in rows:
        idle = Rectangle((0, row + 0.06), schedule.length, 0.88, facecolor=IDLE, linewidth=0)
        axes.add_patch(idle)
    for ipu in schedule.ipus[1:]:
        own = [row for row, stage in zip(rows, schedule.stages, strict=True) if stage.ipu == ipu]
        axes.axhline(min(own), color="#666666", linewidth=0.5)
    axes.set_yticks([row + 0.5 for row in rows], labels)
    axes.tick_params("y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.set_xlim(0, schedule.length)
    axes.set_ylim(len(rows), 0)
    unit = "time, in forward passes of one stage"
    axes.set_xlabel(
        f"{unit} (a backward pass: {schedule.backward:g})" if schedule.backward else unit
    )


def shortened(text: str, most: int = 32) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def box(axes: Axes, task: Task, rows: list[int], numbered: bool) -> None:
    """Draw one task over neighbouring rows. Its id in an SVG names it."""

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


def legend(axes: Axes, schedule: PipelineSchedule) -> None:
    from matplotlib.patches import Patch

    kinds = [kind for kind in KINDS if any(task.kind == kind for task in schedule.tasks)]
    patches = [Patch(color=COLOURS[kind], label=kind) for kind in kinds]
    patches.append(Patch(color=IDLE, label="idle"))
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
