"""Pictures of a study: a figure against the number of replicas, one line for each setting.

A study of one number of replicas is drawn as dots, a row for each setting, or for each array of
the input. Pictures can be printed as they are, two columns wide, and read in grey and by the
colour-blind.
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
from gpusim.tools.study.metrics import METRICS, SIGNED
from gpusim.tools.study.settings import Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gpusim.tools.study.rows import Measured, Row
    from gpusim.tools.study.runs import Trained

__all__ = ["MARKERS", "pictures", "write", "write_training"]

PICTURES = ("relative_error", "input_error", "error_p99", "max_ulp", "bias", "cosine", "correct")
SHARES = ("correct", "overflowed", "sign_flips", "infinite_input")

MARKERS: dict[str, Any] = {
    "linear": "o",
    "reverse": "v",
    "ring": "s",
    "tree": "^",
    "xla-cpu": "P",
    "openmpi": "p",
    "openmpi-linear": "<",
    "openmpi-nonoverlapping": ">",
    "openmpi-recursive-doubling": "h",
    "openmpi-ring": "D",
    "openmpi-segmented-ring": "d",
    "openmpi-rabenseifner": "8",
    "mpich": "X",
    "gloo-ring": "*",
    "nccl-ring": (4, 1, 0),
    "nccl-tree": (3, 1, 0),
    "gcl-ring": (6, 1, 0),
}
"""The marker of each order; three numbers are a star's points."""
MORE_COLOURS = ("#882255", "#999933", "#44AA99", "#332288", "#AA4499", "#661100", "#888888")
STYLE = {"legend.handlelength": 3.2, "lines.linewidth": 1.4, "lines.markersize": 5}
OVERFLOW = "x"


def pictures(study: Measured) -> list[str]:
    """The figures that are worth a picture."""
    rare = [n for n in ("sign_flips", "overflowed") if any(getattr(r.mean, n) for r in study.rows)]
    return [*PICTURES, *rare]


@contextmanager
def _figure(width: float, height: float) -> Iterator[Figure]:
    with figures.styled(STYLE):
        from matplotlib.figure import Figure

        yield Figure(figsize=(width, height), layout="constrained")


AGAINST = ("replicas", "bytes")


def write(
    study: Measured, path: Path, metric: str = "relative_error", against: str = "replicas"
) -> Path:
    """Draw one figure of a study into `path`; returns it."""
    figures.check_suffix(path)
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r}: expected one of {', '.join(METRICS)}")
    if against not in AGAINST:
        raise ValueError(f"against={against!r}: expected one of {', '.join(AGAINST)}")
    with (trade_off if against == "bytes" else drawn)(study, metric) as figure:
        return figures.write(figure, path)


@contextmanager
def trade_off(study: Measured, metric: str) -> Iterator[Figure]:
    """A figure against the bytes that a replica sends: a mark for each setting, at the most
    replicas, and small ones for fewer."""
    styles = _styles(study.settings)
    most = max(row.replicas for row in study.rows)
    with _figure(6.5, 3.4 + 0.17 * len(styles)) as figure:
        axes = figure.subplots()
        axes.set_title(_title(study, f"{most:,}"))
        from matplotlib.ticker import EngFormatter

        axes.set_xscale("log")
        for which in ("major", "minor"):
            getattr(axes.xaxis, f"set_{which}_formatter")(EngFormatter("B"))
        axes.set_xlabel("bytes that each replica sends")
        axes.set_ylabel(_label(metric))
        axes.grid(True)
        _scale(axes, "y", metric)
        for setting, style in styles.items():
            rows = study.of(setting)
            values, spread = _values(rows, metric)
            y = np.where(np.isfinite(values) & ((values > 0) | (metric in SHARES)), values, np.nan)
            x = [row.bytes_sent for row in rows]
            look = {"color": style["color"], "marker": style["marker"], "linestyle": "none"}
            fill = "white" if setting.stochastic else style["color"]
            axes.plot(x[:-1], y[:-1], **look, markersize=2.5, alpha=0.5)
            bar = spread[-1:] if math.isfinite(spread[-1]) else None
            axes.errorbar(
                x[-1:], y[-1:], yerr=bar, **look, markerfacecolor=fill, label=style["label"]
            )
        _limits(axes, "y", metric)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", frameon=False)
        yield figure


@contextmanager
def drawn(study: Measured, metric: str) -> Iterator[Figure]:
    """The picture of one figure, while matplotlib has its style."""
    draw = _lines if len({row.replicas for row in study.rows}) > 1 else _dots
    with draw(study, metric) as figure:
        yield figure


