"""Pictures of a study: a figure against the number of replicas, one line for each setting.

A study of one number of replicas is drawn as dots, a row for each setting, or for each array of
the input. Pictures can be printed as they are, two columns wide, and read in grey and by the
colour-blind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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

__all__ = ["MARKERS", "pictures", "write"]

PICTURES = (
    "relative_error",
    "input_error",
    "backward_p99",
    "error_p99",
    "bias",
    "cosine",
    "correct",
)
SHARES = ("correct", "overflowed", "sign_flips", "infinite_input")

MARKERS: dict[str, Any] = {
    "linear": "o",
    "reverse": "v",
    "ring": "s",
    "tree": "^",
    "kahan": (5, 0, 0),
    "neumaier": "H",
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
Styles = dict[Setting, dict[str, Any]]


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
    _check(metric, against)
    with (trade_off if against == "bytes" else drawn)(study, metric) as figure:
        return figures.write(figure, path)


def _check(metric: str, against: str) -> None:
    """ValueError for a figure that there is none of, or another scale."""
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r}: expected one of {', '.join(METRICS)}")
    if against not in AGAINST:
        raise ValueError(f"against={against!r}: expected one of {', '.join(AGAINST)}")


@contextmanager
def trade_off(study: Measured, metric: str) -> Iterator[Figure]:
    """A figure against the bytes that a replica sends."""
    most = max(row.replicas for row in study.rows)
    with _figure(6.5, 3.4 + 0.17 * (len(study.settings) + bool(study.problems))) as figure:
        axes = figure.subplots()
        axes.set_title(_title(study, f"{most:,}"))
        _draw_trade_off(axes, study, metric)
        figure.legend(*_entries(axes), loc="outside lower center", frameon=False)
        yield figure


def draw(axes: Axes, study: Measured, metric: str, against: str) -> Axes:
    """Draw one figure of a study into axes; returns them."""
    _check(metric, against)
    if against == "bytes":
        _draw_trade_off(axes, study, metric)
    elif len({row.replicas for row in study.rows}) > 1:
        _draw_lines(axes, study, metric, _styles(study.settings))
    else:
        _draw_dots(axes, study, metric, _styles(study.settings))
    return axes


def _draw_trade_off(axes: Axes, study: Measured, metric: str) -> None:
    """A mark for each setting, at the most replicas, and small ones for fewer."""
    from matplotlib.ticker import EngFormatter

    axes.set_xscale("log")
    for which in ("major", "minor"):
        getattr(axes.xaxis, f"set_{which}_formatter")(EngFormatter("B"))
    axes.set_xlabel("bytes that each replica sends")
    axes.set_ylabel(_label(metric))
    axes.grid(True)
    _scale(axes, "y", metric)
    for setting, style in _styles(study.settings).items():
        rows = study.of(setting)
        values, low, high = _values(rows, metric)
        y = np.where(np.isfinite(values) & ((values > 0) | (metric in SHARES)), values, np.nan)
        x = np.array([row.bytes_sent for row in rows])
        look = {"color": style["color"], "marker": style["marker"], "linestyle": "none"}
        fill = "white" if setting.stochastic else style["color"]
        axes.plot(x[:-1], y[:-1], **look, markersize=2.5, alpha=0.5)
        bar = _bar(values[-1], low[-1], high[-1])
        axes.errorbar(x[-1:], y[-1:], yerr=bar, **look, markerfacecolor=fill, label=style["label"])
        _ring(axes, x[-1:], y[-1:], rows[-1:], style["color"])
    _explain_rings(axes, study)
    _limits(axes, "y", metric)


def _bar(value: float, low: float, high: float) -> Any:
    """The two arms of a bar of the interval, as matplotlib takes them; None without one."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    # An arm to zero or below has no end on a logarithmic scale.
    return [[min(value - low, 0.999 * value) if value > 0 else 0.0], [high - value]]


RINGED = "ringed: messages shorter than the wire's blocks, or more bytes than unrounded values"
RING: dict[str, Any] = {
    "linestyle": "none",
    "marker": "o",
    "markersize": 10,
    "markerfacecolor": "none",
    "markeredgewidth": 0.9,
}


def _ring(axes: Axes, x: Any, y: Any, rows: list[Row], colour: str) -> None:
    """Rings around the marks of artefacts."""
    odd = np.array([bool(row.problems) for row in rows])
    if odd.any():
        axes.plot(np.asarray(x)[odd], np.asarray(y)[odd], markeredgecolor=colour, zorder=4, **RING)


def _entries(axes: Axes) -> tuple[list[Any], list[Any]]:
    """The entries of a legend, with that of the rings behind those of settings."""
    handles, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda k: names[k] == RINGED)
    return [handles[k] for k in order], [names[k] for k in order]


