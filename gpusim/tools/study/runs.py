"""The figures of a training study, by run and epoch.

Tables and pictures are made of them; `training.Training` adds the methods that call for these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpusim.formats import Format
from gpusim.tools.study.settings import ValueFormat, format_name

__all__ = ["COLUMNS", "StorageFormat", "Trained", "TrainingRun"]

COLUMNS = ("format", "test accuracy", "final loss", "progress", "unchanged")


@dataclass(frozen=True)
class StorageFormat:
    """One line of the picture: a format and how values are rounded to it."""

    dtype: ValueFormat
    rounding: str

    @property
    def name(self) -> str:
        return format_name(self.dtype) + (", stochastic" if self.rounding == "stochastic" else "")

    @property
    def accumulate(self) -> Format | None:
        """The format of sums of gradients; None is the default of Reduction."""
        return self.dtype if isinstance(self.dtype, Format) else None


@dataclass(frozen=True)
class TrainingRun:
    """One training, by epoch."""

    format: StorageFormat
    losses: NDArray[np.float64]  # on the training images, the mean over the epoch's steps
    accuracies: NDArray[np.float64]  # on the test images, after the epoch
    unchanged: NDArray[np.float64]  # share of the updates that left their weight as it was
    weights: list[NDArray[np.float32]]  # before the first step, then after each epoch


@dataclass(frozen=True)
class Trained:
    """All runs, first that of float32."""

    about: dict[str, Any]
    runs: list[TrainingRun]
    ways: list[NDArray[np.float64]] = field(init=False)
    """By epoch: the share of float32's displacement of the weights that a run reaches."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ways", [way(run, self.runs[0]) for run in self.runs])

    @property
    def title(self) -> str:
        about = self.about
        return (
            f"{' and '.join(about['held'])} in the format, {about['replicas']} replicas, "
            f"rate {about['rate']:g}"
        )

    @property
    def table(self) -> list[dict[str, Any]]:
        """A row for each run, after the last epoch."""
        return [
            dict(
                zip(
                    COLUMNS,
                    (
                        run.format.name,
                        float(run.accuracies[-1]),
                        float(run.losses[-1]),
                        float(way[-1]),
                        float(run.unchanged[-1]),
                    ),
                    strict=True,
                )
            )
            for run, way in zip(self.runs, self.ways, strict=True)
        ]


def way(run: TrainingRun, reference: TrainingRun) -> NDArray[np.float64]:
    """After each epoch, the share of the reference's displacement that the run reaches."""
    shares = []
    for here, there in zip(run.weights[1:], reference.weights[1:], strict=True):
        moved = here.astype(np.float64) - run.weights[0]
        wanted = there.astype(np.float64) - reference.weights[0]
        shares.append(float(np.sum(moved * wanted) / np.sum(wanted * wanted)))
    return np.array(shares)