@contextmanager
def _lines(study: Measured, metric: str) -> Iterator[Figure]:
    """A line for each setting; above them, if anything overflows, its share."""
    styles = _styles(study.settings)
    columns = 1 if len(styles) < 3 or max(len(s.name) for s in styles) > 50 else 2
    overflow = metric != "overflowed" and _overflows(study)
    legend = 0.17 * math.ceil(len(styles) / columns)
    with _figure(6.5, 3.4 + legend + 0.9 * overflow) as figure:
        if overflow:
            above, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 4))
            _share(above, study, styles)
        else:
            above = axes = figure.subplots()
        above.set_title(_title(study, "R"))
        _count_scale(axes, study)
        axes.set_ylabel(_label(metric))
        axes.grid(True, axis="y")
        _scale(axes, "y", metric)
        shifts = _shifts(study, metric)
        for setting, style in styles.items():
            _line(axes, study.of(setting), metric, style, shifts[setting])
        _limits(axes, "y", metric)
        figure.legend(
            *axes.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=columns,
            frameon=False,
        )
        yield figure


def _title(study: Measured, count: str) -> str:
    return f"{study.op.capitalize()} of {count} replicas: {study.input}"


def _label(metric: str) -> str:
    label = f"1 - {METRICS[metric]}" if metric == "cosine" else METRICS[metric]
    return f"size of the {label}" if metric in SIGNED else label


def _shifts(study: Measured, metric: str) -> dict[Setting, float]:
    """A factor of R for each line: marks of lines that would cover each other stand side by side.

    Those are lines that nowhere differ by more than 5 percent.
    """
    apart = min(np.diff(np.log2(sorted({row.replicas for row in study.rows}))))
    groups: list[tuple[Any, list[Setting]]] = []
    for setting in study.settings:
        drawn, _ = _values(study.of(setting), metric)
        near = (same for values, same in groups if np.allclose(drawn, values, 0.05, 0, True))
        same = next(near, None)
        if same is None:
            groups.append((drawn, same := []))
        same.append(setting)
    return {
        setting: float(np.exp2(apart * min(0.4, 0.1 * len(same)) * ((k + 0.5) / len(same) - 0.5)))
        for _, same in groups
        for k, setting in enumerate(same)
    }


def _count_scale(axes: Axes, study: Measured) -> None:
    replicas = sorted({row.replicas for row in study.rows})
    axes.set_xscale("log", base=2)
    few = replicas[:: math.ceil(len(replicas) / 11)]
    axes.set_xticks(few, [f"{n:,}" for n in few])
    axes.minorticks_off()
    axes.set_xlabel("number of replicas R")


def _scale(axes: Axes, direction: str, metric: str) -> None:
    """The scale of a figure on the axis "x" or "y": logarithmic, but for shares."""
    if metric not in SHARES:
        getattr(axes, f"set_{direction}scale")("log")
        return
    axis = {"x": axes.xaxis, "y": axes.yaxis}[direction]
    axis.set_major_formatter(lambda share, _: f"{100 * share:.3g}%")


def _limits(axes: Axes, direction: str, metric: str) -> None:
    """Shares are drawn from 0 on, to 100 % if they are not small ones."""
    if metric in SHARES:
        getattr(axes, f"set_{direction}lim")(0, None if metric == "sign_flips" else 1.02)


def _overflows(study: Measured) -> bool:
    return any(row.mean.overflowed for row in study.rows)


def _share(axes: Axes, study: Measured, styles: dict[Setting, dict[str, Any]]) -> None:
    """The share of elements that overflow."""
    for setting, style in styles.items():
        rows = study.of(setting)
        share = [row.mean.overflowed for row in rows]
        if any(share):
            axes.plot([row.replicas for row in rows], share, **style)
    axes.set_ylim(-0.1, 1.15)
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_ylabel("overflow")
    axes.grid(True, axis="y")


def _styles(settings: list[Setting]) -> dict[Setting, dict[str, Any]]:
    """A colour for each reduction, whichever its rounding; dashes where it is stochastic.

    The order has its marker. Where there are more reductions than colours, markers tell the orders
    apart, and if that is not enough, each order with its levels.
    """
    colours = (*COLOURS, *MORE_COLOURS)
    for apart in (("order", "groups"), ("groups",), ()):
        kinds = [_kind(setting, apart) for setting in settings]
        by_kind = dict(zip(dict.fromkeys(kinds), cycle(colours), strict=False))
        if len(by_kind) <= len(colours):
            break
    markers = _markers(settings, by_levels="groups" not in apart)
    return {
        setting: {
            "color": by_kind[kind],
            "linestyle": DASHED if setting.stochastic else "-",
            "marker": marker,
            "label": setting.name,
        }
        for setting, kind, marker in zip(settings, kinds, markers, strict=True)
    }


def _kind(setting: Setting, apart: tuple[str, ...]) -> tuple[Any, ...]:
    """The key of a colour: formats, operator, wire, and the fields named in `apart`."""
    own = tuple(getattr(setting, name) for name in apart)
    return setting.dtype, setting.accumulate, setting.op, setting.wire, *own


def _markers(settings: list[Setting], *, by_levels: bool) -> list[Any]:
    """The marker of each setting's order, or one for each order with its levels."""
    if not by_levels:
        return [MARKERS.get(setting.order, "o") for setting in settings]
    levels = dict.fromkeys((setting.order, setting.groups) for setting in settings)
    found = dict(zip(levels, cycle(MARKERS.values()), strict=False))
    return [found[setting.order, setting.groups] for setting in settings]


