"""The demo's picture: what the order and the precision of a sum do to training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from gpusim.tools.demo.data import Digits
from gpusim.tools.demo.train import REFERENCE, Result
from gpusim.tools.study.output import replacing

__all__ = ["draw", "write"]

# Okabe and Ito's colours, which the colour-blind tell apart; the dashes serve print in grey.
STYLES = {
    "float64": ("#000000", "-"),
    "float32, linear": ("#0072B2", "-"),
    "float16, linear": ("#D55E00", "-"),
    "float16, reverse": ("#E69F00", (0, (5, 1.5))),
    "float16, ring": ("#CC79A7", (0, (1.5, 1))),
    "float16, tree": ("#009E73", "-"),
    "float16, added in float32": ("#56B4E9", (0, (6, 1.5, 1, 1.5))),
}
STYLE: dict[Any, Any] = {
    "axes.edgecolor": "#666666",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "font.size": 8,
    "grid.color": "#dddddd",
    "legend.columnspacing": 1.2,
    "legend.fontsize": 8,
    "legend.handlelength": 1.6,
    "lines.linewidth": 1.5,
    "lines.marker": ".",
    "lines.markersize": 3,
}


def write(results: Sequence[Result], digits: Digits, path: Path) -> Path:
    """Draw `results` into the PNG file `path`; returns `path`."""
    import matplotlib

    with matplotlib.rc_context(STYLE), replacing(path, "wb") as file:
        draw(results, digits).savefig(file, format="png", dpi=150)
    return path


def draw(results: Sequence[Result], digits: Digits) -> Figure:
    """By epoch: the error of the summed gradient, what it does to the weights, and the loss."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    errors, weights, losses = figure.subplots(1, 3)
    errors.set_title(f"Sum of {digits.replicas} gradients: error")
    errors.set_ylabel("relative error (2-norm)")
    weights.set_title("Weights: difference from float64")
    weights.set_ylabel("largest absolute difference")
    losses.set_title("Training loss")
    losses.set_ylabel("mean cross-entropy")
    for axes in (errors, weights, losses):
        axes.set_yscale("log")
        axes.set_xlabel("epoch")
        axes.grid(True, axis="y", linewidth=0.6)

    for result in results:
        run = result.run
        colour, dashes = STYLES[run.setting.name]
        line = {"color": colour, "linestyle": dashes, "label": run.setting.name}
        epochs = np.arange(1, len(run.weights) + 1)
        losses.plot(epochs, by_epoch(run.losses, digits.steps), **line)
        if run.setting is not REFERENCE:
            errors.plot(epochs, by_epoch(run.sum_errors, digits.steps), **line)
            weights.plot(epochs, result.weight_differences, **line)
    lines, names = losses.get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False)
    return figure


def by_epoch(values: np.ndarray, steps: int) -> np.ndarray:
    """The mean over each epoch's steps."""
    return values.reshape(-1, steps).mean(axis=1)
