"""The demo's picture: what the order and the precision of a sum do to training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpusim import figures
from gpusim.tools.demo.training import REFERENCE, Comparison
from gpusim.tools.digits import Digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "write"]

# The colours are those of `figures`; the dashes serve print in grey.
STYLES = {
    "float64": ("#000000", "-"),
    "float32, linear": ("#0072B2", "-"),
    "float16, linear": ("#D55E00", "-"),
    "float16, reverse": ("#E69F00", (0, (5, 1.5))),
    "float16, ring": ("#CC79A7", (0, (1.5, 1))),
    "float16, tree": ("#009E73", "-"),
    "float16, added in float32": ("#56B4E9", (0, (6, 1.5, 1, 1.5))),
}
STYLE: dict[str, Any] = {
    "legend.columnspacing": 1.2,
    "legend.handlelength": 1.6,
    "lines.linewidth": 1.5,
    "lines.marker": ".",
    "lines.markersize": 3,
}


def write(results: Sequence[Comparison], data: Digits, path: Path) -> Path:
    """Draw `results` into the file `path`; returns `path`."""
    with figures.styled(STYLE):
        return figures.write(draw(results, data), path)


def draw(results: Sequence[Comparison], data: Digits) -> Figure:
    """By epoch: the error of the summed gradient, what it does to the weights, and the loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    errors, weights, losses = figure.subplots(1, 3)
    errors.set_title(f"Sum of {data.replicas} gradients: error")
    errors.set_ylabel("relative error (2-norm)")
    weights.set_title("Weights: difference from float64")
    weights.set_ylabel("largest absolute difference")
    losses.set_title("Training loss")
    losses.set_ylabel("mean cross-entropy")
    for axes in (errors, weights, losses):
        axes.set_yscale("log")
        axes.set_xlabel("epoch")
        axes.grid(True, axis="y")

    for result in results:
        run = result.run
        colour, dashes = STYLES[run.variant.name]
        line: Any = {"color": colour, "linestyle": dashes, "label": run.variant.name}
        epochs = np.arange(1, len(run.weights) + 1)
        losses.plot(epochs, by_epoch(run.losses, data.steps), **line)
        if run.variant is not REFERENCE:
            errors.plot(epochs, by_epoch(run.sum_errors, data.steps), **line)
            weights.plot(epochs, result.weight_differences, **line)
    lines, names = losses.get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), frameon=False)
    return figure


def by_epoch(values: NDArray[Any], steps: int) -> NDArray[Any]:
    """The mean over each epoch's steps."""
    means: NDArray[Any] = values.reshape(-1, steps).mean(axis=1)
    return means