def _explain_rings(axes: Axes, study: Measured) -> None:
    """An entry of the legend, where any mark is ringed."""
    if any(row.problems for row in study.rows):
        axes.plot([], [], markeredgecolor="#666666", label=RINGED, **RING)


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
    legend = 0.17 * (math.ceil(len(styles) / columns) + bool(study.problems))
    with _figure(6.5, 3.4 + legend + 0.9 * overflow) as figure:
        if overflow:
            above, axes = figure.subplots(2, 1, sharex=True, height_ratios=(1, 4))
            _share(above, study, styles)
        else:
            above = axes = figure.subplots()
        above.set_title(_title(study, "R"))
        _draw_lines(axes, study, metric, styles)
        figure.legend(
            *_entries(axes),
            loc="outside lower center",
            ncols=1 if study.problems else columns,
            frameon=False,
        )
        yield figure


def _draw_lines(axes: Axes, study: Measured, metric: str, styles: Styles) -> None:
    _count_scale(axes, study)
    axes.set_ylabel(_label(metric))
    axes.grid(True, axis="y")
    _scale(axes, "y", metric)
    shifts = _shifts(study, metric)
    for setting, style in styles.items():
        _line(axes, study.of(setting), metric, style, shifts[setting])
    _explain_rings(axes, study)
    _limits(axes, "y", metric)


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
        drawn, _, _ = _values(study.of(setting), metric)
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


def _values(rows: list[Row], metric: str) -> tuple[Any, Any, Any]:
    """The values of a figure that are drawn, and the ends of their intervals."""
    found, low, high = (
        np.array([getattr(part, metric, math.nan) for part in parts])
        for parts in zip(*((row.mean, row.low, row.high) for row in rows), strict=True)
    )
    if metric == "cosine":
        return 1 - found, 1 - high, 1 - low
    if metric in SIGNED:
        ends = np.sort(np.abs([low, high]), axis=0)
        return np.abs(found), np.where(low * high < 0, 0.0, ends[0]), ends[1]
    return found, low, high


def _line(axes: Axes, rows: list[Row], metric: str, style: dict[str, Any], shift: float) -> None:
    """The mean, and a band: its confidence interval over inputs, or over seeds of one input.

    Marks are hollow where some of the result overflows. Where all of it does, or the figure is
    infinite, a cross is drawn at the upper edge.
    """
    x = shift * np.array([row.replicas for row in rows])
    values, low, high = _values(rows, metric)
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
    _ring(axes, x, y, rows, style["color"])
    if np.isfinite(low).any():
        # A band down to zero has no end on a logarithmic scale.
        least = 0.0 if metric in SHARES else 0.3 * np.min(np.where(y > 0, y, np.inf))
        low = np.maximum(low, least)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


@contextmanager
def _dots(study: Measured, metric: str) -> Iterator[Figure]:
    """One number of replicas: a row for each setting, or for each array of the input."""
    styles = _styles(study.settings)
    if study.tensors:
        rows = 1 + len(study.tensors)
        height = max(0.3, 0.09 * len(styles)) * rows + 0.17 * len(styles)
    else:
        height = 0.21 * len(styles) + 0.2 * bool(study.problems)
    with _figure(6.5, 1.1 + height) as figure:
        axes = figure.subplots()
        axes.set_title(_title(study, f"{study.rows[0].replicas:,}"), loc="left", x=0.0)
        _draw_dots(axes, study, metric, styles)
        handles, names = _entries(axes)
        if not study.tensors:  # settings have labels beside them
            chosen = [k for k, name in enumerate(names) if name == RINGED]
            handles, names = [handles[k] for k in chosen], [names[k] for k in chosen]
        if names:
            figure.legend(handles, names, loc="outside lower center", frameon=False)
        yield figure


def _draw_dots(axes: Axes, study: Measured, metric: str, styles: Styles) -> None:
    tensors: list[str | None] = [None, *study.tensors]
    labels = ["all", *study.tensors] if study.tensors else [setting.name for setting in styles]
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
    _explain_rings(axes, study)
    _limits(axes, "x", metric)


def _dot(
    axes: Axes, row: Row, y: float, metric: str, style: dict[str, Any], *, label: bool
) -> None:
    """A figure and its interval: hollow where some elements overflow, a cross where all do."""
    (x,), (low,), (high,) = _values([row], metric)
    share = row.mean.overflowed
    look = {name: style[name] for name in ("color", "marker")} | {
        "linestyle": "none",
        "label": style["label"] if label else None,
    }
    beside = {"va": "center", "fontsize": 7, "color": style["color"]}
    edge = axes.get_yaxis_transform()  # x counts from 0, the left edge, to 1
    if math.isfinite(x) and (x > 0 or metric in SHARES):
        fill = "white" if share else style["color"]
        axes.errorbar([x], [y], xerr=_bar(x, low, high), markerfacecolor=fill, **look)
        _ring(axes, [x], [y], [row], style["color"])
    elif math.isinf(x) or (share and math.isnan(x)):
        look["marker"] = OVERFLOW
        axes.plot([1], [y], transform=edge, clip_on=False, **look)
    elif x == 0:
        axes.plot([0], [y], transform=edge, clip_on=False, **look)
        axes.text(0.01, y, "0", transform=edge, **beside)
    if share or math.isinf(x):
        text = f"{100 * share:.3g}% overflow" if share else "infinite"
        axes.text(1.01, y, text, transform=edge, **beside)
