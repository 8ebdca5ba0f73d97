"""Pictures of a study: a figure against the number of replicas, one line for each setting.

They can be printed as they are, two columns wide, and read in grey and by the colour-blind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpusim import figures
from gpusim.figures import COLOURS, DASHED
from gpusim.tools.study.metrics import METRICS
from gpusim.tools.study.settings import Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gpusim.tools.study.results import Row, Study
    from gpusim.tools.study.training import Training

__all__ = ["PICTURES", "write", "write_training"]

PICTURES = ("relative_error", "max_ulp", "bias", "correct")
"""The figures that are worth a picture."""

MARKERS = {"linear": "o", "reverse": "v", "ring": "s", "tree": "^"}
STYLE = {"legend.handlelength": 3.2, "lines.linewidth": 1.4}


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    with figures.styled(STYLE):
        from matplotlib.figure import Figure

        yield Figure(figsize=(width, height), layout="constrained")


def write(study: Study, path: Path, metric: str = "relative_error") -> Path:
    """Draw one figure of a study into `path`; returns it."""
    figures.check_suffix(path)
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r}: expected one of {', '.join(METRICS)}")
    with drawn(study, metric) as figure:
        return figures.write(figure, path)


@contextmanager
def drawn(study: Study, metric: str) -> Iterator[Figure]:
    """The picture of one figure, while matplotlib has its style."""
    lines = len(study.settings)
    columns = 1 if lines < 3 else 2
    with _figure(6.5, 3.4 + 0.17 * math.ceil(lines / columns)) as figure:
        axes = figure.subplots()
        axes.set_title(f"Sum of R replicas: {study.input}")
        _scales(axes, study, metric)
        styles = _styles(study.settings)
        for setting in study.settings:
            _line(axes, study.of(setting), metric, styles[setting])
        figure.legend(loc="outside lower center", ncols=columns, frameon=False)
        yield figure


def _scales(axes: Axes, study: Study, metric: str) -> None:
    replicas = sorted({row.replicas for row in study.rows})
    axes.set_xscale("log", base=2)
    few = replicas[:: math.ceil(len(replicas) / 11)]
    axes.set_xticks(few, [f"{n:,}" for n in few])
    axes.minorticks_off()
    axes.set_xlabel("number of replicas R")
    if metric in ("correct", "overflowed"):
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    else:
        axes.set_yscale("log")
    label = METRICS[metric]
    axes.set_ylabel(f"size of the {label}" if metric in ("bias", "mean_error") else label)
    axes.grid(True, axis="y")


def _styles(settings: list[Setting]) -> dict[Setting, dict[str, Any]]:
    """A colour for each reduction, whichever its rounding; dashes where it is stochastic."""
    kinds = dict.fromkeys((s.dtype, s.accumulate, s.order) for s in settings)
    if len(kinds) > len(COLOURS):  # the marker has to tell the orders apart
        kinds = dict.fromkeys((s.dtype, s.accumulate, "") for s in settings)
    by_kind = dict(zip(kinds, cycle(COLOURS), strict=False))
    styles = {}
    for setting in settings:
        kind = (setting.dtype, setting.accumulate, setting.order)
        if kind not in by_kind:
            kind = (*kind[:2], "")
        styles[setting] = {
            "color": by_kind[kind],
            "linestyle": DASHED if setting.stochastic else "-",
            "marker": MARKERS.get(setting.order, "D"),
            "label": setting.name,
        }
    return styles


def _line(axes: Axes, rows: list[Row], metric: str, style: dict[str, Any]) -> None:
    """The mean, a band of one standard deviation between seeds, hollow marks where some of the
    result is not finite."""
    size: Callable[[Any], Any] = np.abs if metric in ("bias", "mean_error") else np.asarray
    x = np.array([row.replicas for row in rows])
    y = size([getattr(row.mean, metric) for row in rows])
    spread = np.array([getattr(row.spread, metric) for row in rows])
    if axes.get_yscale() == "log":  # a zero has no place there
        y = np.where(y > 0, y, np.nan)
    overflowed = np.array([row.mean.overflowed > 0 for row in rows])
    axes.plot(x, y, **style)
    axes.plot(
        x[overflowed],
        y[overflowed],
        linestyle="none",
        marker=style["marker"],
        markerfacecolor="white",
        markeredgecolor=style["color"],
        zorder=3,
    )
    if np.isfinite(spread).any():
        low = np.where(y > spread, y - spread, y)
        axes.fill_between(x, low, y + spread, color=style["color"], alpha=0.15, linewidth=0)


def write_training(training: Training, path: Path) -> Path:
    """Draw a training study into `path`; returns it."""
    figures.check_suffix(path)
    with drawn_training(training) as figure:
        return figures.write(figure, path)


@contextmanager
def drawn_training(training: Training) -> Iterator[Figure]:
    """Loss, accuracy and progress by epoch, while matplotlib has its style."""
    with _figure(7.2, 3.1) as figure:
        losses, accuracies, ways = figure.subplots(1, 3)
        figure.suptitle(f"Training with {training.title}", fontsize=9, x=0.01, ha="left")
        panels = (
            (losses, "training loss", [run.losses for run in training.runs]),
            (accuracies, "test accuracy", [run.accuracies for run in training.runs]),
            (ways, "progress (float32: 100%)", training.ways),
        )
        colours: dict[Any, str] = {}
        for run in training.runs:
            colours.setdefault(run.format.dtype, ("#000000", *COLOURS)[len(colours) % 7])
        for axes, label, curves in panels:
            axes.set_title(label)
            axes.set_xlabel("epoch")
            axes.grid(True, axis="y")
            for run, curve in zip(training.runs, curves, strict=True):
                axes.plot(
                    np.arange(1, len(curve) + 1),
                    curve,
                    color=colours[run.format.dtype],
                    linestyle=DASHED if run.format.rounding == "stochastic" else "-",
                    label=run.format.name,
                )
        for axes in (accuracies, ways):
            axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
            axes.set_ylim(bottom=0)
        lines, names = losses.get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=4, frameon=False)
        yield figure