def _values(rows: list[Row], metric: str) -> tuple[Any, Any]:
    """The values of a figure that are drawn, and their spread."""
    found = np.array([getattr(row.mean, metric) for row in rows])
    spread = np.array([getattr(row.spread, metric) for row in rows])
    size: Callable[[Any], Any] = np.abs if metric in SIGNED else np.asarray
    found = size(1 - found if metric == "cosine" else found)
    return found, spread


def _line(axes: Axes, rows: list[Row], metric: str, style: dict[str, Any], shift: float) -> None:
    """The mean, and a band of one standard deviation between seeds.

    Marks are hollow where some of the result overflows. Where all of it does, or the figure is
    infinite, a cross is drawn at the upper edge.
    """
    x = shift * np.array([row.replicas for row in rows])
    values, spread = _values(rows, metric)
    drawn = np.isfinite(values) & ((values > 0) | (metric in SHARES))
    y = np.where(drawn, values, np.nan)
    overflowed = np.array([row.mean.overflowed for row in rows])
    axes.plot(x, y, **style)
    mark: dict[str, Any] = {"linestyle": "none", "zorder": 3}
    hollow: dict[str, Any] = {"markerfacecolor": "white", "markeredgecolor": style["color"]}
    some = overflowed > 0
    axes.plot(x[some], y[some], marker=style["marker"], **hollow, **mark)
    lost = (some & np.isnan(values)) | np.isinf(values)
    if lost.any():
        edge = axes.get_xaxis_transform()  # y counts from 0, the lower edge, to 1
        look: dict[str, Any] = {"marker": OVERFLOW, "color": style["color"], "clip_on": False}
        axes.plot(x[lost], np.full(len(x[lost]), 1.03), transform=edge, **look, **mark)
    if np.isfinite(spread).any():
        low = np.where(y > spread, y - spread, y)
        axes.fill_between(x, low, y + spread, color=style["color"], alpha=0.15, linewidth=0)


@contextmanager
def _dots(study: Measured, metric: str) -> Iterator[Figure]:
    """One number of replicas: a row for each setting, or for each array of the input."""
    styles = _styles(study.settings)
    tensors: list[str | None] = [None, *study.tensors]
    if study.tensors:
        labels = ["all", *study.tensors]
        height = max(0.3, 0.09 * len(styles)) * len(labels) + 0.17 * len(styles)
    else:
        labels = [setting.name for setting in styles]
        height = 0.21 * len(styles)
    with _figure(6.5, 1.1 + height) as figure:
        axes = figure.subplots()
        axes.set_title(_title(study, f"{study.rows[0].replicas:,}"), loc="left", x=0.0)
        axes.set_xlabel(_label(metric))
        axes.grid(True, axis="x")
        _scale(axes, "x", metric)
        for place, (setting, style) in enumerate(styles.items()):
            offset = 0.6 * ((place + 0.5) / len(styles) - 0.5)
            for line, tensor in enumerate(tensors):
                y = line + offset if study.tensors else place
                (row,) = study.of(setting, tensor)
                _dot(axes, row, y, metric, style, label=line == 0)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        _limits(axes, "x", metric)
        if study.tensors:
            figure.legend(
                *axes.get_legend_handles_labels(), loc="outside lower center", frameon=False
            )
        yield figure


def _dot(
    axes: Axes, row: Row, y: float, metric: str, style: dict[str, Any], *, label: bool
) -> None:
    """A figure and its spread: hollow where some elements overflow, a cross where all do."""
    (x,), (spread,) = _values([row], metric)
    share = row.mean.overflowed
    look = {name: style[name] for name in ("color", "marker")} | {
        "linestyle": "none",
        "label": style["label"] if label else None,
    }
    beside = {"va": "center", "fontsize": 7, "color": style["color"]}
    edge = axes.get_yaxis_transform()  # x counts from 0, the left edge, to 1
    if math.isfinite(x) and (x > 0 or metric in SHARES):
        fill = "white" if share else style["color"]
        low = min(spread, 0.999 * x) if math.isfinite(spread) else 0.0
        bar = [[low], [spread]] if math.isfinite(spread) else None
        axes.errorbar([x], [y], xerr=bar, markerfacecolor=fill, **look)
    elif math.isinf(x) or (share and math.isnan(x)):
        look["marker"] = OVERFLOW
        axes.plot([1], [y], transform=edge, clip_on=False, **look)
    elif x == 0:
        axes.plot([0], [y], transform=edge, clip_on=False, **look)
        axes.text(0.01, y, "0", transform=edge, **beside)
    if share or math.isinf(x):
        text = f"{100 * share:.3g}% overflow" if share else "infinite"
        axes.text(1.01, y, text, transform=edge, **beside)


def write_training(training: Trained, path: Path) -> Path:
    """Draw a training study into `path`; returns it."""
    figures.check_suffix(path)
    with drawn_training(training) as figure:
        return figures.write(figure, path)


@contextmanager
def drawn_training(training: Trained) -> Iterator[Figure]:
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
