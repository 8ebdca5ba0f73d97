"""The table, the picture and the page of a training study."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpusim import figures
from gpusim.figures import COLOURS, DASHED
from gpusim.tools import page
from gpusim.tools.study import picture, report, table
from gpusim.tools.study.runs import Trained
from gpusim.tools.tables import print_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["cells", "columns", "drawn", "show", "write_page", "write_picture"]

HEADINGS = {
    "test accuracy": "test accuracy",
    "final loss": "final loss",
    "progress": "progress",
    "unchanged": "updates that changed nothing",
}
SHOWN = {"test accuracy": ".1%", "final loss": ".4f", "progress": ".1%", "unchanged": ".1%"}
PANELS = {
    "final loss": "training loss",
    "test accuracy": "test accuracy",
    "progress": "progress (float32: 100%)",
}
MOST = {"final loss": 1.5, "progress": 1.5}
"""How much of the picture is shown, in terms of the largest value of float32."""
LEGEND, MARK = 110, 9
"""The characters that a line of the legend has room for, and those that a mark takes."""
ROW = 0.17
"""The height of a line of the legend, in inches."""
MEANING = """<p><em>Progress</em> is the part of the weights' displacement in float32 that this
training has made too; <em>updates that changed nothing</em> left the weight with the bits it had.
An update of less than half a unit in the last place does so whenever it is rounded to nearest;
rounded stochastically, it now and then moves the weight by a whole unit, and the mean is right. Of
several seeds, figures are means; brackets and bands are 95% confidence intervals of the mean, by
Student's distribution over the seeds.</p>"""


def columns() -> list[str]:
    """The headings of the table."""
    return ["format", *HEADINGS.values()]


def cells(training: Trained) -> list[list[str]]:
    """The rows as text; of several seeds a mean and its confidence interval."""
    rows = []
    for place, recipe in enumerate(training.recipes):
        row = [recipe.name]
        for figure, form in SHOWN.items():
            mean, low, high = training.summary(figure, place)
            text = f"{mean:{form}}" if math.isfinite(mean) else "-"
            if math.isfinite(low):
                text += f" [{low:{form}}, {high:{form}}]"
            row.append(text)
        rows.append(row)
    return rows


def show(training: Trained) -> None:
    """Print the table."""
    print_table(training.title, columns(), cells(training))


def write_picture(training: Trained, path: Path) -> Path:
    """Draw the study into `path`; returns it."""
    figures.check_suffix(path)
    with drawn(training) as figure:
        return figures.write(figure, path)


@contextmanager
def drawn(training: Trained) -> Iterator[Figure]:
    """Loss, accuracy and progress by epoch, while matplotlib has its style."""
    with figures.styled(picture.STYLE):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 3.1), layout="constrained")
        axes = dict(zip(PANELS, figure.subplots(1, len(PANELS)), strict=True))
        title = textwrap.fill(f"Training with {training.title}", 100)
        figure.suptitle(title, fontsize=9, x=0.01, ha="left")
        tops = {name: _top(training, name) for name in PANELS}
        colours = _colours(training)
        for name, panel in axes.items():
            panel.set_title(PANELS[name])
            panel.set_xlabel("epoch")
            panel.grid(True, axis="y")
            for place, colour in enumerate(colours):
                _curve(panel, training, name, place, colour)
        for name in ("test accuracy", "progress"):
            axes[name].yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
            axes[name].set_ylim(bottom=0)
        for name, (top, _) in tops.items():
            if top is not None:
                axes[name].set_ylim(0, top)
        lines, names = axes["final loss"].get_legend_handles_labels()
        beyond = {place for _, places in tops.values() for place in places}
        names = [f"{each}{' (leaves the axes)' * (k in beyond)}" for k, each in enumerate(names)]
        columns = min(4, max(1, LEGEND // (MARK + max(map(len, names)))))
        figure.set_figheight(2.93 + ROW * -(-len(names) // columns))
        figure.legend(lines, names, loc="outside lower center", ncols=columns, frameon=False)
        yield figure


def _top(training: Trained, figure: str) -> tuple[float | None, list[int]]:
    """The upper end of an axis, and the recipes whose curve leaves it; None where none does.

    A run that diverges would leave no room for the others.
    """
    most = MOST.get(figure)
    if most is None:
        return None, []
    means = [np.mean(training.of(figure, place), axis=0) for place in range(len(training.recipes))]
    top = most * float(np.max(means[0]))
    beyond = [place for place, mean in enumerate(means) if not np.nanmax(mean) <= top]
    return (top if beyond else None), beyond


def _colours(training: Trained) -> list[str]:
    """One for each format; one for each recipe where several have a format and rounding alike."""
    keys: Sequence[Any] = [recipe.format.dtype for recipe in training.recipes]
    if len({recipe.format.text for recipe in training.recipes}) < len(training.recipes):
        keys = [(*(kept.dtype for _, kept in r.states), r.format) for r in training.recipes]
    chosen: dict[Any, str] = {}
    for key in keys:
        chosen.setdefault(key, ("#000000", *COLOURS)[len(chosen) % len(COLOURS)])
    return [chosen[key] for key in keys]


def _curve(panel: Any, training: Trained, figure: str, place: int, colour: str) -> None:
    """The mean of a figure by epoch, and the band of its confidence interval."""
    recipe = training.recipes[place]
    epochs = np.arange(1, training.about["epochs"] + 1)
    ends = np.array([training.summary(figure, place, epoch - 1) for epoch in epochs])
    dashes = DASHED if recipe.is_stochastic else "-"
    panel.plot(epochs, ends[:, 0], color=colour, linestyle=dashes, label=recipe.name)
    if np.isfinite(ends).all():
        panel.fill_between(epochs, ends[:, 1], ends[:, 2], color=colour, alpha=0.15, linewidth=0)


def write_page(training: Trained, path: Path) -> Path:
    """Write the study's page into `path`; returns it."""
    title = training.title
    parts = [f"<p>{escape(title[0].upper() + title[1:])}.</p>", MEANING]
    with drawn(training) as figure:
        parts.append(page.image(figure, "loss, accuracy and progress by epoch"))
    rows = page.html_table(columns(), cells(training), left=table.LEFT)
    parts += ["<h2>After the last epoch</h2>", rows, report.about(training.about)]
    return page.write_page("Training study", parts, path)
